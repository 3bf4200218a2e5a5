//! Faults of a swap file: each is reported at once as an error that says where it occurred, and leaves no file behind.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::place;
use zero_tier::{ALIGNMENT, AlignedBuffer, Backend, DiskError, Options, Pending, SwapFile, check};

const PAGE: u64 = ALIGNMENT as u64;

/// Returns options for io_uring and for threads.
fn both() -> [Options; 2] {
    [Options::default(), Options { io_uring: false, ..Options::default() }]
}

fn filled(len: usize, value: f32) -> AlignedBuffer {
    let mut buffer = AlignedBuffer::zeroed(len).expect("memory");
    buffer.as_f32_mut().fill(value);
    buffer
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).expect("a folder").next().is_none()
}

/// Opens this process's unnamed swap file in `folder` a second time, through /proc.
fn reopen(folder: &Path) -> File {
    let links = fs::read_dir("/proc/self/fd").expect("open files").map(|entry| entry.expect("an entry").path());
    let is_ours = |link: &PathBuf| fs::read_link(link).is_ok_and(|target| target.starts_with(folder));
    let link = links.into_iter().find(is_ours).expect("the swap file");
    File::options().write(true).open(link).expect("the same file again")
}

#[test]
fn reads_and_writes_detect_a_truncated_file() {
    for options in both() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = SwapFile::create(folder.path(), 10 * PAGE, &options).expect("a file");
        file.write(0, filled(10 * ALIGNMENT, 1.0), 10 * ALIGNMENT).wait().expect("a whole file");
        reopen(folder.path()).set_len(4 * PAGE + 100).expect("cut");

        let read = |at: u64, pages: usize| file.read(at * PAGE, filled(pages * ALIGNMENT, 0.0), pages * ALIGNMENT);
        let under_way: Vec<Pending> = [(0, 4), (2, 4), (4, 1), (8, 2)].map(|(at, pages)| read(at, pages)).into();
        let mut results = under_way.into_iter().map(Pending::wait);
        assert!(results.next().expect("four").expect("the remaining pages").as_f32().iter().all(|&x| x == 1.0));
        for (result, (at, bytes)) in results.zip([(4 * PAGE, 2 * PAGE), (4 * PAGE, PAGE), (8 * PAGE, 2 * PAGE)]) {
            let folder = folder.path().to_path_buf();
            assert_eq!(
                result.expect_err("the end is gone"),
                DiskError::CutShort { folder, end: 4 * PAGE + 100, at, bytes }
            );
        }
        // Without a check, this write would extend the file, and pages 4 to 7 would read as zeros.
        let error = file.write(8 * PAGE, filled(ALIGNMENT, 2.0), ALIGNMENT).wait().expect_err("the end is gone");
        assert!(error.to_string().contains("the swap file was truncated"), "{error}");
        assert!(matches!(read(6, 1).wait(), Err(DiskError::CutShort { .. })));
    }
}

#[test]
fn unusable_folders_have_distinct_errors() {
    let folder = tempfile::tempdir().expect("a folder");
    let inside = |name: &str| folder.path().join(name);
    fs::write(inside("file"), "").expect("a file");
    let error = |path: PathBuf| {
        let error = check(&path, 0).expect_err("no place for a file");
        assert_eq!(SwapFile::create(&path, PAGE, &Options::default()).expect_err("the same"), error);
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
        error
    };
    assert!(matches!(error(inside("missing")), DiskError::Missing { .. }));
    assert!(matches!(error(inside("file")), DiskError::NotAFolder { .. }));
    assert!(matches!(error(inside("file").join("below")), DiskError::NotAFolder { .. }));
    // A file system in which no user can create files, not even root.
    assert!(matches!(error("/proc".into()), DiskError::NotWritable { .. }));
}

#[test]
fn checking_space_leaves_no_file() {
    let folder = tempfile::tempdir().expect("a folder");
    check(folder.path(), 1 << 20).expect("a megabyte");
    let needed = 1 << 60;
    for error in [
        check(folder.path(), needed).expect_err("an exabyte"),
        SwapFile::create(folder.path(), needed, &Options::default()).map(drop).expect_err("an exabyte"),
    ] {
        // Some file systems have a smaller maximum file size and report that first.
        let told =
            matches!(&error, DiskError::NoSpace { needed: n, available, .. } if *n == needed && *available < needed);
        assert!(told || matches!(&error, DiskError::Refused { .. }), "{error}");
    }
    assert!(is_empty(folder.path()));
}

