//! The planner: what it prints, what it refuses before anything is started, and what it would change.

use crate::case;

use std::time::Duration;

use case::{Case, text};
use serde_json::Value;

/// Activations are what it needs most.
const WIDE: [&str; 8] = [
    "--set",
    "train_micro_batch_size_per_gpu=8",
    "--set",
    "model.n_positions=64",
    "--set",
    "model.n_embd=64",
    "--set",
    "model.n_layer=8",
];

fn plan(case: &Case, args: &[&str]) -> String {
    let output = case.command(&[&["plan", "--config", "ds.yaml"], args].concat()).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

fn json(case: &Case, args: &[&str]) -> Value {
    serde_json::from_str(&plan(case, &[&["--json"], args].concat())).unwrap()
}

#[test]
fn a_plan_says_what_a_rank_needs_and_starts_nothing() {
    let case = Case::new();
    let told = plan(&case, &["-n", "2"]);
    for wanted in ["memory of a rank, at most", "optimizer", "activations", "staging", "fits: a rank needs"] {
        assert!(told.contains(wanted), "{wanted} is not in\n{told}");
    }
    assert!(!case.path("run").exists());
    let plan = json(&case, &["-n", "2"]);
    let stage = &plan["stages"][0];
    assert_eq!(plan["planned_peak_bytes"], stage["planned_peak_total_bytes"]);
    assert_eq!(stage["activations_known"], true);
    let of = |category: &str| stage["planned_peak_bytes"][category].as_u64().unwrap();
    let state = |kind: &str| stage["state_bytes_per_rank"][kind].as_u64().unwrap();
    // The one is of the busiest rank, the other of the first.
    assert!(of("parameters") >= state("parameters") && of("parameters") < 2 * state("parameters"));
    assert!(of("optimizer_state") >= state("optimizer_state"));
}

/// Data say how many tokens there are, where the configuration does not, and nothing else.
#[test]
fn a_plan_needs_the_data_for_their_vocabulary_alone() {
    let case = Case::new();
    let with = plan(&case, &[]);
    let gone = ["--set", "data={train: gone.txt, eval: gone.txt}"];
    assert_eq!(plan(&case, &gone), with);
    let auto = [&["plan", "--config", "ds.yaml", "--set", "model.vocab_size=auto"], &gone[..]].concat();
    let output = case.command(&auto).output().unwrap();
    assert!(output.status.code() == Some(3) && text(&output.stderr).contains("gone.txt"), "{}", text(&output.stderr));
    assert_eq!(plan(&case, &["--set", "model.vocab_size=auto"]), with);
}

/// The run holds what was planned for it.
#[test]
fn a_run_says_its_plan() {
    let case = Case::new();
    let planned = json(&case, &["-n", "2"])["planned_peak_bytes"].as_u64().unwrap();
    let told = case.train(&["-n", "2", "--plain", "--max-steps", "2"]);
    assert!(told.contains("memory: ") && told.contains(" at most on rank 0, as planned"), "{told}");
    let ranks = case.report("run")["memory"]["ranks"].clone();
    let of_ranks: Vec<u64> =
        ranks.as_array().unwrap().iter().map(|r| r["planned_peak_total_bytes"].as_u64().unwrap()).collect();
    assert_eq!(of_ranks.into_iter().max(), Some(planned));
}

/// A trillion parameters over a thousand ranks, without a weight.
#[test]
fn a_plan_needs_neither_the_machines_nor_the_memory() {
    let case = Case::new();
    let trillion = [
        "--world-size",
        "1024",
        "--set",
        "model={type: gpt2, vocab_size: 50257, n_positions: 2048, n_embd: 25600, n_layer: 128, n_head: 160}",
        "--set",
        "train_micro_batch_size_per_gpu=1",
        "--set",
        "bf16.enabled=true",
        "--set",
        "activation_checkpointing.enabled=true",
    ];
    let told = plan(&case, &[&trillion[..], &["--device-memory", "80GiB"]].concat());
    assert!(told.contains("1,008,014,617,600"), "{told}");
    assert!(told.contains("does not fit: a rank needs") && told.contains("85.9 GB: `--device-memory`"), "{told}");
    assert!(told.contains("one of these makes it fit") && told.contains("of its disk"), "{told}");
    // What other machines have is not known.
    assert!(!plan(&case, &trillion).contains("fit"));
}

/// A schedule's lists grow with stages times micro-batches; what is done with them must not grow faster. That shows in how long this
/// test takes, and in nothing else.
#[test]
fn a_deep_pipeline_of_many_micro_batches_is_planned_with_all_advice() {
    let case = Case::new();
    let deep = [
        "--set",
        "model={type: gpt2, vocab_size: 256, n_positions: 16, n_embd: 16, n_layer: 32, n_head: 2}",
        "--set",
        "train_micro_batch_size_per_gpu=1",
        "--set",
        "gradient_accumulation_steps=256",
        "--set",
        "pipeline.stages=32",
    ];
    let told = plan(&case, &[&deep[..], &["--set", "pipeline.schedule=gpipe", "--device-memory", "1kB"]].concat());
    assert!(
        told.contains("does not fit: a rank needs") && told.contains("nor do more ranks, since what a rank"),
        "{told}"
    );
    // Bubbles of (p − 1)/(m + p − 1), and a third of it.
    assert!(plan(&case, &deep).contains("1f1b: 10.8 % of a step is bubble"));
    assert!(plan(&case, &[&deep[..], &["--set", "pipeline.schedule=zb_h1"]].concat()).contains("zb_h1: "));
}

/// Of state alone as many ranks can be had as it takes; of one machine's memory each rank has the less the more there are.
#[test]
fn where_no_setting_helps_the_number_of_ranks_is_advised_that_does() {
    let case = Case::new();
    let wide = ["--set", "model={type: gpt2, vocab_size: 256, n_positions: 16, n_embd: 64, n_layer: 24, n_head: 2}"];
    let told = plan(&case, &[&wide[..], &["-n", "400000"]].concat());
    assert!(told.contains("use fewer ranks on this machine: of "), "{told}");
    let told = plan(&case, &[&wide[..], &["-n", "2", "--device-memory", "5MB"]].concat());
    assert!(told.contains("use more ranks, each with as much memory: of "), "{told}");
}

/// Figure 1 of the ZeRO paper: 16Ψ, 8Ψ + 8Ψ/N, 4Ψ + 12Ψ/N, 16Ψ/N.
#[test]
fn stages_over_ranks_follow_the_closed_forms() {
    let case = Case::new();
    // Of powers of two, so that nothing is rounded: 2^20 parameters in a layer without bias would be, but for the last one.
    let model = "model={type: gpt2, vocab_size: 1024, n_positions: 64, n_embd: 128, n_layer: 1, n_head: 2}";
    let told = plan(&case, &["--stages", "--set", model]);
    let row = |ranks: &str| -> Vec<String> {
        let line = told.lines().find(|line| line.trim_start().starts_with(&format!("{ranks}  "))).unwrap();
        line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).map(String::from).collect()
    };
    let one = row("1");
    assert!(one[1..].iter().all(|cell| *cell == one[1]), "{told}");
    let psi = json(&case, &["--set", model])["stages"][0]["parameters"].as_u64().unwrap() as f64;
    let near = |cell: &str, expected: f64| {
        let (number, unit) = cell.split_once(' ').unwrap();
        let scale = match unit {
            "MB" => 1e6,
            "kB" => 1e3,
            _ => 1.0,
        };
        let bytes = number.parse::<f64>().unwrap() * scale;
        assert!((bytes - expected).abs() <= 0.03 * expected + 5e4, "{cell}, and {expected} by the formula");
    };
    let two = row("2");
    for (cell, expected) in two[1..].iter().zip([16.0, 12.0, 10.0, 8.0]) {
        near(cell, expected * psi);
    }
}

