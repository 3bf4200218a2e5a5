//! More settings under which a pipeline is bit-identical to one stage: numbers of micro-batches and chunks, options of
//! communication, another model, and skipped steps.

use zero_engine::{Engine, Layers, zoo};

use super::{SCHEDULES, agreed, assert_same, engine_of, gpt2, model, run_of, text};
use crate::world::{train, trajectory, world};

/// Also tests more stages than micro-batches, and numbers of stages that do not divide the number of micro-batches.
#[test]
fn any_number_of_micro_batches_is_bit_identical() {
    for zero_stage in [1, 3] {
        for micro_batches in [1, 2, 3, 5] {
            let of = |stages: usize, pipeline: &str| {
                let pipeline = format!("stages: {stages}, schedule: {pipeline}");
                run_of(|| model(true), stages, 3, &text(zero_stage, micro_batches, &pipeline, ""))
            };
            let expected = of(1, "1f1b");
            for stages in 2..=4 {
                for schedule in SCHEDULES {
                    let what = format!("{schedule}, {micro_batches} micro-batches through {stages}, ZeRO {zero_stage}");
                    assert_same(&expected, &of(stages, schedule), &what);
                }
            }
            // One layer per chunk.
            let alone = of(3, "interleaved_1f1b, virtual_stages: 3");
            assert_same(&expected, &alone, &format!("{micro_batches} micro-batches through nine chunks"));
        }
    }
}

#[test]
fn options_of_communication_are_bit_identical() {
    let of = |stages: usize, pipeline: &str, zero: &str| {
        let text = format!(
            "train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: 4\n\
             pipeline: {{stages: {stages}, {pipeline}}}\nzero_optimization: {{stage: {zero}}}"
        );
        run_of(|| gpt2(40, true), 2 * stages, 3, &text)
    };
    for zero_stage in [1, 3] {
        let expected = of(1, "schedule: 1f1b", &zero_stage.to_string());
        for zero in [
            "overlap_comm: true",
            "overlap_comm: false",
            "reduce_bucket_size: 1, allgather_bucket_size: 1",
            "reduce_bucket_size: 500000000",
            "reduce_scatter: false",
            "stage3_prefetch_bucket_size: 0, stage3_max_reuse_distance: 0",
            "stage3_max_live_parameters: 1",
            "stage3_param_persistence_threshold: 0",
            "stage3_param_persistence_threshold: 100000",
        ] {
            for pipeline in ["schedule: zb_h1", "schedule: interleaved_1f1b, keep_gathered: false"] {
                let zero = format!("{zero_stage}, {zero}");
                assert_same(&expected, &of(3, pipeline, &zero), &format!("{pipeline}, {zero}"));
            }
        }
        for keep in ["true", "false", "auto"] {
            for schedule in SCHEDULES {
                let pipeline = format!("schedule: {schedule}, keep_gathered: {keep}");
                assert_same(&expected, &of(2, &pipeline, &zero_stage.to_string()), &pipeline);
            }
        }
    }
}

/// A model with grouped-query attention and a sliding window, without biases.
fn llama(tied: bool) -> Layers {
    zoo::llama(&zoo::LlamaConfig {
        vocab_size: 61,
        hidden_size: 24,
        intermediate_size: 40,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        max_position_embeddings: 16,
        sliding_window: Some(5),
        initializer_range: 0.1,
        tie_word_embeddings: tied,
        ..zoo::LlamaConfig::default()
    })
}

#[test]
fn llama_is_bit_identical() {
    for (zero_stage, tied) in [(0, false), (1, true), (2, false), (3, true)] {
        let of = |stages: usize, schedule: &str| {
            let pipeline = format!("stages: {stages}, schedule: {schedule}");
            run_of(|| llama(tied), 2 * stages, 6, &text(zero_stage, 4, &pipeline, ""))
        };
        let expected = of(1, "1f1b");
        assert!(expected.losses[0] != expected.losses[5]);
        for schedule in SCHEDULES {
            assert_same(&expected, &of(3, schedule), &format!("{schedule}, ZeRO {zero_stage}, tied {tied}"));
        }
    }
}

/// A gradient that is not finite on one stage skips the step on all stages, and the next step is unaffected.
#[test]
fn a_step_is_skipped_by_all_stages_or_none() {
    const NAME: &str = "transformer.h.1.mlp.c_fc.bias";
    let skip = |engine: &mut Engine| {
        let good = engine.full_parameter(NAME).unwrap();
        engine.set_parameter(NAME, &vec![f32::INFINITY; good.len()]).unwrap();
        let step = train(engine, 1).remove(0);
        assert!(step.skipped && !step.grad_norm.is_finite(), "{step:?}");
        engine.set_parameter(NAME, &good).unwrap();
    };
    for zero_stage in 0..=3 {
        let of = |stages: usize, schedule: &str| {
            let text = text(zero_stage, 4, &format!("stages: {stages}, schedule: {schedule}"), "");
            let all = world(2 * stages, |comm| {
                let mut engine = engine_of(gpt2(40, true), comm, &text);
                train(&mut engine, 2);
                skip(&mut engine);
                trajectory(&mut engine, 3)
            });
            agreed(all, &text)
        };
        let expected = of(1, "1f1b");
        for schedule in SCHEDULES {
            assert_same(&expected, &of(3, schedule), &format!("{schedule}, ZeRO {zero_stage}"));
        }
    }
}
