//! Sets every key and option that names a file or a folder to a path that is missing, of the wrong kind, or unreadable.
//! Each of these paths causes one error with the path, the key and advice. The offload tests cover `nvme_path`. Also
//! tests incomplete launcher environments.

use crate::case;

use std::fs;
use std::os::unix::fs::symlink;

use case::{Case, text};

/// Creates a case with a folder `dir`, a file `file`, and `loop`, a link to itself that cannot be read.
fn case() -> Case {
    let case = Case::new();
    fs::write(case.path("ds.yaml"), case::CONFIG.replace(", eval_fraction: 0.1", "")).unwrap();
    fs::create_dir(case.path("dir")).unwrap();
    fs::write(case.path("file"), "{").unwrap();
    symlink("loop", case.path("loop")).unwrap();
    case
}

/// Runs the command and checks that its error is complete.
fn refused(case: &Case, args: &[&str], statuses: &[i32], path: &str, key: &str) {
    let output = case.command(args).output().unwrap();
    let errors = text(&output.stderr);
    assert!(
        output.status.code().is_some_and(|code| statuses.contains(&code)),
        "{args:?}: {:?}: {errors}",
        output.status
    );
    assert_eq!(errors.matches("error: ").count(), 1, "{args:?}: {errors}");
    assert!(!errors.contains("panicked"), "{args:?}: {errors}");
    let first = errors.find(path).unwrap_or_else(|| panic!("{args:?}: {path} is not in {errors}"));
    let named = errors.find(&format!("\n  in: {key}")).unwrap_or_else(|| panic!("{args:?}: {key} is not in {errors}"));
    let help = errors.find("\n  help: ").unwrap_or_else(|| panic!("{args:?}: no help in {errors}"));
    assert!(named < help && (first < help), "{args:?}: {errors}");
    if errors.contains("No such file") && !key.contains("cost_table") {
        assert!(errors.contains("; a relative path begins at /"), "{args:?}: {errors}");
    }
}

#[test]
fn bad_input_paths_are_rejected() {
    let case = case();
    for path in ["missing", "dir", "loop", "file/below"] {
        for key in ["data.tokenizer", "data.train", "data.eval", "training.initial_weights", "model.pretrained"] {
            let set = format!("{key}={path}");
            for ranks in ["1", "2"] {
                let args = ["--config", "ds.yaml", "--quiet", "-n", ranks, "--set", &set];
                // The folder's `config.json` is part of the configuration, so some errors are configuration errors.
                let statuses: &[i32] = if key == "model.pretrained" { &[2, 3] } else { &[3] };
                refused(&case, &args, statuses, path, key);
            }
        }
        let train = ["--config", "ds.yaml", "--quiet"];
        refused(&case, &[&train[..], &["--resume", path]].concat(), &[3], path, "--resume");
        let table = format!("training.cost_table={path}");
        refused(&case, &[&train[..], &["--set", &table]].concat(), &[2], path, "training.cost_table");
        refused(&case, &["plan", "--config", "ds.yaml", "--costs", path], &[2], path, "training.cost_table");
        refused(&case, &["--config", path], &[2], path, path);
        refused(&case, &["check", "--config", "ds.yaml", "--config", path], &[2], path, path);
        for what in ["inspect", "verify"] {
            refused(&case, &["checkpoint", what, path], &[3], path, "<DIR>");
        }
        refused(&case, &["checkpoint", "export", path, "--out", "out"], &[3], path, "<DIR>");
        refused(&case, &["checkpoint", "import", path, "--out", "out"], &[2], path, "<DIR>");
    }
    // A glob without a match, and a file that is not a tokenizer.
    refused(&case, &["--config", "ds.yaml", "--set", "data.train=none/*.txt"], &[3], "none/*.txt", "data.train");
    refused(&case, &["--config", "ds.yaml", "--set", "data.tokenizer=file"], &[3], "file", "data.tokenizer");
    assert!(!case.path("run").exists() && !case.path("out").exists(), "nothing is written");
}

#[test]
fn bad_output_paths_are_rejected() {
    let case = case();
    for path in ["file", "file/below", "loop"] {
        for ranks in ["1", "2"] {
            let args = ["--config", "ds.yaml", "--quiet", "-n", ranks, "--out", path];
            refused(&case, &args, &[3], path, "training.output_dir");
        }
        let args = ["autotune", "--config", "ds.yaml", "--quiet", "--out", path];
        refused(&case, &args, &[1], path, "autotuning.results_dir");
        let args = ["launch", "--nproc-per-node", "2", "--log-dir", path, "--config", "ds.yaml", "--quiet"];
        refused(&case, &args, &[1], path, "--log-dir");
    }
    assert_eq!(fs::read(case.path("file")).unwrap(), b"{", "it stays as it was");
}

#[test]
fn programs_that_cannot_be_started() {
    let case = case();
    for path in ["./missing", "./dir", "./file", "./loop"] {
        let output = case.command(&["launch", "--nproc-per-node", "2", path]).output().unwrap();
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(errors.starts_with(&format!("error: cannot start rank 0, `{path}`: ")), "{errors}");
        assert_eq!(errors.matches("\n  help: ").count(), 1, "{errors}");
    }
}

#[test]
fn an_incomplete_launcher_environment_is_rejected() {
    let case = Case::new();
    for (variables, said) in [
        (&[("WORLD_SIZE", "2")][..], Some("WORLD_SIZE is set but RANK is not: set both or neither")),
        (&[("RANK", "1")], Some("RANK is set but WORLD_SIZE is not: set both or neither")),
        (&[("RANK", "0")], Some("RANK is set but WORLD_SIZE is not: set both or neither")),
        (
            &[("RANK", "1"), ("WORLD_SIZE", "2")],
            Some(
                "the address that the 2 ranks connect to is missing: set MASTER_ADDR to the host of rank 0, and MASTER_PORT",
            ),
        ),
        (&[("RANK", "0"), ("WORLD_SIZE", "1")], None),
        (&[("WORLD_SIZE", "1")], None),
    ] {
        let mut command = case.command(&["--config", "ds.yaml", "--quiet", "--max-steps", "2"]);
        let output = command.envs(variables.iter().copied()).output().unwrap();
        let errors = text(&output.stderr);
        let (status, expected) = said.map_or((0, String::new()), |said| (2, format!("error: {said}\n")));
        assert_eq!((output.status.code(), errors), (Some(status), expected), "{variables:?}");
        assert_eq!(case.path("run").exists(), said.is_none(), "{variables:?}");
    }
}

#[test]
fn a_number_of_ranks_must_be_that_of_the_launcher() {
    let case = Case::new();
    for (ranks, status) in [("2", 2), ("1", 0)] {
        let mut command = case.command(&["--config", "ds.yaml", "--quiet", "--max-steps", "2", "-n", ranks]);
        let output = command.env("RANK", "0").env("WORLD_SIZE", "1").output().unwrap();
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{errors}");
        let told =
            errors.starts_with("error: the option asks for 2 ranks, but the launcher started 1 rank\n  in: -n\n");
        assert_eq!(told, ranks == "2", "{errors}");
        assert_eq!(case.path("run").exists(), ranks == "1");
    }
}
