//! Compares the resident memory of a rank's process with its tracked bytes.

use crate::case;

use case::{Case, sets};

/// Freed bytes that the allocator may keep for reuse beyond the peak in use (`zero_comm::SharedAllocator`).
const KEPT: f64 = (16 << 20) as f64;

/// Trains a model with 80 MB of parameters on `ranks` ranks. Asserts that each process's resident memory, without what
/// the allocator keeps, is at most 5 % above the sum of its tracked peak and its resident memory before training.
fn holds(ranks: usize, zero: &str) {
    let case = Case::new();
    let (count, zero) = (ranks.to_string(), format!("zero_optimization={{{zero}}}"));
    let settings = sets(&[
        "model={type: gpt2, vocab_size: 256, n_positions: 64, n_embd: 640, n_layer: 4, n_head: 8}",
        "training={max_steps: 2, output_dir: run, save_last: false}",
        "launcher={timeout_seconds: 60, threads_per_rank: 1}",
        &zero,
    ]);
    case.train(&[&["-n", &count, "--quiet"], &settings[..]].concat());
    for rank in case.report("run")["memory"]["ranks"].as_array().unwrap() {
        let resident = |key: &str| rank["resident_bytes"][key].as_u64().unwrap_or_else(|| panic!("no {key}: {rank}"));
        let allowed = rank["measured_peak_total_bytes"].as_u64().unwrap() + resident("before");
        // The peak of several ranks counts shared pages once for each rank, so it is only compared for one rank. For
        // several ranks, the memory at the end of the run is compared.
        let occupied = resident(if ranks == 1 { "peak_with_shared" } else { "at_the_end" });
        let what = format!("{ranks} ranks, {zero}: occupied {occupied} of {allowed}");
        assert!(occupied as f64 <= 1.05 * allowed as f64 + KEPT, "{what}\n{rank:#}");
        assert!(occupied > allowed / 2 && occupied <= resident("peak_with_shared"), "{what}\n{rank:#}");
    }
}

#[test]
fn resident_memory_is_close_to_tracked_memory() {
    for ranks in [1, 2] {
        for stage in 0..=3 {
            holds(ranks, &format!("stage: {stage}"));
        }
        let disk = "device: nvme, nvme_path: .";
        holds(ranks, &format!("stage: 2, offload_optimizer: {{{disk}}}"));
        holds(ranks, &format!("stage: 3, offload_optimizer: {{{disk}}}, offload_param: {{{disk}}}"));
    }
}
