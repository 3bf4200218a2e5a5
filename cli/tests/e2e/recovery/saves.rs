//! Saves under adverse conditions: a kill at every point of a save, a full disk, a concurrent run, damaged checkpoints.

use crate::case;

use std::fs;
use std::process::Stdio;

use case::{Case, fail, rank_process, signal, text};
use zero_checkpoint::FAILPOINTS;

/// Returns the steps of the committed checkpoints.
fn committed(case: &Case, out: &str) -> Vec<u64> {
    let all = zero_checkpoint::committed(&case.path(out).join("checkpoints")).unwrap();
    all.into_iter().map(|(step, _)| step).collect()
}

/// Returns the names in the `checkpoints` folder other than `step-…` and `latest`.
fn left_over(case: &Case, out: &str) -> Vec<String> {
    let names = fs::read_dir(case.path(out).join("checkpoints")).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| !name.starts_with("step-") && name != "latest").collect()
}

/// Kills one rank at each failpoint of its second save. The committed checkpoints must be intact, and the resumed run
/// must be bit-identical to an undisturbed one.
fn a_kill_at_any_point_loses_nothing(asynchronous: bool) {
    let case = Case::new();
    let saves = format!("training.save_async={asynchronous}");
    let common = ["--quiet", "-n", "2", "--max-steps", "4", "--set", "training.save_every=1", "--set", &saves];
    case.train(&[&common[..], &["--out", "whole"]].concat());
    let (losses, shards) = (case.losses("whole"), case.shards("whole", 4));
    let mut killed = 0;
    for (index, point) in FAILPOINTS.iter().enumerate() {
        let ranks = if point.starts_with("save::shard") { 2 } else { 1 };
        for rank in 0..ranks {
            let out = format!("{}-{rank}", point.replace("::", "-"));
            let mut run = case.command(&[&["--config", "ds.yaml", "--out", &out], &common[..]].concat());
            let errors = fail(4, run.env("FAILPOINTS", format!("{point}=1*off->return(kill {rank})")));
            assert!(errors.contains(&format!("rank {rank} was killed by signal 9")), "{errors}");
            // From `save::renamed` on, the second checkpoint is committed.
            let is_renamed = index >= FAILPOINTS.iter().position(|point| *point == "save::renamed").unwrap();
            let expected: &[u64] = if is_renamed { &[1, 2] } else { &[1] };
            let expected = if *point == "save::retained" { &[1, 2] } else { expected };
            assert_eq!(committed(&case, &out), expected, "{out}");
            for (_, folder) in zero_checkpoint::committed(&case.path(&out).join("checkpoints")).unwrap() {
                assert_eq!(zero_checkpoint::verify(&folder), [], "{out}");
            }
            case.train(&[&common[..], &["--out", &out, "--resume", "auto"]].concat());
            assert_eq!(case.losses(&out), losses, "{out}");
            assert_eq!(case.shards(&out, 4), shards, "{out}");
            assert_eq!(left_over(&case, &out), [] as [&str; 0], "{out}");
            killed += 1;
        }
    }
    assert_eq!(killed, FAILPOINTS.len() + 3);
}

#[test]
fn a_kill_at_any_point_of_a_save_loses_nothing() {
    a_kill_at_any_point_loses_nothing(false);
}

#[test]
fn a_kill_at_any_point_of_a_background_save_loses_nothing() {
    a_kill_at_any_point_loses_nothing(true);
}

/// The disk of one rank is full at the second save. Training reports this and continues, and the next save succeeds.
#[test]
fn a_full_disk_does_not_end_training() {
    let case = Case::new();
    case.train(&["--quiet", "-n", "2", "--max-steps", "6", "--out", "whole"]);
    for asynchronous in [false, true] {
        for (point, rank) in [("shard-begun", 1), ("shard-written", 0), ("manifest-written", 0)] {
            let (out, saves) = (format!("{point}-{asynchronous}"), format!("training.save_async={asynchronous}"));
            let args = ["--config", "ds.yaml", "--quiet", "-n", "2", "--max-steps", "6", "--out", &out];
            let sets = ["--set", "training.save_every=2", "--set", "training.keep_last=0", "--set", &saves];
            let mut run = case.command(&[&args[..], &sets].concat());
            let full = format!("save::{point}=1*off->1*return(full {rank})->off");
            let ended = run.env("FAILPOINTS", full).output().unwrap();
            let said = text(&ended.stderr);
            assert!(ended.status.success(), "{out}: {said}");
            assert!(
                said.contains("warning: cannot save step 4: ") && said.contains("No space left on device"),
                "{said}"
            );
            assert!(said.contains("training continues, the newest checkpoint is step 2"), "{said}");
            assert_eq!(said.lines().count(), 1, "{said}");
            assert_eq!(committed(&case, &out), [2, 6], "{out}");
            assert_eq!(case.losses(&out), case.losses("whole"), "{out}");
        }
    }
}

