//! Local steps (DiLoCo) on GPUs: replicates train on their own GPU, and outer steps run on the host.

use super::world::{BF16, Trajectory, engine, trajectory, world};
use super::{apart, has_gpu, mock, resident, settings};

const STEPS: u64 = 4;

/// Trains two replicates, with an outer step after every second step. Returns the trajectory of each rank.
fn run(
    text: fn(&str, u8, usize, &str) -> String,
    device: &str,
    stage: u8,
    ranks: usize,
    more: &str,
) -> Vec<Trajectory> {
    let training = format!("training: {{device: {device}, local_steps: {{steps: 2}}}}");
    let text = text(device, stage, 2, &format!("mesh: {{data_parallel_replicate_degree: 2}}\n{more}"))
        .replace(&format!("training: {{device: {device}}}"), &training);
    assert!(text.contains(&training));
    world(ranks, |comm| {
        let mut engine = engine(comm, &text);
        let before = trajectory(&mut engine, STEPS);
        assert!(engine.replicates_are_equal());
        before
    })
}

#[test]
fn local_steps_match_those_of_the_cpu() {
    if !mock::has_gpus(4) || !has_gpu() {
        return;
    }
    for (stage, ranks, more) in [(1, 2, BF16), (2, 4, ""), (3, 4, BF16)] {
        let [gpu, cpu] = ["cuda", "cpu"].map(|device| run(resident, device, stage, ranks, more));
        let bound = if more == BF16 { 2e-3 } else { 1e-4 };
        for (gpu, cpu) in gpu.iter().zip(&cpu) {
            assert!(apart(gpu, cpu) < bound, "ZeRO {stage}, {ranks} ranks, {more}: {}", apart(gpu, cpu));
        }
        // Replicates see different samples, and have the same parameters after an outer step.
        assert!(gpu[0].losses != gpu[ranks / 2].losses && gpu[0].parameters == gpu[ranks / 2].parameters);
    }
}

/// It makes no difference whether the state is on the GPU or on the host.
#[test]
fn local_steps_with_state_on_the_host_have_the_same_bits() {
    if !mock::has_gpus(2) || !has_gpu() {
        return;
    }
    for stage in [1, 3] {
        let [resident, offloaded] =
            [resident as fn(&_, _, _, &_) -> _, settings].map(|text| run(text, "cuda", stage, 2, ""));
        assert!(resident == offloaded, "ZeRO {stage}");
    }
}
