//! Tensor parallelism combined with everything else that changes what ranks hold, send or compute.

use candle_core::Tensor;
use zero_engine::{Engine, Layers, zoo};

use super::{STEPS, dropping_gpt2, gpt2, keys, llama, load_with_any_number_of_parts, phi3};
use crate::models::packing;
use crate::weights::adapter::LORA;
use crate::world::{
    BF16, FP16, assert_near, assert_near_or_overflown, assert_same, batch, config, engine_of, run_of, train, world,
};

/// Each variant trains like one rank, up to rounding.
#[test]
fn every_variant_matches_one_rank_up_to_rounding() {
    for (more, tolerance) in [
        (LORA, 1e-5),
        ("adapter: {r: 4, use_dora: true, lora_dropout: 0.1, bias: all}", 1e-5),
        ("training: {z_loss: 0.01}", 1e-5),
        ("training: {frozen: ['transformer.h.0.*']}", 1e-5),
        ("training: {ema: {decay: 0.9}}", 1e-5),
        ("gradient_allreduce_op: sum", 1e-5),
        ("activation_checkpointing: {interval: 2}", 1e-5),
        ("optimizer: {type: Lion, params: {lr: 0.001}}", 1e-5),
        ("optimizer: {type: AdamWScheduleFree, params: {lr: 0.01}}", 1e-5),
        (FP16, 1e-2),
    ] {
        let assert_near = if more == FP16 { assert_near_or_overflown } else { assert_near };
        let expected = run_of(gpt2, 1, STEPS, &keys(1, 2, 1, 0, more));
        for stage in [0, 3] {
            let text = keys(2, 2, 1, stage, more);
            assert_near(&run_of(gpt2, 2, STEPS, &text), &expected, tolerance, &text);
        }
        // Two tensor groups of two ranks each process the same samples as two ranks with whole layers.
        let expected = run_of(gpt2, 2, STEPS, &keys(1, 2, 1, 0, more));
        let text = keys(2, 2, 1, 2, more);
        assert_near(&run_of(gpt2, 4, STEPS, &text), &expected, tolerance, &text);
    }
}

/// With the same number of tensor-parallel ranks, the rest of the layout does not change a bit.
#[test]
fn layouts_with_the_same_tensor_groups_are_bit_identical() {
    let reproducible = "training: {reproducible: true}";
    for layers in [gpt2 as fn() -> Layers, llama] {
        let expected = run_of(layers, 2, STEPS, &keys(2, 1, 4, 2, reproducible));
        for (replicas, stage, more) in [
            (1, 3, ""),
            (2, 2, ""),
            (2, 3, ""),
            (4, 0, ""),
            (4, 1, ""),
            (1, 3, "activation_checkpointing: {}"),
            (2, 3, "mesh: {data_parallel_replicate_degree: 2}"),
        ] {
            let text = keys(2, 1, 4 / replicas, stage, &format!("{reproducible}\n{more}"));
            assert_same(&expected, &run_of(layers, 2 * replicas, STEPS, &text), &text);
        }
        for (stage, schedule) in [(2, "1f1b"), (2, "zb_h1"), (3, "1f1b")] {
            let pipeline = format!("{reproducible}\npipeline: {{stages: 2, schedule: {schedule}}}");
            let text = keys(2, 1, 4, stage, &pipeline);
            assert_same(&expected, &run_of(layers, 4, STEPS, &text), &text);
        }
    }
}

/// Overlapping exchanges with compute does not change a bit.
#[test]
fn overlapped_exchanges_are_bit_identical() {
    let (adapter, frozen) = ("adapter: {r: 4}", "training: {frozen: ['*.mlp.*']}");
    for layers in [gpt2 as fn() -> Layers, dropping_gpt2, llama, phi3] {
        for (ranks, stage, more) in [
            (2, 0, ""),
            (2, 3, BF16),
            (2, 2, adapter),
            (2, 2, frozen),
            (4, 3, "activation_checkpointing: {}"),
            (4, 2, "mesh: {context_parallel_degree: 2}"),
            (4, 1, "pipeline: {stages: 2, schedule: zb_h1}"),
        ] {
            let text = keys(2, 2, 2, stage, more);
            let overlapping = text.replace("autotp_size: 2", "autotp_size: 2, tp_overlap_comm: true");
            assert_same(&run_of(layers, ranks, 3, &text), &run_of(layers, ranks, 3, &overlapping), &overlapping);
        }
    }
}