#[test]
fn full_and_read_only_disks_are_errors() {
    place::with_own_disk("faults::full_and_read_only_disks_are_errors", |disk, remount_read_only| {
        check(disk, 900_000).expect("less than it has");
        let too_much = check(disk, 2_000_000).expect_err("more than it has");
        assert_eq!(
            SwapFile::create(disk, 2_000_000, &Options::default()).map(drop).expect_err("more than it has").help(),
            too_much.help()
        );
        let DiskError::NoSpace { needed: 2_000_000, available: 1_048_576, .. } = too_much else { panic!("{too_much}") };

        for options in both() {
            let file = SwapFile::create(disk, 512 << 10, &options).expect("half of it");
            assert!(file.notices().iter().any(|notice| notice.contains("tmpfs")), "{:?}", file.notices());
            let write = |at: u64| file.write(at, filled(64 << 10, 1.0), 64 << 10);
            write(0).wait().expect("there is space");
            // Breaks the reservation: frees the space of half of the file, and fills the disk with another file.
            let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(reopen(disk), punch, 256 << 10, 256 << 10).expect("a hole");
            fs::write(disk.join("other"), vec![1; 800 << 10]).expect_err("it fills the disk");
            let under_way = [write(256 << 10), write(64 << 10), write(320 << 10)].map(Pending::wait);
            let [Err(full), Ok(_), Err(_)] = under_way else { panic!("{under_way:?}") };
            assert_eq!(full, DiskError::Full { folder: disk.into(), at: 256 << 10, bytes: 64 << 10 });
            // Writes succeed again once there is space.
            fs::remove_file(disk.join("other")).expect("gone");
            write(256 << 10).wait().expect("there is space again");
        }
        remount_read_only();
        let error = check(disk, 0).expect_err("read-only");
        assert!(matches!(&error, DiskError::NotWritable { reason, .. } if reason.contains("Read-only")), "{error}");
    });
}

#[test]
fn two_files_in_one_folder_are_independent() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = [1.0, 2.0].map(|value| {
        let file = SwapFile::create(folder.path(), 4 * PAGE, &Options::default()).expect("a file");
        file.write(PAGE, filled(ALIGNMENT, value), ALIGNMENT).wait().expect("written");
        (file, value)
    });
    assert!(is_empty(folder.path()));
    for (file, value) in files {
        let buffer = file.read(0, filled(4 * ALIGNMENT, 9.0), 4 * ALIGNMENT).wait().expect("read");
        let pages: Vec<f32> = buffer.as_f32().chunks(1024).map(|page| page[1023]).collect();
        assert_eq!(pages, [0.0, value, 0.0, 0.0]);
    }
}

#[test]
fn a_killed_process_leaves_no_file() {
    const NAME: &str = "faults::a_killed_process_leaves_no_file";
    if let Some(folder) = place::given() {
        let file = SwapFile::create(&folder, 64 << 20, &Options::default()).expect("a file");
        println!("ready");
        loop {
            let writes = [0, 8 << 20].map(|at| file.write(at, filled(8 << 20, 1.0), 8 << 20));
            for write in writes {
                write.wait().expect("written");
            }
        }
    }
    let folder = tempfile::tempdir().expect("a folder");
    for _ in 0..3 {
        let mut child = place::again(NAME, folder.path()).stdout(Stdio::piped()).spawn().expect("a child");
        let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        assert!(lines.any(|line| line.is_ok_and(|line| line.contains("ready"))), "the child ended");
        child.kill().expect("killed");
        child.wait().expect("waited for");
        assert!(is_empty(folder.path()));
    }
}

#[test]
fn threads_replace_a_refused_io_uring() {
    const NAME: &str = "faults::threads_replace_a_refused_io_uring";
    let Some(folder) = place::given() else {
        let folder = tempfile::tempdir().expect("a folder");
        let output = place::again(NAME, folder.path()).output().expect("a child");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    };
    // Makes the kernel refuse a ring: only one file descriptor is left, and the swap file takes it.
    let used = fs::read_dir("/proc/self/fd").expect("open files").map(|entry| entry.expect("an entry").file_name());
    let highest = used.filter_map(|name| name.to_str()?.parse::<u64>().ok()).max().expect("standard output");
    let gaps: Vec<File> = (0..highest).map(|_| File::open("/dev/null").expect("a file")).collect();
    let limit = rustix::process::Resource::Nofile;
    let all = rustix::process::getrlimit(limit);
    let next = gaps.iter().map(|gap| std::os::fd::AsRawFd::as_raw_fd(gap) as u64).max().unwrap_or(highest);
    let few = rustix::process::Rlimit { current: Some(next + 2), ..all };
    rustix::process::setrlimit(limit, few).expect("a lower limit");
    let file = SwapFile::create(&folder, PAGE, &Options::default()).expect("a file");
    rustix::process::setrlimit(limit, all).expect("the limit before");
    assert_eq!(file.backend(), Backend::Positioned);
    let refusals = file.notices().iter().filter(|notice| notice.contains("io_uring is unavailable")).count();
    assert_eq!(refusals, 1, "{:?}", file.notices());
    file.write(0, filled(ALIGNMENT, 3.0), ALIGNMENT).wait().expect("written");
    assert_eq!(file.read(0, filled(ALIGNMENT, 0.0), ALIGNMENT).wait().expect("read").as_f32(), [3.0; 1024]);
    // If io_uring was not requested, no refusal is reported.
    let quiet = SwapFile::create(&folder, PAGE, &Options { io_uring: false, ..Options::default() }).expect("a file");
    assert!(!quiet.notices().iter().any(|notice| notice.contains("io_uring")), "{:?}", quiet.notices());
}

