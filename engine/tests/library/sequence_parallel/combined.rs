//! Ranks that share sequences together with everything else that changes what ranks hold, send or compute.

use candle_core::Tensor;
use zero_engine::comm::Operation;
use zero_engine::{Engine, Layers, zoo};

use super::{STEPS, assert_near, gpt2, keys, llama};
use crate::adapter::LORA;
use crate::on_disk::offloaded;
use crate::packing;
use crate::world::{
    BF16, Trajectory, agreed, assert_same, batch, config, gpt2_config, run_of, train, trajectory, trajectory_on, world,
};

/// Each variant trains as on one rank, but for rounding.
#[test]
fn every_variant_is_near_to_one_rank() {
    for more in [
        LORA,
        "optimizer: {type: Muon, params: {lr: 0.01}}",
        "optimizer: {type: LAMB, params: {lr: 0.01}}",
        "training: {z_loss: 0.01}",
        "gradient_allreduce_op: sum",
        "activation_checkpointing: {interval: 2}",
    ] {
        let expected = run_of(gpt2, 1, STEPS, &keys(1, 2, 1, 0, more));
        for (ranks, stage) in [(2, 0), (2, 3)] {
            assert_near(&run_of(gpt2, ranks, STEPS, &keys(2, 2, 1, stage, more)), &expected, 1e-5, more);
        }
        // Two groups of two ranks: the same samples as two ranks.
        let expected = run_of(gpt2, 2, STEPS, &keys(1, 2, 1, 0, more));
        assert_near(&run_of(gpt2, 4, STEPS, &keys(2, 2, 1, 2, more)), &expected, 1e-5, more);
    }
    let local = "mesh: {data_parallel_replicate_degree: 2}\ntraining: {local_steps: {steps: 2}}";
    let losses = |ranks: usize, slices: usize| {
        let text = keys(slices, 2, 1, 2, local);
        let all = world(ranks, |comm| {
            let mut engine = Engine::with_communicator(config(ranks, &text), gpt2(), comm).unwrap();
            trajectory(&mut engine, STEPS)
        });
        // The first rank of each replicate: they have losses of their own.
        [all[0].clone(), all[ranks / 2].clone()]
    };
    for (found, expected) in losses(4, 2).iter().zip(&losses(2, 1)) {
        assert_near(found, expected, 1e-5, local);
    }
}

/// What changes only where values are and travel leaves the bits.
#[test]
fn offload_secondary_shards_and_overlap_leave_the_bits() {
    let folder = tempfile::tempdir().unwrap();
    let layers = || zoo::gpt2(&zoo::Gpt2Config { n_head: 4, n_embd: 48, n_layer: 3, ..gpt2_config() });
    let plain = keys(2, 1, 2, 3, "training: {reproducible: true}");
    let expected = run_of(layers, 4, STEPS, &plain);
    let with = |zero: &str| plain.replace("zero_optimization: {", &format!("zero_optimization: {{{zero}, "));
    for text in [
        with("zero_hpz_partition_size: 2, stage3_max_reuse_distance: 0"),
        with("overlap_comm: false"),
        with("offload_optimizer: {device: cpu}"),
        offloaded(&plain, folder.path()),
    ] {
        assert_same(&expected, &run_of(layers, 4, STEPS, &text), &text);
    }
}

#[test]
fn packed_documents_see_only_themselves() {
    for layers in [packing::gpt2 as fn(bool) -> Layers, packing::llama, packing::gemma3, packing::phi3] {
        for dtype in ["", BF16] {
            let run = |ranks: usize, stage: u8| -> Trajectory {
                let text = keys(ranks, 4, 1, stage, dtype);
                let all = world(ranks, |comm| {
                    let mut engine = Engine::with_communicator(config(ranks, &text), layers(true), comm).unwrap();
                    trajectory_on(&mut engine, 4, |step| packing::batch(step as usize, &packing::DOCUMENTS, true))
                });
                agreed(all, &text)
            };
            let (expected, tolerance) = (run(1, 0), if dtype.is_empty() { 1e-5 } else { 1e-2 });
            for stage in [0, 3] {
                assert_near(&run(2, stage), &expected, tolerance, dtype);
            }
        }
    }
}

