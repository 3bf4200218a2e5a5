//! Splits layers and sequences among ranks on GPUs, and compares the results with the same split on the CPU.

use super::world::{
    BF16, FP16, Trajectory, assert_same, batch, config, gpt2, gpt2_config, llama_config, run_of, world,
};
use super::{apart, has_gpu, mock, resident, settings};
use candle_core::Device;
use zero_train::zoo::{self, llama};
use zero_train::{Engine, Layers};

const TENSOR: &str = "tensor_parallel: {autotp_size: 2}";
const SEQUENCE: &str = "sequence_parallel_size: 2";
const CONTEXT: &str = "mesh: {context_parallel_degree: 2}";
const RING: &str = "mesh: {context_parallel_degree: 2, context_parallel_rotate_method: alltoall}";
const STEPS: u64 = 2;

/// Returns a Llama in which four query heads share two key and value heads. Queries and keys have norms, and all linear
/// maps have biases.
fn grouped_llama() -> Layers {
    llama(&zoo::LlamaConfig { qk_norm: true, attention_bias: true, mlp_bias: true, ..llama_config() })
}

/// Returns a Llama with queries, keys and values in one weight, and gate and up in another.
fn phi3() -> Layers {
    llama(&zoo::LlamaConfig { fused_projections: true, ..llama_config() })
}

fn windowed() -> Layers {
    llama(&zoo::LlamaConfig { sliding_window: Some(9), ..llama_config() })
}

fn four_heads() -> Layers {
    zoo::gpt2(&zoo::Gpt2Config { n_head: 4, resid_pdrop: 0.1, embd_pdrop: 0.1, ..gpt2_config() })
}

/// Asserts that the losses on GPUs differ from those on the CPU by at most `bound`, relatively, and that the placement
/// of state changes no bits.
#[track_caller]
fn assert_like_the_cpu(layers: fn() -> Layers, ranks: usize, more: &str, bound: f32) {
    // NCCL would add the gradients of GPUs in a different order than the host.
    let run = |text: String| run_of(layers, ranks, STEPS, &format!("{text}\nlauncher: {{gpu_transport: host}}"));
    for stage in [1, 3] {
        let (gpu, cpu) = (run(settings("cuda", stage, 2, more)), run(settings("cpu", stage, 2, more)));
        assert!(apart(&gpu, &cpu) < bound, "ZeRO {stage}, {more}: {}", apart(&gpu, &cpu));
        let on_gpu = run(resident("cuda", stage, 2, more));
        assert_same(&on_gpu, &gpu, &format!("ZeRO {stage}, {more}"));
    }
}

#[test]
fn tensor_groups_have_the_losses_of_the_cpu() {
    if !has_gpu() {
        return;
    }
    for layers in [gpt2 as fn() -> Layers, grouped_llama, phi3] {
        assert_like_the_cpu(layers, 2, TENSOR, 1e-4);
    }
    for (dtype, bound) in [(BF16, 5e-3), (FP16, 2e-3)] {
        assert_like_the_cpu(gpt2, 2, &format!("{TENSOR}\n{dtype}"), bound);
    }
    let lora = "adapter: {r: 4, lora_alpha: 16, lora_dropout: 0.1, init_lora_weights: false}";
    let dora = "adapter: {r: 4, lora_alpha: 16, use_dora: true, init_lora_weights: false}";
    for adapter in [lora, dora] {
        assert_like_the_cpu(gpt2, 2, &format!("{TENSOR}\n{adapter}"), 1e-4);
    }
}

#[test]
fn slices_of_sequences_have_the_losses_of_the_cpu() {
    if !has_gpu() {
        return;
    }
    for key in [SEQUENCE, CONTEXT] {
        for layers in [gpt2 as fn() -> Layers, grouped_llama] {
            assert_like_the_cpu(layers, 2, key, 1e-4);
        }
        for (dtype, bound) in [(BF16, 5e-3), (FP16, 2e-3)] {
            assert_like_the_cpu(gpt2, 2, &format!("{key}\n{dtype}"), bound);
        }
    }
    assert_like_the_cpu(windowed, 2, CONTEXT, 1e-4);
}

#[test]
fn slices_among_four_ranks_have_the_losses_of_the_cpu() {
    if !has_gpu() {
        return;
    }
    // Each of the two key and value heads is needed by two ranks.
    assert_like_the_cpu(grouped_llama, 4, "sequence_parallel_size: 4", 1e-4);
    for key in [SEQUENCE, CONTEXT] {
        assert_like_the_cpu(four_heads, 4, &format!("{TENSOR}\n{key}"), 1e-4);
    }
    assert_like_the_cpu(four_heads, 4, &format!("{SEQUENCE}\n{CONTEXT}"), 1e-4);
}