/// Checkpoints and logs fill up a small tmpfs.
#[test]
fn training_continues_when_a_small_disk_fills_up() {
    let case = Case::new();
    fs::create_dir(case.path("run")).unwrap();
    let train = "--config ds.yaml --plain -n 2 --set training.save_every=1 --set training.keep_last=0 --max-steps 30";
    let script = format!(
        "mount -t tmpfs -o size=600k none run || exit 77\n\
         \"$0\" {train}; echo status $?\n\
         \"$0\" checkpoint verify run; echo verified $?\n\
         tail -n 1 run/metrics.jsonl"
    );
    let output = std::process::Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", &script, env!("CARGO_BIN_EXE_zero-train")])
        .current_dir(case.path(""))
        .output();
    let output = match output {
        Ok(output) if ![Some(1), Some(77)].contains(&output.status.code()) => output,
        _ => {
            eprintln!("skipped: mounting a tmpfs needs `unshare` and user namespaces");
            return;
        }
    };
    let (out, said) = (text(&output.stdout), text(&output.stderr));
    assert!(said.contains("warning: cannot save step ") && said.contains("No space left on device"), "{said}");
    assert!(said.contains("training continues, the newest checkpoint is step "), "{said}");
    assert!(out.contains("step     30/30  loss "), "{out}\n{said}");
    // The last checkpoint is the result of the run, so failing to save it is an error.
    assert!(out.contains("status 3") && said.contains("error: "), "{out}\n{said}");
    assert!(out.contains("verified 0"), "{out}");
}

/// A disk without room for a checkpoint is reported before the first step.
#[test]
fn a_disk_without_room_for_a_checkpoint_is_reported_at_the_start() {
    let case = Case::new();
    fs::create_dir(case.path("run")).unwrap();
    let script = "mount -t tmpfs -o size=96k none run || exit 77\n\
                  exec \"$0\" --config ds.yaml --plain -n 1 --max-steps 1 --set training.save_last=false";
    let output = std::process::Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", script, env!("CARGO_BIN_EXE_zero-train")])
        .current_dir(case.path(""))
        .output();
    match output {
        Ok(output) if ![Some(1), Some(77)].contains(&output.status.code()) => {
            let said = text(&output.stderr);
            assert!(said.contains("warning: run/checkpoints: only ") && said.contains(" are free, but "), "{said}");
        }
        _ => eprintln!("skipped: mounting a tmpfs needs `unshare` and user namespaces"),
    }
}

#[test]
fn a_second_run_in_the_same_folder_is_rejected() {
    let case = Case::new();
    let long = ["--config", "ds.yaml", "--quiet", "-n", "2", "--max-steps", "100000"];
    let mut first = case.command(&long).stderr(Stdio::null()).spawn().unwrap();
    case.wait_for_steps("run", 3);
    let holder = rank_process(first.id(), 0);
    for more in [&[][..], &["--resume", "auto"]] {
        let said = case.train_fails(2, &[&["--quiet", "-n", "2", "--max-steps", "3"], more].concat());
        assert!(said.starts_with(&format!("error: run is in use by process {holder} on ")), "{said}");
        assert!(said.contains("help: only one run at a time"), "{said}");
    }
    assert!(!case.path("run.1").exists(), "the folder of a running run is moved aside");
    // A killed run does not block its folder.
    let other = rank_process(first.id(), 1);
    signal(first.id(), "KILL");
    [holder, other].into_iter().for_each(|rank| signal(rank, "KILL"));
    first.wait().unwrap();
    case.train(&["--quiet", "-n", "2", "--max-steps", "3"]);
    assert!(case.path("run.1/metrics.jsonl").exists());
}

/// `--resume auto` uses the newest intact checkpoint. If all are damaged, it fails instead of starting from scratch.
#[test]
fn damaged_checkpoints_are_skipped() {
    let case = Case::new();
    let save = ["--quiet", "-n", "2", "--set", "training.save_every=2", "--set", "training.keep_last=0"];
    case.train(&[&save[..], &["--max-steps", "8", "--out", "whole"]].concat());
    case.train(&[&save[..], &["--max-steps", "6"]].concat());
    let damage = |step: u64| {
        let shard = case.path("run").join(format!("checkpoints/step-{step:08}/shard-00001-of-00002.safetensors"));
        let mut bytes = fs::read(&shard).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&shard, &bytes).unwrap();
    };
    damage(6);
    damage(4);
    // A copy that was interrupted.
    fs::create_dir(case.path("run/checkpoints/step-00000007")).unwrap();
    let resumed = case.run(&[&save[..], &["--max-steps", "8", "--resume", "auto"]].concat());
    let said = text(&resumed.stderr);
    assert!(resumed.status.success(), "{said}");
    let warned: Vec<&str> = said.lines().filter(|line| line.starts_with("warning: ")).collect();
    assert!(
        matches!(warned[..], [seven, six, four] if seven.contains("step-00000007 is incomplete: it has no manifest.json")
            && six.contains("cannot load the checkpoint of step 6") && four.contains("step 4")),
        "{said}"
    );
    assert_eq!(case.losses("run"), case.losses("whole"));
    assert_eq!(case.shards("run", 8), case.shards("whole", 8));
    let mut aside = left_over(&case, "run");
    aside.sort();
    assert_eq!(aside, ["superseded-step-00000004", "superseded-step-00000006", "superseded-step-00000007"]);
    [2, 4, 6, 8].into_iter().for_each(damage);
    let error = case.train_fails(3, &[&save[..], &["--max-steps", "9", "--resume", "auto"]].concat());
    assert!(error.contains("help: no checkpoint of the run can be loaded"), "{error}");
    assert!(case.path("run/checkpoints/step-00000008").exists(), "a checkpoint was moved");
    for step in [2, 4, 6, 8] {
        let _ = fs::remove_file(case.path("run").join(format!("checkpoints/step-{step:08}/manifest.json")));
    }
    let error = case.train_fails(2, &[&save[..], &["--max-steps", "9", "--resume", "auto"]].concat());
    assert!(error.contains("step-00000008 is missing its manifest.json"), "{error}");
    assert!(!case.path("run.1").exists(), "the run was moved");
}
