//! Creates the swap file, checks its folder, and reserves its space before training starts.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::Resource;

use crate::buffer::{ALIGNMENT, AlignedBuffer};
use crate::error::DiskError;

/// Checks that files of `bytes` bytes in total can be created in `folder`. Leaves no file behind. `bytes` is the total
/// over all ranks of this host that use the folder. Meant to be called before a launch: it does not reserve the space.
///
/// # Errors
/// Fails if the folder does not exist, is not writable, or has too little space.
pub fn check(folder: &Path, bytes: u64) -> Result<(), DiskError> {
    open(folder, false)?;
    let available = free_bytes(folder).map_err(unknown_space(folder))?;
    if available < bytes {
        return Err(DiskError::NoSpace { folder: folder.into(), needed: bytes, available });
    }
    Ok(())
}

/// An unnamed file with its space reserved.
pub(crate) struct Reserved {
    pub(crate) file: File,
    /// Whether reads and writes bypass the page cache.
    pub(crate) direct: bool,
    /// Messages for the user about the folder.
    pub(crate) notices: Vec<String>,
}

/// Creates a file of `size` zeros in `folder`; `size` is a multiple of [`ALIGNMENT`].
pub(crate) fn reserve(folder: &Path, size: u64, want_direct: bool) -> Result<Reserved, DiskError> {
    let (file, mut direct) = open(folder, want_direct)?;
    if let Some(limit) = rustix::process::getrlimit(Resource::Fsize).current.filter(|&limit| limit < size) {
        // Writing past the limit would raise SIGXFSZ, which ends the process.
        return Err(DiskError::refused(
            folder,
            format!("create a file of {size} bytes"),
            format!("`ulimit -f` is {limit} bytes"),
        ));
    }
    let available = free_bytes(folder).map_err(unknown_space(folder))?;
    match allocate(&file, size) {
        Ok(()) => {}
        Err(Errno::OPNOTSUPP | Errno::NOSYS) if available >= size => fill(&file, folder, size)?,
        Err(Errno::NOSPC | Errno::OPNOTSUPP | Errno::NOSYS) => {
            return Err(DiskError::NoSpace { folder: folder.into(), needed: size, available });
        }
        Err(errno) => return Err(DiskError::refused(folder, format!("reserve {size} bytes"), errno)),
    }
    if direct && !takes_direct(&file, size)? {
        let flags = rustix::fs::fcntl_getfl(&file).unwrap_or(OFlags::empty()) - OFlags::DIRECT;
        rustix::fs::fcntl_setfl(&file, flags)
            .map_err(|errno| DiskError::refused(folder, "turn O_DIRECT off", errno))?;
        direct = false;
    }
    let mut notices = vec![];
    if rustix::fs::fstatfs(&file).is_ok_and(|statistics| statistics.f_type as u64 == TMPFS) {
        // tmpfs accepts O_DIRECT but ignores it.
        direct = false;
        notices.push(format!("{}: the folder is on a tmpfs, so offloaded data stays in memory", folder.display()));
    } else if want_direct && !direct {
        notices.push(format!(
            "{}: the file system does not support O_DIRECT, so offloaded data goes through the page cache",
            folder.display()
        ));
    }
    Ok(Reserved { file, direct, notices })
}

/// TMPFS_MAGIC in linux/magic.h.
const TMPFS: u64 = 0x0102_1994;

/// Opens an unnamed file in the folder, with O_DIRECT if `direct` is set and the file system supports it.
fn open(folder: &Path, direct: bool) -> Result<(File, bool), DiskError> {
    let not_writable = |reason: String| DiskError::NotWritable { folder: folder.into(), reason };
    match fs::metadata(folder) {
        Ok(metadata) if !metadata.is_dir() => return Err(DiskError::NotAFolder { folder: folder.into() }),
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(DiskError::Missing { folder: folder.into() }),
        Err(error) if error.kind() == ErrorKind::NotADirectory => {
            return Err(DiskError::NotAFolder { folder: folder.into() });
        }
        Err(error) => return Err(not_writable(error.to_string())),
    }
    let wishes: &[bool] = if direct { &[true, false] } else { &[false] };
    let mut last = Errno::OPNOTSUPP;
    for &direct in wishes {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | if direct { OFlags::DIRECT } else { OFlags::empty() };
        for open in [unnamed, unlinked] {
            match open(folder, flags) {
                Ok(file) => return Ok((file, direct)),
                // The file system supports no unnamed files (old kernels return ISDIR for that), or no O_DIRECT.
                Err(errno @ (Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL)) => last = errno,
                Err(errno) => return Err(not_writable(errno.to_string())),
            }
        }
    }
    Err(not_writable(last.to_string()))
}

