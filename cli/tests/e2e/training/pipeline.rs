//! Pipelines with one process per rank, over shared memory and TCP.

use crate::case;

use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value;

use case::{Alone, Case, port, signal, wait_for};

const SCHEDULES: [&str; 4] = ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1"];
const MICRO_BATCHES: usize = 4;

/// Returns the arguments for a pipeline of a model with seven layers.
fn pipeline(stages: usize, schedule: &str, zero_stage: usize, more: &[&str]) -> Vec<String> {
    let mut values = vec![
        "model.n_layer=4".to_string(),
        format!("gradient_accumulation_steps={MICRO_BATCHES}"),
        format!("zero_optimization.stage={zero_stage}"),
        format!("pipeline={{stages: {stages}, schedule: {schedule}}}"),
    ];
    values.extend(more.iter().map(ToString::to_string));
    values.into_iter().flat_map(|value| ["--set".to_string(), value]).collect()
}

/// Trains, asserts success, and returns standard output.
fn train(case: &Case, args: &[&str], options: &[String]) -> String {
    case.train(&[args, &options.iter().map(String::as_str).collect::<Vec<_>>()].concat())
}

#[test]
fn processes_over_any_transport_are_bit_identical_to_threads_and_to_one_stage() {
    let case = Case::new();
    for (zero_stage, schedule) in SCHEDULES.into_iter().enumerate() {
        let of = |stages: usize, ranks: &str, transport: &str| {
            let out = format!("{schedule}-{stages}-{transport}");
            let options = pipeline(stages, schedule, zero_stage, &[&format!("launcher.transport={transport}")]);
            train(&case, &["--quiet", "-n", ranks, "--max-steps", "8", "--out", &out], &options);
            (case.losses(&out), case.shards(&out, 8))
        };
        let threads = of(2, "4", "threads");
        assert_eq!((threads.0.len(), threads.1.as_array().map(Vec::len)), (8, Some(4)));
        assert_eq!(threads.0, of(1, "2", "threads").0, "{schedule}, ZeRO {zero_stage}");
        for transport in ["shared_memory", "tcp"] {
            assert!(threads == of(2, "4", transport), "{schedule}, ZeRO {zero_stage}, {transport}");
        }
    }
}

/// Returns the bytes that all ranks of an all-reduce send together.
fn all_reduced(elements: usize, ranks: usize, width: usize) -> u64 {
    (2 * (ranks - 1) * elements * width) as u64
}

#[test]
fn the_report_predicts_what_a_step_sends_to_the_byte() {
    const RANKS: usize = 4;
    let case = Case::new();
    for (zero_stage, schedule) in (0..4).flat_map(|zero| SCHEDULES.map(|schedule| (zero, schedule))) {
        let out = format!("{schedule}-{zero_stage}");
        // An evaluation is not part of a step.
        let options = pipeline(2, schedule, zero_stage, &["training.eval_every=2"]);
        train(&case, &["--quiet", "-n", "4", "--max-steps", "3", "--out", &out], &options);
        let report = case.report(&out);
        assert_eq!((&report["world_size"], &report["zero_stage"]), (&Value::from(RANKS), &Value::from(zero_stage)));
        let ranks = report["memory"]["ranks"].as_array().unwrap();
        let program: u64 = ranks.iter().map(|rank| rank["expected_sent_bytes_per_step"].as_u64().unwrap()).sum();
        // In addition to the messages of its program, a step all-reduces the gradient norm over all ranks and the
        // losses over the replicas of the last stage, and broadcasts the mean loss.
        let losses = if zero_stage >= 2 { MICRO_BATCHES } else { 1 };
        let norm = all_reduced(zero_optim::exact_sum::LIMBS, RANKS, 8);
        let loss = all_reduced(losses, 2, 4) + 4 * (RANKS as u64 - 1);
        for step in case.metrics(&out) {
            assert_eq!(step["sent_bytes"].as_u64(), Some(program + norm + loss), "{out}, step {}", step["step"]);
        }
        for rank in ranks {
            for kind in ["parameters", "gradients", "optimizer_state"] {
                assert_eq!(rank["measured_peak_bytes"][kind], rank["expected_state_bytes"][kind], "{out}: {kind}");
            }
        }
    }
}

#[test]
fn verify_passes_with_pipelines() {
    let case = Case::new();
    for (zero_stage, schedule) in [(3, "1f1b"), (2, "zb_h1"), (1, "interleaved_1f1b"), (0, "gpipe")] {
        let args = ["--plain", "-n", "4", "--verify", "3"];
        let options =
            |reproducible: bool| pipeline(2, schedule, zero_stage, &[&format!("training.reproducible={reproducible}")]);
        let out = train(&case, &args, &options(true));
        assert_eq!(out.matches("same bits").count(), 3, "{out}");
        let out = train(&case, &args, &options(false));
        assert!(out.contains("verified: largest relative difference"), "{out}");
    }
    assert!(!case.path("run").exists(), "a run folder was written");
}

