//! Tests collectives that GPUs run ahead of the host. The results are bit-identical with `launcher.check_collectives`,
//! with which ranks compare each collective before it starts.
//!
//! Collectives run ahead from the second step on.

use super::world::{self, BF16, assert_same};
use super::{has_gpu, mock, resident, settings};

#[test]
fn collectives_that_run_ahead_have_the_bits_of_collectives_that_are_compared() {
    if !mock::has_gpus(4) || !has_gpu() {
        return;
    }
    let schedule = "pipeline: {stages: 2, schedule: zb_h1}";
    // Three ranks have shards of different lengths.
    for (text, ranks, stage, more) in [
        (resident as fn(&str, u8, usize, &str) -> String, 2, 1, ""),
        (resident, 3, 2, BF16),
        (settings, 3, 3, ""),
        (resident, 2, 3, "sequence_parallel_size: 2"),
        (resident, 2, 2, "mesh: {context_parallel_degree: 2, context_parallel_rotate_method: alltoall}"),
        (resident, 2, 3, "tensor_parallel: {autotp_size: 2, tp_overlap_comm: true}"),
        (settings, 4, 1, schedule),
        (resident, 4, 2, "mesh: {data_parallel_replicate_degree: 2}"),
    ] {
        let of = |checks: bool| {
            let launcher = format!("launcher: {{gpu_transport: nccl, check_collectives: {checks}}}");
            world::run(ranks, 4, &text("cuda", stage, 2, &format!("{more}\n{launcher}")))
        };
        assert_same(&of(false), &of(true), &format!("{ranks} ranks, ZeRO {stage}, {more}"));
    }
}
