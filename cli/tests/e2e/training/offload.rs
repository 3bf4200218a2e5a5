//! Runs with state offloaded to a disk: they are bit-identical to runs in memory, and a failing disk is reported.

use crate::case;

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

use case::{Case, fail, rank_process, signal, succeed, text, wait_for};

/// Returns the arguments that offload all state to a disk. `path` is relative to the folder of the case. Blocks are
/// small enough that the tiny model fills several, and tiles are small enough that a layer has several.
fn on_disk(path: &str) -> Vec<String> {
    let folder = |section| format!("zero_optimization.{section}={{device: nvme, nvme_path: {path}}}");
    let sets = [
        "model.n_embd=48".into(),
        "aio.block_size=4096".into(),
        "zero_optimization.sub_group_size=2048".into(),
        folder("offload_optimizer"),
        folder("offload_param"),
    ];
    sets.into_iter().flat_map(|set| ["--set".into(), set]).collect()
}

/// Arguments for the same model in memory.
const IN_MEMORY: [&str; 2] = ["--set", "model.n_embd=48"];

fn command(case: &Case, path: &str, args: &[&str]) -> Command {
    let mut command = case.command(&["--config", "ds.yaml", "--plain"]);
    command.args(on_disk(path)).args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn train(case: &Case, path: &str, args: &[&str]) -> String {
    succeed(&mut command(case, path, args))
}

fn case_with_disk() -> Case {
    let case = Case::new();
    fs::create_dir(case.path("disk")).unwrap();
    case
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).unwrap().next().is_none()
}

/// Starts an endless run of two ranks, and waits for its third step.
fn endless(case: &Case, out: &str, args: &[&str]) -> Child {
    let args = [&["-n", "2", "--max-steps", "1000000", "--out", out], args].concat();
    let child = command(case, "disk", &args).spawn().unwrap();
    case.wait_for_steps(out, 3);
    child
}

/// Waits until the process ends, for at most a minute. Returns its exit status and standard error.
fn end(mut child: Child) -> (Option<i32>, String) {
    // A full pipe would block the process.
    let stdout = child.stdout.take();
    let reader = std::thread::spawn(move || stdout.map(|pipe| std::io::read_to_string(pipe).unwrap()));
    wait_for(|| child.try_wait().unwrap().is_some());
    reader.join().unwrap();
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    (status.code(), text(&stderr))
}

/// Runs the binary in a mount namespace with a tmpfs at `disk` in the case's folder, mounted with `options`. Prints the
/// reason and returns `None` if the system does not permit mounting.
fn behind_a_mount(case: &Case, options: &str, args: &[&str]) -> Option<Output> {
    let disk = case.path("disk");
    let mount = format!("mount -t tmpfs -o {options} none '{}'", disk.display());
    let unshare = |script: &str| {
        let mut outside = Command::new("unshare");
        outside.args(["-Urm", "sh", "-c", script, "sh"]);
        outside
    };
    match unshare(&mount).output() {
        Ok(output) if output.status.success() => {}
        refused => {
            println!("skipped: no disk of its own can be mounted here: {refused:?}");
            return None;
        }
    }
    let inside = command(case, "disk", args);
    let mut outside = unshare(&format!("{mount} && exec \"$@\""));
    outside.arg(inside.get_program()).args(inside.get_args()).current_dir(case.path("")).stdin(Stdio::null());
    for (name, value) in inside.get_envs() {
        match value {
            Some(value) => outside.env(name, value),
            None => outside.env_remove(name),
        };
    }
    Some(outside.output().unwrap())
}