#[test]
fn what_does_not_fit_is_refused_before_launch() {
    let case = Case::new();
    let needs =
        |more: &[&str]| json(&case, &[&WIDE[..], &["-n", "2"], more].concat())["planned_peak_bytes"].as_u64().unwrap();
    let recompute = ["--set", "activation_checkpointing.enabled=true"];
    let set = format!("training.memory_limit={}", (needs(&[]) + needs(&recompute)) / 2);
    let limit = [&WIDE[..], &["-n", "2", "--plain", "--max-steps", "2", "--set", &set]].concat();
    let output = case.run(&limit);
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(told.starts_with("error: does not fit: a rank needs"), "{told}");
    assert!(
        told.contains(": `training.memory_limit`") && told.contains("--set activation_checkpointing.enabled=true"),
        "{told}"
    );
    assert!(!case.path("run").exists(), "something was started");
    // What it says does fit.
    let advice = told.lines().find(|line| line.trim_start().starts_with("--set")).unwrap();
    let changes: Vec<&str> = advice.trim().split(": ").next().unwrap().split(' ').collect();
    case.train(&[&limit[..], &changes].concat());
    // And who insists, may.
    case.train(&[&limit[..], &["--force", "--out", "forced"]].concat());
}

/// With long sequences the feed-forward part in tiles is the smallest change, and a plan of it says the same.
#[test]
fn tiles_of_the_feed_forward_part_are_advised() {
    let case = Case::new();
    let long = [
        "--set",
        "model={type: gpt2, vocab_size: 256, n_positions: 2048, n_embd: 60, n_layer: 2, n_head: 2}",
        "--set",
        "train_micro_batch_size_per_gpu=1",
    ];
    let tiles = ["--set", "model.tiled_mlp_rows=64"];
    let of = |more: &[&str]| json(&case, &[&long[..], more].concat())["planned_peak_bytes"].as_u64().unwrap();
    let (whole, tiled) = (of(&[]), of(&tiles));
    assert!(tiled < whole, "{whole}, in tiles {tiled}");
    let limit = format!("{}", (whole + tiled) / 2);
    let told = plan(&case, &[&long[..], &["--device-memory", &limit]].concat());
    let advice = told.lines().find(|line| line.trim_start().starts_with("--set")).unwrap_or_else(|| panic!("{told}"));
    assert!(advice.contains("--set model.tiled_mlp_rows=64: "), "{told}");
    assert!(plan(&case, &[&long[..], &tiles, &["--device-memory", &limit]].concat()).contains("fits: "));
    // What is in tiles already is not advised again, nor where there is nothing of the kind.
    let told = plan(&case, &[&long[..], &tiles, &["--device-memory", "1MB"]].concat());
    assert!(told.contains("does not fit") && !told.contains("--set model.tiled"), "{told}");
}