/// Evaluation, checkpoints during training and a sample of text at the end also give the same results.
#[test]
fn evaluation_checkpoints_and_samples_are_identical_to_one_stage() {
    let case = Case::new();
    let more = ["training.eval_every=2", "training.save_every=3", "training.sample={prompt: line, tokens: 12}"];
    for (zero_stage, schedule) in SCHEDULES.into_iter().enumerate() {
        let of = |stages: usize, ranks: &str| {
            let out = format!("{schedule}-{stages}");
            let args = ["--plain", "-n", ranks, "--max-steps", "6", "--out", &out];
            let said = train(&case, &args, &pipeline(stages, schedule, zero_stage, &more));
            let sample = said.split("--- sample ---").nth(1).unwrap_or_else(|| panic!("{said}"));
            let sample = sample.split("--------------").next().unwrap_or_default().to_string();
            assert!(sample.trim().len() > "line".len() && case.path(&out).join("checkpoints/step-00000003").exists());
            let evaluated: Vec<_> = case.metrics(&out).iter().map(|step| step["eval_loss"].to_string()).collect();
            assert!(evaluated[0] == "null" && evaluated[1] != "null", "{evaluated:?}");
            (case.losses(&out), evaluated, sample)
        };
        assert_eq!(of(1, "2"), of(3, "6"), "{schedule}, ZeRO {zero_stage}");
    }
}

#[test]
fn a_stopped_pipeline_resumes_bit_identically_under_another_schedule() {
    let case = Case::new();
    let of = |out, steps, more: &[&str], options: &[String]| {
        train(&case, &[&["--quiet", "-n", "4", "--max-steps", steps, "--out", out], more].concat(), options)
    };
    of("whole", "12", &[], &pipeline(2, "1f1b", 3, &[]));
    let options = pipeline(2, "1f1b", 3, &[]);
    let mut child = case
        .command(&["--config", "ds.yaml", "--plain", "-n", "4", "--max-steps", "12", "--out", "parts"])
        .args(&options)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    case.wait_for_steps("parts", 3);
    signal(child.id(), "TERM");
    // On a fast machine, training may have finished before the signal.
    assert!(matches!(child.wait().unwrap().code(), Some(143 | 0)));
    // ZeRO stage 2 sums in the same order as stage 3, over the same two replicas.
    of("parts", "12", &["--resume", "auto"], &pipeline(2, "zb_h1", 2, &[]));
    assert_eq!(case.losses("whole"), case.losses("parts"));
    assert_eq!(case.shards("whole", 12), case.shards("parts", 12));
}

/// Starts ranks without a launcher, so that each survivor must notice a lost rank by itself.
fn ranks_alone(case: &Case, count: usize, out: &str, options: &[String]) -> Vec<Alone> {
    let port = port();
    let args = ["--config", "ds.yaml", "--plain", "--max-steps", "1000000", "--out", out];
    let args: Vec<&str> = args.into_iter().chain(options.iter().map(String::as_str)).collect();
    (0..count).map(|rank| Alone::rank(case.command(&args), rank, count, port)).collect()
}

/// Every other rank ends and names the lost rank, whether it is in the same stage, an earlier or a later one.
#[test]
fn a_rank_killed_in_a_pipeline_is_named_by_all_others() {
    let case = Case::new();
    for (transport, schedule) in [("shared_memory", "1f1b"), ("tcp", "zb_h1")] {
        // The timeout is not reached in this test: the ranks end because they notice the loss.
        let deadline = ["launcher.timeout_seconds=60".to_string(), format!("launcher.transport={transport}")];
        let options = pipeline(3, schedule, 2, &[&deadline[0], &deadline[1]]);
        for victim in [0, 3, 5] {
            let out = format!("{transport}-{victim}");
            let mut ranks = ranks_alone(&case, 6, &out, &options);
            case.wait_for_steps(&out, 3);
            signal(ranks[victim].id(), "KILL");
            let killed = Instant::now();
            wait_for(|| ranks.iter_mut().all(Alone::has_ended));
            // Ranks end within a second on an idle machine. A busy machine may take longer, so this only detects hangs.
            assert!(killed.elapsed() < Duration::from_secs(20), "{out}: {:?}", killed.elapsed());
            for (rank, ended) in ranks.into_iter().map(Alone::end).enumerate().filter(|(rank, _)| *rank != victim) {
                let (status, errors) = ended;
                assert_eq!(status, Some(4), "{out}, rank {rank}: {errors}");
                assert!(errors.contains(&format!("rank {rank} ")), "{out}, rank {rank}: {errors}");
                assert!(errors.contains(&format!("lost rank {victim} in ")), "{out}, rank {rank}: {errors}");
            }
        }
    }
}

/// The last stage has only the head, whose weight is tied to the embedding, so it reduces and updates no parameters.
#[test]
fn a_stage_may_own_no_parameters() {
    let case = Case::new();
    for zero_stage in 0..=3 {
        let mut options = pipeline(4, "1f1b", zero_stage, &[]);
        options.extend(["--set".into(), "pipeline.partition_method=uniform".into()]);
        let out = format!("alone-{zero_stage}");
        train(&case, &["--quiet", "-n", "4", "--max-steps", "2", "--out", &out], &options);
        let report = case.report(&out);
        assert_eq!(report["pipeline"]["stages"][3], serde_json::json!(["lm_head"]), "{}", report["pipeline"]);
        assert_eq!(report["optimizer_steps"], 2);
    }
}
