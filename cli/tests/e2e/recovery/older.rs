//! Checkpoints of older programs load. `older/` has one that commit 19521b46 (2026-11-23) saved after three steps of
//! two ranks at stage 3, and the configuration of that run.

use std::fs;
use std::path::Path;

use crate::case::Case;

/// The losses of the next three steps in the older program.
const LOSSES: [f64; 3] = [5.486_819_3, 5.382_169_2, 5.265_782_4];

#[test]
fn a_checkpoint_of_an_older_program_loads_into_any_layout_and_continues() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/e2e/recovery/older");
    for (ranks, stage) in [(2, 3), (1, 1)] {
        let case = Case::new();
        let step = case.path("older/checkpoints/step-00000003");
        fs::create_dir_all(&step).unwrap();
        for entry in fs::read_dir(&folder).unwrap() {
            let file = entry.unwrap();
            fs::copy(file.path(), step.join(file.file_name())).unwrap();
        }
        fs::rename(step.join("ds.yaml"), case.path("ds.yaml")).unwrap();
        fs::write(case.path("data.txt"), "the quick brown fox jumps over the lazy dog. ".repeat(40)).unwrap();
        let (ranks_of_run, stage) = (ranks.to_string(), format!("zero_optimization.stage={stage}"));
        let samples = format!("train_micro_batch_size_per_gpu={}", 4 / ranks);
        case.train(&["-n", &ranks_of_run, "--resume", "older", "--out", "run", "--set", &stage, "--set", &samples]);
        let losses: Vec<f64> = case.metrics("run").iter().filter_map(|step| step["loss"].as_f64()).collect();
        assert_eq!(losses.len(), LOSSES.len());
        for (found, expected) in losses.iter().zip(LOSSES) {
            assert!((found - expected).abs() < 1e-5, "{ranks} ranks, {stage}: {losses:?}");
        }
    }
}
