//! Tests ranks with a GPU each: with shard groups or secondary shards, training is bit-identical to plain ZeRO.

use super::world::{self, BF16, Trajectory, assert_same};
use super::{apart, has_gpu, mock, resident, settings};

const STEPS: u64 = 2;

/// Trains four ranks with two micro-batches each. Gradients are added on the host, in an order that does not depend on
/// the layout.
fn reproducible(text: &str, way: &str) -> Trajectory {
    let text = text.replace("{device: cuda}", "{device: cuda, reproducible: true}");
    world::run(4, STEPS, &format!("{text}\nlauncher: {{gpu_transport: {way}}}"))
}

#[test]
fn shard_groups_have_the_bits_of_plain_zero() {
    if !mock::has_gpus(4) || !has_gpu() {
        return;
    }
    let groups = "mesh: {data_parallel_replicate_degree: 2}";
    for stage in [1, 2, 3] {
        for text in [resident, settings] {
            let plain = reproducible(&text("cuda", stage, 2, ""), "nccl");
            for way in ["nccl", "host"] {
                let run = reproducible(&text("cuda", stage, 2, groups), way);
                assert_same(&run, &plain, &format!("ZeRO {stage}, {way}"));
            }
        }
        // NCCL adds in its own order, so the losses may differ by rounding.
        let of = |more: &str| world::run(4, STEPS, &resident("cuda", stage, 2, more));
        assert!(apart(&of(groups), &of("")) < 1e-5, "ZeRO {stage}: {}", apart(&of(groups), &of("")));
    }
}

#[test]
fn secondary_shards_have_the_bits_of_plain_zero() {
    if !mock::has_gpus(4) || !has_gpu() {
        return;
    }
    for more in ["", BF16] {
        for text in [resident, settings] {
            let plain = text("cuda", 3, 2, more);
            let secondary = plain.replace("{stage: 3,", "{stage: 3, zero_hpz_partition_size: 2,");
            assert_ne!(plain, secondary);
            let expected = reproducible(&plain, "nccl");
            for way in ["nccl", "host"] {
                assert_same(&reproducible(&secondary, way), &expected, &format!("{way}, {more}"));
            }
        }
    }
}