#[test]
fn checkpoints_load_with_any_number_of_slices() {
    let folder = tempfile::tempdir().unwrap();
    let text = |slices: usize, stage: u8| keys(slices, 4, 1, stage, "");
    let whole = run_of(gpt2, 2, STEPS, &text(2, 3));
    world(2, |comm| {
        let mut engine = Engine::with_communicator(config(2, &text(2, 3)), gpt2(), comm).unwrap();
        train(&mut engine, 3);
        engine.save_checkpoint(folder.path()).unwrap();
    });
    for (ranks, slices, stage) in [(1, 1, 0), (2, 2, 1), (4, 4, 3)] {
        let text = text(slices, stage);
        let all = world(ranks, |comm| {
            let mut engine = Engine::with_communicator(config(ranks, &text), gpt2(), comm).unwrap();
            engine.resume(folder.path()).unwrap();
            trajectory(&mut engine, STEPS - 3)
        });
        let rest = agreed(all, &text);
        let end = Trajectory { losses: whole.losses[3..].to_vec(), norms: whole.norms[3..].to_vec(), ..whole.clone() };
        assert_near(&rest, &end, 1e-5, &text);
    }
}

/// A rank sends what the dry run of its layers says, which is the formula of the paper.
#[test]
fn traffic_is_that_of_the_formula() {
    let (rows, time, width, layers) = (2, 16, 32, 2);
    for slices in [2, 4] {
        for (dtype, bytes) in [("", 4), (BF16, 2)] {
            for (more, passes) in [("", 2), ("activation_checkpointing: {}", 3)] {
                let text = keys(slices, rows, 2, 2, &format!("{dtype}\n{more}"));
                let sent = world(slices, |comm| {
                    let mut engine = Engine::with_communicator(config(slices, &text), gpt2(), comm).unwrap();
                    engine.train_batch(&batch(0, 2 * rows)).unwrap();
                    engine.zero().groups().context().unwrap().stats()[Operation::AllToAll].sent_bytes
                });
                let of_pass = 4 * rows * time * width * (slices - 1) / (slices * slices);
                let expected = (layers * 2 * passes * of_pass * bytes) as u64;
                assert!(sent.iter().all(|&sent| sent == expected), "{text}: {sent:?}, expected {expected}");
            }
        }
    }
}

#[test]
fn a_layer_that_does_not_declare_its_attention_fails() {
    use candle_nn::{Module, VarBuilder};
    struct Attention(zero_model::ops::Linear);
    impl Module for Attention {
        fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
            zero_model::ops::causal_attention_packed(&self.0.forward(x)?, 4)
        }
    }
    let layers = |declared: bool| {
        let layers = Layers::new()
            .layer("embed", |vb: VarBuilder| zero_model::ops::Embedding::new(61, 32, 0.1, vb))
            .layer("mix", |vb: VarBuilder| Ok(Attention(zero_model::ops::Linear::new(32, 96, 0.1, vb)?)))
            .head("head", |vb| zoo::LanguageHead::new(32, 61, 0.1, vb));
        if declared { layers.shares_sequences::<&str>([]) } else { layers }
    };
    let messages = world(2, |comm| {
        let text = keys(2, 2, 1, 0, "");
        let refused = Engine::with_communicator(config(2, &text), layers(false), comm.clone());
        let mut engine = Engine::with_communicator(config(2, &text), layers(true), comm).unwrap();
        [refused.err().unwrap().to_string(), engine.train_batch(&batch(0, 2)).unwrap_err().to_string()]
    });
    for [refused, failed] in messages {
        assert!(refused.contains("ranks cannot share the sequences of this model"), "{refused}");
        assert!(failed.contains("layer `mix` has an attention") || failed.contains("rank"), "{failed}");
    }
}

#[test]
fn sequences_that_cannot_be_cut_are_errors() {
    let messages = world(3, |comm| {
        let mut engine = Engine::with_communicator(config(3, &keys(3, 2, 1, 0, "")), llama(), comm).unwrap();
        engine.train_batch(&batch(0, 2)).unwrap_err().to_string()
    });
    assert!(messages[0].contains("sequences of 16 positions cannot be cut into 3 slices"), "{}", messages[0]);
}