#[test]
fn packed_documents_see_only_themselves() {
    for layers in packing::FAMILIES {
        for dtype in ["", BF16] {
            let expected = packing::run(layers, 1, &keys(1, 4, 1, 0, dtype));
            let tolerance = if dtype.is_empty() { 1e-5 } else { 1e-2 };
            for stage in [0, 3] {
                let text = keys(2, 4, 1, stage, dtype);
                assert_near(&packing::run(layers, 2, &text), &expected, tolerance, &text);
            }
        }
    }
}

/// A checkpoint stores each element once, under its index in the whole parameter, however the ranks split the
/// parameter.
#[test]
fn checkpoints_load_at_any_tensor_parallel_degree() {
    for layers in [gpt2 as fn() -> Layers, llama, phi3] {
        load_with_any_number_of_parts(layers, "", |engine| drop(train(engine, 3)));
    }
}

#[test]
fn layers_that_cannot_be_split_are_errors() {
    let layers = || {
        Layers::new()
            .layer("embed", |vb: candle_nn::VarBuilder| zero_model::ops::Embedding::new(61, 32, 0.1, vb))
            .head("head", |vb| zoo::LanguageHead::new(32, 61, 0.1, vb))
    };
    let text = keys(2, 2, 1, 0, "");
    let messages = world(2, |comm| {
        let refused = Engine::with_communicator(config(2, &text), layers(), comm.clone()).err().unwrap().to_string();
        // Two ranks cannot divide three heads.
        let three = || zoo::gpt2(&zoo::Gpt2Config { n_head: 3, n_embd: 48, ..crate::world::gpt2_config() });
        [refused, Engine::with_communicator(config(2, &text), three(), comm).err().unwrap().to_string()]
    });
    for [refused, uneven] in messages {
        assert!(refused.contains("the layers of this model do not support tensor parallelism"), "{refused}");
        assert!(uneven.contains("3 heads cannot be divided evenly among 2 ranks"), "{uneven}");
    }
    let text = keys(3, 2, 1, 0, "");
    let six =
        || zoo::gpt2(&zoo::Gpt2Config { n_head: 6, n_embd: 48, n_inner: Some(192), ..crate::world::gpt2_config() });
    let messages = world(3, |comm| {
        let mut engine = engine_of(six(), comm, &text);
        engine.train_batch(&batch(0, 2)).unwrap_err().to_string()
    });
    assert!(messages[0].contains("cannot be split into 3 slices of the same length"), "{}", messages[0]);
}

/// The first collective of a step belongs to the embedding.
#[test]
fn a_rank_that_is_lost_in_a_layer_is_named() {
    let text = keys(2, 2, 1, 0, "");
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
    assert!(said.contains("rank 0 lost rank 1 in reduce_scatter #"), "{said}");
}

/// An evaluation sees the logits of all classes on every rank.
#[test]
fn evaluations_see_all_logits() {
    let outputs = |ranks: usize| {
        let text = keys(ranks, 3, 1, 0, "");
        let all = world(ranks, |comm| {
            let mut engine = engine_of(gpt2(), comm, &text);
            let mut seen = vec![];
            let evaluated = engine.eval_observed(
                2,
                |index| Ok(batch(index as u64, 3)),
                |observed| {
                    seen.push(observed.outputs()?.single()?.clone());
                    Ok(())
                },
            );
            (evaluated.unwrap(), Tensor::cat(&seen, 0).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap())
        });
        assert!(all.iter().all(|(_, logits)| *logits == all[0].1));
        all[0].1.clone()
    };
    let (whole, cut) = (outputs(1), outputs(2));
    let largest = whole.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    let difference = whole.iter().zip(&cut).fold(0f32, |largest, (a, b)| largest.max((a - b).abs()));
    assert!(whole.len() == cut.len() && difference < 1e-5 * largest, "{difference} of {largest}");
}

/// Parameters that all ranks of a tensor-parallel group hold in full are also compared.
#[test]
fn a_parameter_that_differs_within_a_group_is_found() {
    for stage in [0, 3] {
        let text = keys(2, 2, 1, stage, "");
        let errors = world(4, |comm| {
            let rank = comm.rank();
            let mut engine = engine_of(gpt2(), comm, &text);
            train(&mut engine, 1);
            engine.compare_replicas().unwrap();
            if rank % 2 == 1 {
                engine.set_parameter("transformer.ln_f.weight", &[0.5; 32]).unwrap();
            }
            engine.compare_replicas().err().map(|error| error.to_string())
        });
        for error in errors {
            assert!(error.is_some_and(|error| error.contains("`transformer.ln_f.weight`")));
        }
    }
}
