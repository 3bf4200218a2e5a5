//! Tests collectives on GPUs that send 8-bit and 4-bit codes (qwZ and qgZ of ZeRO++). The kernels are bit-identical to
//! the CPU's code, so it makes no difference where values are encoded and decoded.

use super::world::{self, BF16, FP16, Trajectory, assert_same};
use super::{apart, has_gpu, mock, resident, settings};

/// Collectives run ahead of the host from the second step on.
const STEPS: u64 = 2;
const WEIGHTS: &str = "zero_quantized_weights: true";
const GRADIENTS: &str = "zero_quantized_gradients: true";

/// Returns a configuration, as [`resident`] does.
type Text = fn(&str, u8, usize, &str) -> String;

/// Trains at ZeRO stage 3 with two micro-batches. `keys` are further keys of `zero_optimization`.
fn run(
    text: impl Fn(&str, u8, usize, &str) -> String,
    device: &str,
    (ranks, keys): (usize, &str),
    more: &str,
) -> Trajectory {
    let plain = text(device, 3, 2, more);
    let coded = plain.replace("{stage: 3,", &format!("{{stage: 3, {keys},"));
    assert_ne!(plain, coded);
    world::run(ranks, STEPS, &coded)
}

/// Shards on the host are encoded on the host. Secondary shards on the host receive values that the host has decoded.
/// Gradients are added on the host, in an order that does not depend on the layout.
#[test]
fn quantized_gathers_have_the_same_bits_in_every_layout_and_transport() {
    if !mock::has_gpus(4) || !has_gpu() {
        return;
    }
    let secondary = format!("{WEIGHTS}, zero_hpz_partition_size: 2");
    for (ranks, more) in [(4, ""), (2, BF16), (2, FP16)] {
        let of = |text: Text, keys, way| {
            let text = |device: &str, stage, micro_batches, more: &str| {
                let text = text(device, stage, micro_batches, &format!("{more}\nlauncher: {{gpu_transport: {way}}}"));
                text.replace("{device: cuda}", "{device: cuda, reproducible: true}")
            };
            run(text, "cuda", (ranks, keys), more)
        };
        let expected = of(resident, WEIGHTS, "host");
        assert!(expected.losses != of(resident, "zero_quantized_weights: false", "host").losses, "{more}");
        let mut layouts: Vec<(Text, _, _)> = vec![(resident, WEIGHTS, "nccl"), (settings, WEIGHTS, "nccl")];
        if ranks == 4 {
            layouts.push((resident, &*secondary, "nccl"));
            layouts.push((settings, &*secondary, "host"));
        }
        for (text, keys, way) in layouts {
            assert_same(&of(text, keys, way), &expected, &format!("{ranks} ranks, {keys}, {way}, {more}"));
        }
    }
}

/// With optimizer state on the host, gradients are encoded and summed on the host.
#[test]
fn quantized_reductions_have_the_same_bits_on_any_transport() {
    if !mock::has_gpus(4) || !has_gpu() {
        return;
    }
    // Three ranks have shards of different lengths.
    let (both, near) =
        (format!("{WEIGHTS}, {GRADIENTS}"), format!("{WEIGHTS}, {GRADIENTS}, zero_hpz_partition_size: 2"));
    let replicates = "mesh: {data_parallel_replicate_degree: 2}";
    let adapter = "adapter: {r: 4, init_lora_weights: false}";
    for (case, more) in
        [((3, &*both), ""), ((4, &near), ""), ((4, &near), BF16), ((4, GRADIENTS), replicates), ((4, &near), adapter)]
    {
        let of = |text: Text, way| run(text, "cuda", case, &format!("{more}\nlauncher: {{gpu_transport: {way}}}"));
        let expected = of(resident, "host");
        assert_same(&of(resident, "nccl"), &expected, &format!("{case:?}, {more}"));
        // In bf16, gradients that go to the host are rounded before they are encoded.
        if more != BF16 {
            assert_same(&of(settings, "host"), &expected, &format!("{case:?}, {more}, on the host"));
        }
        let cpu = run(resident, "cpu", case, more);
        assert!(apart(&expected, &cpu) < 1e-3, "{case:?}, {more}: {}", apart(&expected, &cpu));
    }
}