#[test]
fn an_offloaded_run_is_bit_identical_and_reports_where_its_state_is() {
    let case = case_with_disk();
    for ranks in ["1", "2"] {
        case.train(&[&["--quiet", "-n", ranks, "--out", "memory"], &IN_MEMORY[..]].concat());
        let out = train(&case, "disk", &["-n", ranks, "--out", "offloaded"]);
        assert_eq!(case.losses("memory"), case.losses("offloaded"), "{ranks} ranks");
        assert_eq!(case.shards("memory", 20), case.shards("offloaded", 20), "{ranks} ranks");
        let line = "of rank 0 in disk: optimizer state, gradients, parameters";
        assert_eq!(out.matches(line).count(), 1, "{out}");
        for rank in case.report("offloaded")["memory"]["ranks"].as_array().unwrap() {
            let [bytes, read, written] =
                ["bytes", "read_bytes", "written_bytes"].map(|key| rank["disk"][key].as_u64().unwrap());
            assert!(bytes > 0 && read > 20 * bytes && written > 10 * bytes, "{rank}");
        }
        assert!(is_empty(&case.path("disk")));
        for out in ["memory", "offloaded"] {
            fs::remove_dir_all(case.path(out)).unwrap();
        }
    }
}

#[test]
fn offloaded_layer_inputs_count_among_the_bytes_on_disk() {
    let case = case_with_disk();
    let inputs = "activation_checkpointing={device: nvme, nvme_path: disk}";
    let args = ["--config", "ds.yaml", "-n", "2", "--set", inputs, "--set", "model.n_layer=4"];
    let planned: Value = serde_json::from_str(&case.succeed(&[&["plan", "--json"], &args[..]].concat())).unwrap();
    let planned = planned["stages"][0]["disk_bytes"]["activations"].as_u64().unwrap();
    assert!(planned > 0);
    let out = case.train(&[&args[..], &["--plain", "--out", "offloaded", "--max-steps", "3"]].concat());
    assert!(out.contains("of rank 0 for checkpointed activations"), "{out}");
    for rank in case.report("offloaded")["memory"]["ranks"].as_array().unwrap() {
        let [bytes, read, written] =
            ["bytes", "read_bytes", "written_bytes"].map(|key| rank["disk"][key].as_u64().unwrap());
        assert_eq!(bytes, planned, "{rank}");
        assert!(read == written && read >= 3 * bytes / 2, "{rank}");
    }
}

#[test]
fn a_model_too_small_to_offload_is_reported() {
    let case = case_with_disk();
    let offload = "zero_optimization.offload_optimizer={device: nvme, nvme_path: disk}";
    let said = case.train(&["--plain", "--out", "small", "--max-steps", "1", "--set", offload]);
    assert!(said.contains("\ndisk: rank 0 offloads nothing, because segments smaller than aio.block_size"), "{said}");
}

#[test]
fn two_runs_can_offload_to_the_same_path() {
    let case = case_with_disk();
    case.train(&[&["--quiet", "--out", "memory"], &IN_MEMORY[..]].concat());
    let both = ["one", "two"].map(|out| command(&case, "disk", &["--out", out]).spawn().unwrap());
    for child in both {
        let (status, errors) = end(child);
        assert_eq!(status, Some(0), "{errors}");
    }
    for out in ["one", "two"] {
        assert_eq!(case.losses("memory"), case.losses(out));
        assert_eq!(case.shards("memory", 20), case.shards(out, 20));
    }
    assert!(is_empty(&case.path("disk")));
}

#[test]
fn an_unsuitable_path_is_an_error_before_any_rank_starts() {
    let case = case_with_disk();
    for (path, message) in [("nowhere", "nowhere: no such folder"), ("corpus.txt", "not a folder")] {
        for section in ["offload_optimizer", "offload_param"] {
            let other = format!("zero_optimization.{section}={{device: nvme, nvme_path: {path}}}");
            let errors = fail(2, &mut command(&case, "disk", &["-n", "2", "--set", &other]));
            let key = format!("in: zero_optimization.{section}.nvme_path");
            assert!(errors.contains(message) && errors.contains(&key) && errors.contains("help: "), "{errors}");
            assert_eq!(errors.matches("error: ").count(), 1, "{errors}");
        }
    }
    assert!(!case.path("run").exists() && is_empty(&case.path("disk")));
}