/// Tests grouped queries, 16-bit numbers, windows over more than two ranks, and rings between pairs of ranks.
#[test]
fn ring_attention_has_the_losses_of_the_cpu() {
    if !has_gpu() {
        return;
    }
    assert_like_the_cpu(grouped_llama, 2, RING, 1e-4);
    for (dtype, bound) in [(BF16, 5e-3), (FP16, 2e-3)] {
        assert_like_the_cpu(gpt2, 2, &format!("{RING}\n{dtype}"), bound);
    }
    assert_like_the_cpu(windowed, 4, &RING.replace("degree: 2", "degree: 4"), 1e-4);
    assert_like_the_cpu(four_heads, 4, &format!("{SEQUENCE}\n{RING}"), 1e-4);
}

/// Compares the outputs of evaluations: with a tensor group, every rank has the outputs of all classes; with slices of
/// sequences, each rank has the outputs of its own slices.
#[test]
fn outputs_are_those_of_the_cpu() {
    if !has_gpu() {
        return;
    }
    for more in [TENSOR, SEQUENCE, CONTEXT, RING] {
        let outputs = |device: &str| {
            let text = resident(device, 0, 1, more);
            world(2, |comm| {
                let mut engine = Engine::with_communicator(config(2, &text), gpt2(), comm).unwrap();
                let mut seen = vec![];
                let evaluated = engine.eval_observed(
                    2,
                    |index| Ok(batch(index as u64, 2)),
                    |observed| {
                        seen.extend(
                            observed.outputs()?.single()?.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?,
                        );
                        Ok(())
                    },
                );
                (evaluated.unwrap()[0].loss, seen)
            })
        };
        for ((gpu, seen), (cpu, expected)) in outputs("cuda").iter().zip(&outputs("cpu")) {
            assert!((gpu - cpu).abs() < 1e-5 * cpu, "{more}: {gpu} for {cpu}");
            assert!(seen.iter().all(|x| x.is_finite()), "{more}");
            let largest = expected.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            let apart = seen.iter().zip(expected).fold(0f32, |apart, (a, b)| apart.max((a - b).abs()));
            assert!(seen.len() == expected.len() && apart < 1e-5 * largest, "{more}: {apart} of {largest}");
        }
    }
}

#[test]
fn overlapping_exchanges_keep_their_bits() {
    if !has_gpu() {
        return;
    }
    let run = |more: &str| run_of(gpt2, 2, 2, &resident("cuda", 1, 2, more));
    let overlapping = "tensor_parallel: {autotp_size: 2, tp_overlap_comm: true}";
    assert_same(&run(overlapping), &run(TENSOR), overlapping);
}

/// NCCL moves values without changing bits, but it sums them in a different order than the host.
#[test]
fn exchanges_over_nccl() {
    if !mock::has_gpus(4) || !has_gpu() {
        return;
    }
    let run = |layers: fn() -> Layers, ranks, way: &str, more: &str| -> Trajectory {
        let text = resident("cuda", 1, 2, &format!("{more}\nlauncher: {{gpu_transport: {way}}}"));
        run_of(layers, ranks, STEPS, &text)
    };
    let overlapping = "tensor_parallel: {autotp_size: 2, tp_overlap_comm: true}";
    for (layers, ranks, more) in [
        (gpt2 as fn() -> Layers, 2, TENSOR),
        (gpt2, 2, overlapping),
        (grouped_llama, 2, TENSOR),
        (grouped_llama, 2, SEQUENCE),
        (grouped_llama, 2, CONTEXT),
        (grouped_llama, 2, RING),
        (grouped_llama, 4, "sequence_parallel_size: 4"),
        (four_heads, 4, &format!("{TENSOR}\n{SEQUENCE}")),
        (four_heads, 4, &format!("{SEQUENCE}\n{CONTEXT}")),
    ] {
        let (nccl, host) = (run(layers, ranks, "nccl", more), run(layers, ranks, "host", more));
        assert!(apart(&nccl, &host) < 1e-5, "{more}: {}", apart(&nccl, &host));
    }
    let (nccl, host) =
        (run(gpt2, 2, "nccl", &format!("{TENSOR}\n{BF16}")), run(gpt2, 2, "host", &format!("{TENSOR}\n{BF16}")));
    assert!(apart(&nccl, &host) < 5e-3, "bf16: {}", apart(&nccl, &host));
}
