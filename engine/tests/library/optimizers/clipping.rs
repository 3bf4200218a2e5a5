//! `gradient_clipping_value`: equal to PyTorch's `clip_grad_value_`, and bit-identical at every layout.

use crate::models::ignored_targets::chats;
use crate::models::z_loss::{assert_parameters, pytorch, table_and_head};
use crate::world;

use tempfile::TempDir;
use world::{BF16, FP16, Trajectory, agreed, assert_same, gpt2, trajectory, world};
use zero_engine::{Config, Engine};

fn parsed(ranks: usize, text: &str) -> Config {
    Config::with_world_size("test.yaml", text, ranks).unwrap_or_else(|e| panic!("{text}\n{e}"))
}

/// Trains fifty steps from the same weights on the same chats. The limit clips about a third of the elements.
#[test]
fn fifty_steps_agree_with_pytorch() {
    const STEPS: u64 = 50;
    let step = "ce.backward(); norm = torch.stack([p.grad.norm() for p in parameters]).norm(); \
                share = torch.cat([(p.grad.abs() > 2e-3).flatten() for p in parameters]).float().mean(); \
                torch.nn.utils.clip_grad_value_(parameters, 2e-3); optimizer.step(); \
                print(ce.item(), norm.item(), share.item())";
    for (ours, theirs) in [
        ("SGD, params: {lr: 3.0, momentum: 0.9}", "SGD(parameters, lr=3.0, momentum=0.9)"),
        ("AdamW, params: {lr: 0.01, weight_decay: 0.1}", "AdamW(parameters, lr=0.01, weight_decay=0.1)"),
    ] {
        let Some((lines, parameters)) = pytorch(STEPS, &format!("torch.optim.{theirs}"), step) else { return };
        assert!(lines.iter().all(|line| line[2] > 0.05 && line[2] < 0.8), "{lines:?}");
        assert!(lines[49][0] < 0.9 * lines[0][0], "{lines:?}");
        for (ranks, accumulation, zero_stage) in [(1, 4, 0), (2, 2, 3), (4, 1, 2)] {
            let text = format!(
                "train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: {accumulation}\n\
                 gradient_clipping_value: 2.0e-3\noptimizer: {{type: {ours}}}\n\
                 zero_optimization: {{stage: {zero_stage}}}"
            );
            world(ranks, |comm| {
                let mut engine = Engine::with_communicator(parsed(ranks, &text), table_and_head(), comm).unwrap();
                for (step, want) in lines.iter().enumerate() {
                    let taken = engine.train_batch(&chats(step as u64)).unwrap();
                    let got = [f64::from(taken.loss), taken.grad_norm];
                    // PyTorch adds f32 values in a different order. The norm is measured before clipping.
                    for (got, want) in got.iter().zip(want) {
                        assert!((got - want).abs() < 1e-4 * want, "step {}: {got}, PyTorch {want}", step + 1);
                    }
                }
                assert_parameters(&mut engine, &parameters, 1e-4);
            });
        }
    }
}

fn run(ranks: usize, text: &str) -> Trajectory {
    let all = world(ranks, |comm| {
        let mut engine =
            Engine::with_communicator(parsed(ranks, text), gpt2(), comm).unwrap_or_else(|e| panic!("{text}: {e}"));
        trajectory(&mut engine, 8)
    });
    agreed(all, text)
}

#[test]
fn layouts_are_bit_identical() {
    const MUON: &str = "optimizer: {type: Muon, params: {lr: 0.02, adam_lr: 0.003, weight_decay: 0.1}}";
    const LAMB: &str = "optimizer: {type: Lamb, params: {lr: 0.01, weight_decay: 0.1}}";
    const ADAMW: &str = "optimizer: {type: AdamW, params: {lr: 0.01, weight_decay: 0.1}}";
    let folder = TempDir::new().unwrap();
    let disk = format!(
        ", offload_optimizer: {{device: nvme, nvme_path: '{0}'}}, offload_param: {{device: nvme, nvme_path: '{0}'}}",
        folder.path().display()
    );
    let text = |clip: &str, more: &str, [zero_stage, data, stages]: [usize; 3], zero: &str| {
        format!(
            "train_micro_batch_size_per_gpu: 1\ngradient_accumulation_steps: {}\n{clip}\n{more}\n\
             training: {{reproducible: true}}\npipeline: {{stages: {stages}}}\n\
             zero_optimization: {{stage: {zero_stage}, stage3_param_persistence_threshold: 40{zero}}}",
            4 / data
        )
    };
    for more in
        [ADAMW.to_string(), MUON.to_string(), LAMB.to_string(), format!("{ADAMW}\n{BF16}"), format!("{ADAMW}\n{FP16}")]
    {
        let clip = "gradient_clipping_value: 1.0e-3";
        let expected = run(1, &text(clip, &more, [0, 1, 1], ""));
        assert!(expected.losses[0] != expected.losses[7]);
        let none = run(1, &text("gradient_clipping: 0", &more, [0, 1, 1], ""));
        assert!(expected.losses[0] == none.losses[0] && expected.parameters != none.parameters);
        // A limit that is larger than every element changes nothing.
        assert_same(&none, &run(1, &text("gradient_clipping_value: 1.0e+6", &more, [0, 1, 1], "")), &more);
        for layout in [[1, 2, 1], [2, 4, 1], [3, 4, 1], [0, 1, 2], [1, 2, 2], [3, 2, 3]] {
            let got = run(layout[1] * layout[2], &text(clip, &more, layout, ""));
            assert_same(&expected, &got, &format!("{layout:?} {more}"));
        }
        if more.contains("AdamW") {
            assert_same(&expected, &run(2, &text(clip, &more, [3, 2, 1], &disk)), &format!("on disk, {more}"));
        }
    }
}
