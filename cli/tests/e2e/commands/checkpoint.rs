//! `zero-train checkpoint`: output, lookup of checkpoints, and exit status.

use crate::case;

use std::fs;

use case::{Case, text};

/// Returns the exit status and the output: standard output followed by standard error.
pub(super) fn checkpoint(case: &Case, args: &[&str]) -> (i32, String) {
    let output = case.command(&[&["checkpoint"], args].concat()).output().unwrap();
    (output.status.code().unwrap(), text(&output.stdout) + &text(&output.stderr))
}

#[test]
fn inspect_describes_a_checkpoint() {
    let case = Case::new();
    case.train(&["--quiet", "-n", "2", "--max-steps", "4", "--set", "training.save_every=2"]);
    // The path may be a run folder, its checkpoints or a single checkpoint. Of several checkpoints, the newest is
    // used.
    for (path, step) in [("run", 4), ("run/checkpoints", 4), ("run/checkpoints/step-00000002", 2)] {
        let (status, out) = checkpoint(&case, &["inspect", path]);
        assert_eq!(status, 0, "{out}");
        assert!(out.contains(&format!("step {step}, {step} updates, saved by 2 ranks at ZeRO stage 3")), "{out}");
        assert!(out.contains("transformer.wte.weight") && out.contains("[256, 16]"), "{out}");
        let value = case.json(&["checkpoint", "inspect", path, "--json"]);
        assert_eq!(value["step"], step);
        let parameters = value["parameters"].as_array().unwrap();
        let elements: u64 = parameters.iter().map(|parameter| parameter["elements"].as_u64().unwrap()).sum();
        assert_eq!(value["elements"].as_u64(), Some(elements));
        assert_eq!(elements, 256 * 16 + 16 * 16 + 2 * (12 * 16 * 16 + 13 * 16) + 2 * 16);
        let held: u64 = parameters.iter().map(|parameter| parameter["bytes"].as_u64().unwrap()).sum();
        let files: u64 = value["shards"].as_array().unwrap().iter().map(|shard| shard["bytes"].as_u64().unwrap()).sum();
        assert!(held == 12 * elements && value["bytes"].as_u64() == Some(files) && files > held, "{held}, {files}");
    }
    for (path, reason) in [("nowhere", "no such folder"), (".", "contains no checkpoint")] {
        for command in ["inspect", "verify"] {
            let (status, out) = checkpoint(&case, &[command, path]);
            assert!(status == 3 && out.starts_with("error: ") && out.contains(reason), "{status}: {out}");
        }
    }
}

#[test]
fn verify_names_damaged_and_intact_checkpoints() {
    let case = Case::new();
    case.train(&["--quiet", "-n", "2", "--max-steps", "4", "--set", "training.save_every=2"]);
    let (status, out) = checkpoint(&case, &["verify", "run"]);
    assert_eq!(out.lines().filter(|line| line.ends_with(": intact")).count(), 2, "{out}");
    assert_eq!(status, 0);
    let shard = case.path("run/checkpoints/step-00000004/shard-00001-of-00002.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 16;
    fs::write(&shard, &bytes).unwrap();
    let (status, out) = checkpoint(&case, &["verify", "run"]);
    assert_eq!(status, 1);
    let damaged: Vec<&str> = out.lines().filter(|line| line.starts_with("damaged: ")).collect();
    let [line] = damaged[..] else { panic!("{out}") };
    assert!(
        line.contains("step-00000004/shard-00001-of-00002.safetensors: `transformer.") && line.contains("/exp_avg_sq`"),
        "{line}"
    );
    assert!(
        out.contains("help: resume from the newest intact checkpoint: --resume run/checkpoints/step-00000002"),
        "{out}"
    );
    // The run resumes from the intact checkpoint and not from the damaged one.
    let (status, out) = checkpoint(&case, &["verify", "run/checkpoints/step-00000004"]);
    assert!(status == 1 && out.contains("zero-train checkpoint verify run/checkpoints"), "{out}");
    let resume = ["--quiet", "-n", "2", "--out", "other", "--resume", "run/checkpoints/step-00000004"];
    let errors = case.train_fails(3, &resume);
    assert!(errors.contains("/exp_avg_sq`"), "{errors}");
    case.train(&["--quiet", "-n", "2", "--out", "other", "--resume", "run/checkpoints/step-00000002"]);
    // A checkpoint without a manifest is damaged as well, and does not count as the newest.
    fs::remove_file(case.path("run/checkpoints/step-00000004/manifest.json")).unwrap();
    let (status, out) = checkpoint(&case, &["verify", "run"]);
    assert!(status == 1 && out.contains("step-00000004/manifest.json: No such file"), "{out}");
    assert!(checkpoint(&case, &["inspect", "run"]).1.contains("step 2, 2 updates"));
}

/// The steps of a run are never written into the folder of another run.
#[test]
fn a_run_from_the_checkpoint_of_another_run_has_its_own_folder() {
    let case = Case::new();
    let steps =
        |out: &str| -> Vec<u64> { case.metrics(out).iter().map(|line| line["step"].as_u64().unwrap()).collect() };
    case.train(&["--quiet", "--max-steps", "3", "--out", "a"]);
    case.train(&["--quiet", "--max-steps", "4", "--out", "b", "--set", "training.save_every=2"]);
    let said = case.train(&["--max-steps", "5", "--out", "b", "--resume", "a/checkpoints/step-00000003"]);
    assert!(said.contains("moved an earlier run to b.1"), "{said}");
    assert_eq!((steps("b"), steps("b.1")), (vec![4, 5], vec![1, 2, 3, 4]));
    assert!(!case.path("b/checkpoints/step-00000004").exists() && case.path("b.1/checkpoints/step-00000004").exists());
    // A run resumes in its own folder, however the path is written.
    let own = case.path("b/checkpoints/step-00000005");
    case.train(&["--quiet", "--max-steps", "6", "--out", "./b", "--resume", own.to_str().unwrap()]);
    assert_eq!(steps("b"), [4, 5, 6]);
    assert!(!case.path("b.2").exists());
}