/// From a lower stage too, what stage 3 can do without a disk comes before the disk.
#[test]
fn stage_3_that_gathers_late_is_advised_before_a_disk() {
    let case = Case::new();
    let wide = [
        "--set",
        "model={type: gpt2, vocab_size: 20000, n_positions: 128, n_embd: 256, n_layer: 8, n_head: 4}",
        "-n",
        "8",
        "--set",
        "zero_optimization={stage: 1}",
    ];
    let late = [
        "--set",
        "zero_optimization.stage=3",
        "--set",
        "zero_optimization.stage3_max_reuse_distance=0",
        "--set",
        "zero_optimization.stage3_prefetch_bucket_size=0",
        "--set",
        "activation_checkpointing.enabled=true",
    ];
    let least = json(&case, &[&wide[..], &late].concat())["planned_peak_bytes"].as_u64().unwrap();
    let told = plan(&case, &[&wide[..], &["--device-memory", &format!("{}", least + 1000)]].concat());
    let advice = told.lines().find(|line| line.trim_start().starts_with("--set")).unwrap_or_else(|| panic!("{told}"));
    assert!(late.iter().all(|word| advice.contains(word)) && !advice.contains("nvme"), "{told}");
}

/// A rank that another launcher started has no plan before it: it stops with a table where it holds too much.
#[test]
fn a_limit_that_is_passed_is_an_error_with_a_table() {
    let case = Case::new();
    let limit = [&WIDE[..], &["--config", "ds.yaml", "--plain", "--set", "training.memory_limit=8MB"]].concat();
    let mut ranks: Vec<_> = (0..2)
        .map(|rank: usize| {
            let place = [
                ("RANK", rank.to_string()),
                ("WORLD_SIZE", "2".into()),
                ("LOCAL_RANK", rank.to_string()),
                ("LOCAL_WORLD_SIZE", "2".into()),
                ("MASTER_ADDR", "127.0.0.1".into()),
                ("MASTER_PORT", "29617".into()),
            ];
            let mut command = case.command(&limit);
            command.envs(place).stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
            command.spawn().unwrap()
        })
        .collect();
    let mut told = vec![];
    for rank in ranks.drain(..) {
        let output = rank.wait_with_output().unwrap();
        told.push((output.status.code(), text(&output.stderr)));
        std::thread::sleep(Duration::from_millis(1));
    }
    let (_, error) = told.iter().find(|(code, _)| *code == Some(2)).unwrap_or_else(|| panic!("{told:?}"));
    assert!(error.contains("and may hold 8.0 MB, at `"), "{error}");
    for wanted in ["in: training.memory_limit", "activations: ", "optimizer_state: ", "help: "] {
        assert!(error.contains(wanted), "{wanted} is not in\n{error}");
    }
}
