//! Quantized weights that are split across ranks: their codes and scales are the same as on one rank.

use zero_engine::{Engine, Layers, zoo};

use super::{Parameters, keys, load_with_any_number_of_parts};
use crate::world::{assert_near, assert_same, config, engine_of, gpt2_config, llama_config, run_of, train, world};

const NF4: &str = "adapter: {r: 4, lora_dropout: 0.1, init_lora_weights: false}\n\
                   quantization_config: {load_in_4bit: true, bnb_4bit_quant_type: nf4}";
/// Number of steps: few, because differences grow fast in these wide models.
const STEPS: u64 = 4;

const FP4: &str = "adapter: {r: 4, use_dora: true}\nquantization_config: {load_in_4bit: true}";

/// 8-bit weights have one scale for each output, even if the inputs are split across ranks.
const INT8: &str = "adapter: {r: 4}\nquantization_config: {load_in_8bit: true}";

/// Each of two ranks has half of a row, which consists of whole blocks of 64 elements.
fn gpt2() -> Layers {
    zoo::gpt2(&zoo::Gpt2Config { n_embd: 128, n_inner: Some(256), ..gpt2_config() })
}

fn llama() -> Layers {
    zoo::llama(&zoo::LlamaConfig { hidden_size: 128, intermediate_size: 384, ..llama_config() })
}

fn phi3() -> Layers {
    let llama = zoo::LlamaConfig { hidden_size: 128, intermediate_size: 384, ..llama_config() };
    zoo::llama(&zoo::LlamaConfig { fused_projections: true, ..llama })
}

#[test]
fn quantized_models_start_bit_identical_and_match_one_rank() {
    for layers in [gpt2 as fn() -> Layers, llama, phi3] {
        for quantization in [NF4, FP4, INT8] {
            let run = |ranks: usize, tensor: usize, steps: u64, stage: u8, more: &str| {
                run_of(layers, ranks, steps, &keys(tensor, 2, 1, stage, &format!("{quantization}\n{more}")))
            };
            assert_same(&run(1, 1, 0, 0, ""), &run(2, 2, 0, 3, ""), quantization);
            let expected = run(1, 1, STEPS, 0, "");
            for stage in [0, 3] {
                assert_near(&run(2, 2, STEPS, stage, ""), &expected, 1e-5, quantization);
            }
            let expected = run(2, 1, STEPS, 0, "");
            assert_near(&run(4, 2, STEPS, 3, "activation_checkpointing: {}"), &expected, 1e-5, quantization);
        }
    }
}

/// Returns the names and the numbers of elements of the quantized parameters.
fn quantized(engine: &Engine) -> Vec<(String, usize)> {
    let parameters = engine.model().parameters().iter().filter(|p| p.quantization().is_some());
    parameters.map(|p| (p.name().to_string(), p.whole_elements())).collect()
}

/// Checkpoints keep the bytes of whole weights. New values are quantized like whole weights.
#[test]
fn checkpoints_and_set_values_do_not_depend_on_the_degree() {
    let models = [gpt2 as fn() -> Layers, llama, phi3];
    for (layers, quantization) in
        models.map(|layers| (layers, FP4)).into_iter().chain(models.map(|layers| (layers, INT8)))
    {
        let saved = load_with_any_number_of_parts(layers, quantization, |engine| {
            for (name, elements) in quantized(engine) {
                // Values whose blocks have different scales than the initial values.
                let value = |i: usize| (i * 31 % 257) as f32 / 257.0 * (i % 1009) as f32;
                engine.set_parameter(&name, &(0..elements).map(value).collect::<Vec<_>>()).unwrap();
            }
            train(engine, 2);
        });
        let text = keys(1, 4, 1, 3, quantization);
        let names = world(1, |comm| quantized(&engine_of(layers(), comm, &text)));
        let of = |saved: &Parameters| -> Parameters {
            saved.iter().filter(|(name, _)| names[0].iter().any(|(own, _)| own == name)).cloned().collect()
        };
        assert!(names[0].len() >= 8);
        assert!(of(&saved[0]).len() == names[0].len() && of(&saved[0]) == of(&saved[1]), "new values");
        assert!(of(&saved[0]) == of(&saved[2]), "new values");
    }
}

#[test]
fn quantization_blocks_cannot_be_split() {
    let text = keys(4, 2, 1, 0, NF4);
    let error = world(4, |comm| Engine::with_communicator(config(4, &text), gpt2(), comm).map(drop)).remove(0);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("c_proj") && error.contains("blocks of 64 elements cannot be split"), "{error}");
}