#[test]
fn dropping_the_file_or_the_pending_values_is_sound() {
    for options in both() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = SwapFile::create(folder.path(), 32 << 20, &options).expect("a file");
        let write = |at: u64| file.write(at << 20, filled(4 << 20, 1.0), 4 << 20);
        for at in 0..8 {
            drop(write(at));
        }
        assert!(file.read(0, filled(4096, 0.0), 4096).wait().expect("read").as_f32().iter().all(|&x| x == 1.0));
        let under_way: Vec<Pending> = (0..28).map(write).collect();
        drop(file);
        for pending in under_way {
            let result = pending.wait();
            assert!(matches!(result, Ok(_) | Err(DiskError::Closed { .. })), "{result:?}");
        }
    }
}

#[test]
fn requests_and_options_out_of_range_are_errors() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = SwapFile::create(folder.path(), 3 * PAGE + 1, &Options::default()).expect("a file");
    assert_eq!(file.size(), 4 * PAGE);
    for (at, len) in
        [(1, 4096), (0, 4095), (PAGE, 4 * 4096), (u64::MAX - 4095, 4096), (8 * PAGE, 0), (0, usize::MAX - 4095)]
    {
        let buffer = || AlignedBuffer::zeroed(4 * ALIGNMENT).expect("memory");
        for pending in [file.read(at, buffer(), len), file.write(at, buffer(), len)] {
            assert!(matches!(pending.wait(), Err(DiskError::Invalid { .. })), "{len} bytes at {at}");
        }
    }
    let small = AlignedBuffer::zeroed(1).expect("memory");
    assert!(matches!(file.read(0, small, 8192).wait(), Err(DiskError::Invalid { .. })));
    assert_eq!(file.read(4 * PAGE, AlignedBuffer::zeroed(5).expect("memory"), 0).wait().expect("nothing").len(), 5);

    let default = Options::default;
    for options in [
        Options { block_size: 0, ..default() },
        Options { block_size: 5000, ..default() },
        Options { queue_depth: 0, ..default() },
        Options { queue_depth: usize::MAX, ..default() },
        Options { intra_op_parallelism: 0, ..default() },
        Options { intra_op_parallelism: 65, ..default() },
    ] {
        let error = SwapFile::create(folder.path(), PAGE, &options).map(drop).expect_err("out of range");
        assert!(matches!(error, DiskError::Invalid { .. }), "{error}");
    }
    let nothing = SwapFile::create(folder.path(), 0, &Options::default()).expect("an empty file");
    assert_eq!(nothing.size(), 0);
}

#[test]
fn a_file_size_limit_is_an_error_and_not_a_signal() {
    const NAME: &str = "faults::a_file_size_limit_is_an_error_and_not_a_signal";
    let Some(folder) = place::given() else {
        let folder = tempfile::tempdir().expect("a folder");
        let output = place::again(NAME, folder.path()).output().expect("a child");
        assert!(output.status.success(), "{:?} {}", output.status, String::from_utf8_lossy(&output.stdout));
        assert!(is_empty(folder.path()));
        return;
    };
    let limit = rustix::process::Resource::Fsize;
    let few = rustix::process::Rlimit { current: Some(1 << 20), ..rustix::process::getrlimit(limit) };
    rustix::process::setrlimit(limit, few).expect("a lower limit");
    SwapFile::create(&folder, 1 << 20, &Options::default()).expect("just within");
    let error = SwapFile::create(&folder, 2 << 20, &Options::default()).map(drop).expect_err("more");
    assert!(error.to_string().contains("ulimit -f"), "{error}");
}
