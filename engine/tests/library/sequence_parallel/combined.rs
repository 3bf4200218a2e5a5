//! Sequence parallelism combined with everything else that changes what ranks hold, send or compute.

use candle_core::Tensor;
use zero_engine::{Engine, Layers, zoo};

use super::{KINDS, STEPS, by_both, by_both_with_ring, by_heads, by_queries, by_ring, gpt2, keys, llama};
use crate::models::packing;
use crate::sharding::on_disk::offloaded;
use crate::weights::adapter::LORA;
use crate::world::{
    BF16, assert_near, assert_same, batch, config, engine_of, gpt2_config, resume, run_of, save, trajectory, world,
};

/// Each variant trains like one rank, up to rounding.
#[test]
fn every_variant_matches_one_rank_up_to_rounding() {
    for more in [
        LORA,
        "optimizer: {type: Muon, params: {lr: 0.01}}",
        "optimizer: {type: LAMB, params: {lr: 0.01}}",
        "training: {z_loss: 0.01}",
        "gradient_allreduce_op: sum",
        "activation_checkpointing: {interval: 2}",
    ] {
        let expected = run_of(gpt2, 1, STEPS, &keys(1, 2, 1, 0, more));
        for kind in KINDS {
            for stage in [0, 3] {
                let text = kind(keys(2, 2, 1, stage, more));
                assert_near(&run_of(gpt2, 2, STEPS, &text), &expected, 1e-5, &text);
            }
        }
        // Two groups of two ranks process the same samples as two ranks that do not share sequences.
        let expected = run_of(gpt2, 2, STEPS, &keys(1, 2, 1, 0, more));
        for kind in KINDS {
            let text = kind(keys(2, 2, 1, 2, more));
            assert_near(&run_of(gpt2, 4, STEPS, &text), &expected, 1e-5, &text);
        }
    }
    let local = "mesh: {data_parallel_replicate_degree: 2}\ntraining: {local_steps: {steps: 2}}";
    let losses = |ranks: usize, text: String| {
        let all = world(ranks, |comm| {
            let mut engine = engine_of(gpt2(), comm, &text);
            trajectory(&mut engine, STEPS)
        });
        // The first rank of each replicate. Replicates have different losses.
        [all[0].clone(), all[ranks / 2].clone()]
    };
    let expected = losses(2, keys(1, 2, 1, 2, local));
    for kind in KINDS {
        for (found, expected) in losses(4, kind(keys(2, 2, 1, 2, local))).iter().zip(&expected) {
            assert_near(found, expected, 1e-5, local);
        }
    }
}

/// Options that change only where values are stored, or when they are sent, do not change a bit.
#[test]
fn offload_secondary_shards_and_overlap_are_bit_identical() {
    let folder = tempfile::tempdir().unwrap();
    let layers = || zoo::gpt2(&zoo::Gpt2Config { n_head: 4, n_embd: 48, n_layer: 3, ..gpt2_config() });
    for plain in KINDS.map(|kind| kind(keys(2, 1, 2, 3, "training: {reproducible: true}"))) {
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
}

#[test]
fn packed_documents_see_only_themselves() {
    for layers in packing::FAMILIES {
        for dtype in ["", BF16] {
            let run = |ranks: usize, text: &str| packing::run(layers, ranks, text);
            let expected = run(1, &keys(1, 4, 1, 0, dtype));
            let tolerance = if dtype.is_empty() { 1e-5 } else { 1e-2 };
            for kind in KINDS {
                for stage in [0, 3] {
                    let text = kind(keys(2, 4, 1, stage, dtype));
                    assert_near(&run(2, &text), &expected, tolerance, &text);
                }
            }
            for kind in [by_both, by_both_with_ring] {
                let text = kind(keys(4, 4, 1, 3, dtype));
                assert_near(&run(4, &text), &expected, tolerance, &text);
            }
        }
    }
}

#[test]
fn checkpoints_load_at_any_sequence_parallel_degree() {
    let folder = tempfile::tempdir().unwrap();
    let text = |slices: usize, stage: u8| keys(slices, 4, 1, stage, "");
    let whole = run_of(gpt2, 2, STEPS, &text(2, 3));
    save((2, 1), folder.path(), |comm| engine_of(gpt2(), comm, &text(2, 3)));
    for (ranks, stage, kind) in [
        (1, 0, by_heads as fn(String) -> String),
        (2, 1, by_heads),
        (4, 3, by_heads),
        (2, 2, by_queries),
        (4, 3, by_ring),
    ] {
        let text = kind(text(ranks, stage));
        let rest = resume((ranks, STEPS - 1), folder.path(), |comm| engine_of(gpt2(), comm, &text));
        assert_near(&rest, &whole.after(1), 1e-5, &text);
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
        let mut engine = engine_of(layers(true), comm, &text);
        [refused.err().unwrap().to_string(), engine.train_batch(&batch(0, 2)).unwrap_err().to_string()]
    });
    for [refused, failed] in messages {
        assert!(refused.contains("ranks cannot share the sequences of this model"), "{refused}");
        assert!(failed.contains("an operation in layer `mix` exchanges values") || failed.contains("rank"), "{failed}");
    }
}

#[test]
fn indivisible_sequences_are_errors() {
    for (kind, parts) in KINDS.into_iter().zip(["3 slices", "2 × 3 chunks", "2 × 3 chunks"]) {
        let text = kind(keys(3, 2, 1, 0, ""));
        let messages = world(3, |comm| {
            let mut engine = engine_of(llama(), comm, &text);
            engine.train_batch(&batch(0, 2)).unwrap_err().to_string()
        });
        let expected = format!("sequences of 16 positions cannot be split into {parts}");
        assert!(messages[0].contains(&expected), "{}", messages[0]);
    }
}

/// The first collective of a step belongs to the first attention.
#[test]
fn a_rank_that_is_lost_in_an_exchange_is_named() {
    for (kind, operation) in KINDS.into_iter().zip(["all_to_all", "all_gather", "all_to_all"]) {
        let text = kind(keys(2, 2, 1, 0, ""));
        let errors = world(2, |comm| {
            let rank = comm.rank();
            let mut engine = engine_of(gpt2(), comm, &text);
            if rank == 1 {
                return None;
            }
            engine.train_batch(&batch(0, 2)).err()
        });
        let Some(zero_engine::Error::Comm(error)) = &errors[0] else { panic!("{errors:?}") };
        let said = error.to_string();
        assert!(said.contains(&format!("rank 0 lost rank 1 in {operation} #")), "{said}");
    }
}