#[test]
fn full_and_read_only_disks_are_errors_before_any_rank_starts() {
    let case = case_with_disk();
    for (options, message) in [("size=64k", ", but only 65536 bytes are free"), ("ro", "Read-only file system")] {
        let Some(output) = behind_a_mount(&case, options, &["-n", "2"]) else { return };
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        let key = "in: zero_optimization.offload_optimizer.nvme_path";
        assert!(errors.contains(message) && errors.contains(key) && errors.contains("help: "), "{errors}");
        assert_eq!(errors.matches("error: ").count(), 1, "{errors}");
    }
    // Only the layer inputs are offloaded to the folder here, and they do not fit either.
    let only_inputs = ["offload_optimizer", "offload_param"].map(|key| format!("zero_optimization.{key}.device=none"));
    let inputs = "activation_checkpointing={device: nvme, nvme_path: disk}";
    let args = ["-n", "2", "--set", &only_inputs[0], "--set", &only_inputs[1], "--set", inputs];
    let Some(output) = behind_a_mount(&case, "size=8k", &args) else { return };
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("in: activation_checkpointing.nvme_path"), "{errors}");
    assert!(!case.path("run").exists());
}

#[test]
fn a_tmpfs_is_reported_once_and_training_is_bit_identical() {
    let case = case_with_disk();
    case.train(&[&["--quiet", "-n", "2", "--out", "memory"], &IN_MEMORY[..]].concat());
    let Some(output) = behind_a_mount(&case, "size=64m", &["-n", "2"]) else { return };
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(case.losses("memory"), case.losses("run"));
    assert_eq!(text(&output.stdout).matches("the folder is on a tmpfs").count(), 1, "{}", text(&output.stdout));
}

#[test]
fn a_truncated_file_ends_all_ranks_and_is_named() {
    let case = case_with_disk();
    for rank in [0, 1] {
        let child = endless(&case, &format!("run-{rank}"), &[]);
        let victim = rank_process(child.id(), rank);
        let disk = fs::canonicalize(case.path("disk")).unwrap();
        let open = fs::read_dir(format!("/proc/{victim}/fd")).unwrap().map(|entry| entry.unwrap().path());
        let files: Vec<_> =
            open.filter(|link| fs::read_link(link).is_ok_and(|target| target.starts_with(&disk))).collect();
        assert_eq!(files.len(), 2, "expected one file for the optimizer and one for the parameters");
        File::options().write(true).open(&files[rank]).unwrap().set_len(4096).unwrap();
        let (status, errors) = end(child);
        assert_eq!(status, Some(1), "{errors}");
        assert!(errors.contains("the swap file was truncated") && errors.contains("disk"), "{errors}");
        assert!(errors.contains("help: no other program may change the file during a run"), "{errors}");
        assert!(is_empty(&disk));
    }
}

#[test]
fn a_killed_rank_leaves_no_file_and_the_resumed_run_is_bit_identical() {
    let case = case_with_disk();
    case.train(&[&["--quiet", "-n", "2", "--out", "memory"], &IN_MEMORY[..]].concat());
    let child = endless(&case, "run", &["--set", "training.save_every=2", "--set", "training.keep_last=0"]);
    signal(rank_process(child.id(), 1), "KILL");
    let (status, errors) = end(child);
    assert_eq!(status, Some(4), "{errors}");
    assert!(errors.contains("rank 1 was killed by signal 9"), "{errors}");
    assert!(errors.contains("rank 0") && errors.contains('#'), "rank 0 must name itself and the operation: {errors}");
    assert!(is_empty(&case.path("disk")));
    // On a fast machine, the run may have passed step 20. Later checkpoints are deleted so that there are steps left.
    let checkpoints = case.path("run/checkpoints");
    for step in (12..).step_by(2).map(|step| checkpoints.join(format!("step-{step:08}"))) {
        if !step.exists() {
            break;
        }
        fs::remove_dir_all(step).unwrap();
    }
    let out = train(&case, "disk", &["-n", "2", "--resume", "auto"]);
    assert!(out.contains("resumed from run/checkpoints/step-000000"), "{out}");
    assert_eq!(case.losses("memory"), case.losses("run"));
    assert_eq!(case.shards("memory", 20), case.shards("run", 20));
}
