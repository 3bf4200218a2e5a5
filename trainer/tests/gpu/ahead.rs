//! Collectives that run ahead of the host: the same bits as collectives that ranks compare one by one.

use super::world::{self, BF16, assert_same};
use super::{has_gpu, mock, resident, settings};

#[test]
fn collectives_that_run_ahead_have_the_bits_of_collectives_that_are_compared() {
    if !mock::has_gpus(4) || !has_gpu() {
        return;
    }
    let schedule = "pipeline: {stages: 2, schedule: zb_h1}";
    // Three ranks have shards of different lengths.
    for (ranks, stage, more) in [
        (2, 1, ""),
        (3, 2, BF16),
        (3, 3, ""),
        (2, 3, "sequence_parallel_size: 2"),
        (2, 2, "mesh: {context_parallel_degree: 2, context_parallel_rotate_method: alltoall}"),
        (2, 3, "tensor_parallel: {autotp_size: 2, tp_overlap_comm: true}"),
        (4, 1, schedule),
        (4, 2, "mesh: {data_parallel_replicate_degree: 2}"),
    ] {
        for text in [resident, settings] {
            let of = |checks: bool| {
                let launcher = format!("launcher: {{gpu_transport: nccl, check_collectives: {checks}}}");
                world::run(ranks, 2, &text("cuda", stage, 2, &format!("{more}\n{launcher}")))
            };
            assert_same(&of(false), &of(true), &format!("{ranks} ranks, ZeRO {stage}, {more}"));
        }
    }
}
