//! Ranks that are started one by one, as another launcher would: they connect only with the job's token, and train only
//! with the same program and settings.

use crate::case;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use case::{Alone, Case, port};

#[test]
fn a_token_file_that_others_can_read_is_rejected_with_one_error() {
    let case = Case::new();
    fs::write(case.path("token"), "secret\n").unwrap();
    let run = |mode: u32| {
        fs::set_permissions(case.path("token"), fs::Permissions::from_mode(mode)).unwrap();
        let port = port();
        let ranks: Vec<Alone> = (0..2)
            .map(|rank| {
                let mut command = case.command(&["--config", "ds.yaml", "--quiet", "--max-steps", "2"]);
                command.env("ZERO_TRAIN_TOKEN_FILE", case.path("token"));
                Alone::rank(command, rank, 2, port)
            })
            .collect();
        ranks.into_iter().map(Alone::end).collect::<Vec<_>>()
    };
    for (status, errors) in run(0o644) {
        assert_eq!(status, Some(2), "{errors}");
        assert!(errors.starts_with("error: ZERO_TRAIN_TOKEN_FILE: ") && errors.contains("has mode 644"), "{errors}");
        assert!(errors.contains("help: use a regular file that you own and only you can read: chmod 600"), "{errors}");
        assert_eq!(errors.lines().count(), 2, "{errors}");
    }
    for (status, errors) in run(0o600) {
        assert_eq!((status, errors.as_str()), (Some(0), ""));
    }
}

#[test]
fn ranks_with_different_settings_or_programs_refuse_to_start() {
    let case = Case::new();
    // The same program with one byte appended, which changes the checksum of the file.
    let other = case.path("other");
    // Another process makes the copy. This process may fork for another test while the file is open, and a file that a
    // child has open for writing cannot be executed.
    let copy = ["-c", "cp \"$0\" \"$1\" && printf ! >> \"$1\"", env!("CARGO_BIN_EXE_zero-train")];
    assert!(Command::new("sh").args(copy).arg(&other).status().unwrap().success());
    let started = |program: Option<&std::path::Path>, odd: &[&str]| {
        let port = port();
        let ranks: Vec<Alone> = (0..3)
            .map(|rank| {
                let args: &[&str] = if rank == 1 { odd } else { &[] };
                let args = [&["--config", "ds.yaml", "--quiet", "--max-steps", "2", "--out", "run"], args].concat();
                let command = match program {
                    Some(program) if rank == 1 => case.command_of(program, &args),
                    _ => case.command(&args),
                };
                Alone::rank(command, rank, 3, port)
            })
            .collect();
        ranks.into_iter().map(Alone::end).collect::<Vec<_>>()
    };
    let refused: [(Option<&std::path::Path>, &[&str], &str); 4] = [
        (None, &["--set", "zero_optimization.stage=2"], "zero_optimization.stage is 3 on rank 0 and 2 on rank 1"),
        (None, &["--set", "optimizer.params.lr=0.02"], "optimizer.params.lr is 0.01 on rank 0 and 0.02 on rank 1"),
        (None, &["--resume", "auto"], "--resume is not given on rank 0 and auto on rank 1"),
        (Some(&other), &[], "the program's file is "),
    ];
    for (program, odd, message) in refused {
        for (status, errors) in started(program, odd) {
            assert_eq!(status, Some(2), "{errors}");
            assert!(errors.starts_with("error: the ranks were started with different settings: "), "{errors}");
            assert!(errors.contains(message) && errors.lines().count() == 1, "{errors}");
        }
        assert!(!case.path("run").exists(), "a rejected run wrote files");
    }
    // This setting may differ between hosts.
    for (status, errors) in started(None, &["--set", "launcher.bind_cores_to_rank=false"]) {
        assert_eq!((status, errors.as_str()), (Some(0), ""));
    }
}

/// Runs two ranks. Rank 1 has another working directory, as on a host that shares no folder with the first one. Its
/// corpus is a copy of rank 0's corpus, modified by `change`.
fn in_two_folders(case: &Case, change: impl Fn(&mut Vec<u8>)) -> [(Option<i32>, String); 2] {
    let other = case.path("other");
    fs::create_dir(&other).unwrap();
    fs::copy(case.path("ds.yaml"), other.join("ds.yaml")).unwrap();
    let mut text = fs::read(case.path("corpus.txt")).unwrap();
    change(&mut text);
    fs::write(other.join("corpus.txt"), text).unwrap();
    let port = port();
    let ranks = [0, 1].map(|rank| {
        let mut command = case.command(&["--config", "ds.yaml", "--quiet", "--max-steps", "2", "--out", "run"]);
        if rank == 1 {
            command.current_dir(&other);
        }
        Alone::rank(command, rank, 2, port)
    });
    ranks.map(Alone::end)
}

#[test]
fn a_folder_that_ranks_do_not_share_is_a_warning_at_the_start() {
    let case = Case::new();
    let [(status, errors), _] = in_two_folders(&case, |_| ());
    assert_eq!(status, Some(3), "{errors}");
    assert!(errors.starts_with("warning: rank 1 cannot see run, the run folder: "), "{errors}");
}

#[test]
fn ranks_with_data_of_different_sizes_refuse_to_start() {
    let case = Case::new();
    for (status, errors) in in_two_folders(&case, |text| text.truncate(8000)) {
        assert_eq!(status, Some(2), "{errors}");
        let start = "error: the ranks were started with different settings: the number of training samples is ";
        assert!(errors.starts_with(start) && errors.contains(" on rank 0 and "), "{errors}");
    }
    assert!(!case.path("run").exists(), "a rejected run wrote files");
}

#[test]
fn ranks_with_other_data_of_the_same_size_refuse_to_start() {
    let case = Case::new();
    let change = |text: &mut Vec<u8>| text.reverse();
    for (status, errors) in in_two_folders(&case, change) {
        assert_eq!(status, Some(2), "{errors}");
        assert!(errors.contains("different settings: the checksum of training samples is "), "{errors}");
    }
}