/// Opens a file that never has a name.
fn unnamed(folder: &Path, flags: OFlags) -> Result<File, Errno> {
    Ok(rustix::fs::open(folder, flags | OFlags::TMPFILE, Mode::RUSR | Mode::WUSR)?.into())
}

/// Opens a file and removes its name at once. A crash between the two system calls leaves an empty file behind, without
/// data.
fn unlinked(folder: &Path, flags: OFlags) -> Result<File, Errno> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let nanoseconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let path = folder.join(format!(".zero-train-{}-{nanoseconds}-{count}", std::process::id()));
    let file = rustix::fs::open(&path, flags | OFlags::CREATE | OFlags::EXCL, Mode::RUSR | Mode::WUSR);
    // A file system may create the file and then refuse O_DIRECT on it. After EEXIST, the name belongs to another file.
    if !matches!(file, Err(Errno::EXIST)) {
        let _ = fs::remove_file(&path);
    }
    file.map(File::from)
}

/// Returns the number of bytes that this user can still write to the file system of a folder.
///
/// # Errors
/// Fails if the file system does not report its free space.
pub fn free_bytes(folder: &Path) -> io::Result<u64> {
    let statistics = rustix::fs::statvfs(folder)?;
    Ok(statistics.f_bavail.saturating_mul(statistics.f_frsize))
}

fn unknown_space(folder: &Path) -> impl FnOnce(io::Error) -> DiskError + '_ {
    move |error| DiskError::refused(folder, "read the free space", error)
}

fn allocate(file: &File, size: u64) -> Result<(), Errno> {
    loop {
        match if size == 0 { Ok(()) } else { rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size) } {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

/// Reserves space by writing zeros, for file systems that have no other way.
fn fill(file: &File, folder: &Path, size: u64) -> Result<(), DiskError> {
    /// Large enough that the disk is the bottleneck.
    const CHUNK: u64 = 1 << 20;
    let zeros = AlignedBuffer::zeroed(CHUNK as usize)?;
    for at in (0..size).step_by(CHUNK as usize) {
        let bytes = CHUNK.min(size - at);
        file.write_all_at(&zeros.as_bytes()[..bytes as usize], at).map_err(|error| match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => DiskError::Full { folder: folder.into(), at, bytes },
            _ => DiskError::Write { folder: folder.into(), at, bytes, reason: error.to_string() },
        })?;
    }
    Ok(())
}

/// Returns whether the file, opened with O_DIRECT, accepts blocks with this crate's alignment. Some file systems refuse
/// O_DIRECT only at the first transfer, and some need a larger alignment than a page.
fn takes_direct(file: &File, size: u64) -> Result<bool, DiskError> {
    let page = AlignedBuffer::zeroed(ALIGNMENT)?;
    let refused =
        |transfer: std::io::Result<usize>| transfer.is_err_and(|error| error.kind() == ErrorKind::InvalidInput);
    Ok(size == 0 || !refused(file.write_at(page.as_bytes(), 0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unlinked_files_have_no_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let files = [(); 2].map(|()| unlinked(folder.path(), OFlags::RDWR).expect("a file"));
        assert!(fs::read_dir(folder.path()).expect("a folder").next().is_none());
        files[0].write_all_at(&[1], 0).expect("written");
        assert_eq!(files.map(|file| file.metadata().expect("open").len()), [1, 0]);
        assert_eq!(unlinked(&folder.path().join("missing"), OFlags::RDWR).map(drop), Err(Errno::NOENT));
    }

    #[test]
    fn fill_allocates_the_whole_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let size = (2 << 20) + ALIGNMENT as u64;
        for direct in [false, true] {
            let (file, _) = open(folder.path(), direct).expect("a file");
            fill(&file, folder.path(), size).expect("written");
            assert_eq!(file.metadata().expect("open").len(), size);
            // On file systems that count blocks, the file is fully allocated.
            let blocks = std::os::unix::fs::MetadataExt::blocks(&file.metadata().expect("open"));
            assert!(blocks == 0 || blocks * 512 >= size, "{blocks} blocks");
        }
    }

    #[test]
    fn probing_direct_io_leaves_the_page_zero() {
        let folder = tempfile::tempdir().expect("a folder");
        let (file, direct) = open(folder.path(), true).expect("a file");
        assert!(takes_direct(&file, 0).expect("nothing to try") && takes_direct(&file, 4096).expect("tried"));
        let mut page = AlignedBuffer::zeroed(ALIGNMENT).expect("memory");
        page.as_bytes_mut().fill(1);
        file.read_exact_at(page.as_bytes_mut(), 0).expect("a page");
        assert!(page.as_bytes().iter().all(|&byte| byte == 0), "with O_DIRECT: {direct}");
    }
}
