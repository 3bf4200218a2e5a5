//! The memory that a rank's process occupies, held against its tracked bytes and the binary.

use crate::case;

use case::Case;

/// Trains on `ranks` ranks a model with 80 MB of parameters: the 16 MiB that are kept for reuse are less than a tenth then. What each process occupies is at most a tenth more than what it tracked
/// and what it had occupied before.
fn holds(ranks: usize, zero: &str) {
    let case = Case::new();
    let (count, zero) = (ranks.to_string(), format!("zero_optimization={{{zero}}}"));
    case.train(&[
        "-n",
        &count,
        "--quiet",
        "--set",
        "model={type: gpt2, vocab_size: 256, n_positions: 64, n_embd: 640, n_layer: 4, n_head: 8}",
        "--set",
        "training={max_steps: 3, output_dir: run, save_last: false}",
        "--set",
        "launcher={timeout_seconds: 60, threads_per_rank: 1}",
        "--set",
        &zero,
    ]);
    for rank in case.report("run")["memory"]["ranks"].as_array().unwrap() {
        let resident = |key: &str| rank["resident_bytes"][key].as_u64().unwrap_or_else(|| panic!("no {key}: {rank}"));
        let allowed = rank["measured_peak_total_bytes"].as_u64().unwrap() + resident("before");
        // Of one rank alone at any time; pages that several share count for each, so of those what is theirs in the end.
        let occupied = resident(if ranks == 1 { "peak_with_shared" } else { "at_the_end" });
        let what = format!("{ranks} ranks, {zero}: occupied {occupied} of {allowed}");
        assert!(occupied as f64 <= 1.1 * allowed as f64, "{what}\n{rank:#}");
        assert!(occupied > allowed / 2 && occupied <= resident("peak_with_shared"), "{what}\n{rank:#}");
    }
}

#[test]
fn what_a_rank_occupies_is_what_it_tracks_and_the_binary() {
    for ranks in [1, 2] {
        for stage in 0..=3 {
            holds(ranks, &format!("stage: {stage}"));
        }
        let disk = "device: nvme, nvme_path: .";
        holds(ranks, &format!("stage: 2, offload_optimizer: {{{disk}}}"));
        holds(ranks, &format!("stage: 3, offload_optimizer: {{{disk}}}, offload_param: {{{disk}}}"));
    }
}
