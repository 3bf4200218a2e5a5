//! The planner: its output, its errors before launch, and its advice.

use crate::case;

use case::{Alone, Case, port, sets};
use serde_json::Value;

/// A model whose memory is mostly activations.
const WIDE: [&str; 4] =
    ["train_micro_batch_size_per_gpu=8", "model.n_positions=64", "model.n_embd=64", "model.n_layer=8"];

fn plan(case: &Case, args: &[&str]) -> String {
    case.succeed(&[&["plan", "--config", "ds.yaml"], args].concat())
}

fn json(case: &Case, args: &[&str]) -> Value {
    serde_json::from_str(&plan(case, &[&["--json"], args].concat())).unwrap()
}

/// Returns the line of the first change that a plan advises.
fn first_advice(told: &str) -> &str {
    told.lines().find(|line| line.trim_start().starts_with("--set")).unwrap_or_else(|| panic!("{told}"))
}

#[test]
fn a_plan_reports_the_memory_of_a_rank_and_starts_no_run() {
    let case = Case::new();
    let told = plan(&case, &["-n", "2"]);
    for wanted in ["peak memory per rank", "optimizer", "activations", "staging", "fits: a rank needs"] {
        assert!(told.contains(wanted), "{wanted} is not in\n{told}");
    }
    assert!(!case.path("run").exists());
    let plan = json(&case, &["-n", "2"]);
    let stage = &plan["stages"][0];
    assert_eq!(plan["planned_peak_bytes"], stage["planned_peak_total_bytes"]);
    assert_eq!(stage["activations_known"], true);
    let of = |category: &str| stage["planned_peak_bytes"][category].as_u64().unwrap();
    let state = |kind: &str| stage["state_bytes_per_rank"][kind].as_u64().unwrap();
    // The plan reports the peak of the rank with the largest peak, but the state of the first rank.
    assert!(of("parameters") >= state("parameters") && of("parameters") < 2 * state("parameters"));
    assert!(of("optimizer_state") >= state("optimizer_state"));
}

/// A plan reads the data only if `model.vocab_size` is `auto`.
#[test]
fn a_plan_reads_the_data_only_for_the_vocabulary_size() {
    let case = Case::new();
    let with = plan(&case, &[]);
    let gone = ["--set", "data={train: gone.txt, eval: gone.txt}"];
    assert_eq!(plan(&case, &gone), with);
    let auto = [&["plan", "--config", "ds.yaml", "--set", "model.vocab_size=auto"], &gone[..]].concat();
    let errors = case.fail(3, &auto);
    assert!(errors.contains("gone.txt"), "{errors}");
    assert_eq!(plan(&case, &["--set", "model.vocab_size=auto"]), with);
}

/// The report of a run contains the same peak as `zero-train plan`.
#[test]
fn a_run_reports_its_plan() {
    let case = Case::new();
    let planned = json(&case, &["-n", "2"])["planned_peak_bytes"].as_u64().unwrap();
    let told = case.train(&["-n", "2", "--plain", "--max-steps", "2"]);
    assert!(told.contains("memory: planned peak ") && told.contains(" on rank 0"), "{told}");
    let ranks = case.report("run")["memory"]["ranks"].clone();
    let of_ranks: Vec<u64> =
        ranks.as_array().unwrap().iter().map(|r| r["planned_peak_total_bytes"].as_u64().unwrap()).collect();
    assert_eq!(of_ranks.into_iter().max(), Some(planned));
}

/// Four ranks have secondary shards in groups of two. Each parameter is sent to the two ranks of the other group once,
/// and its gradient once for each of two micro-batches. Plan and report state these bytes. The losses are the same as
/// with plain stage 3.
#[test]
fn bytes_between_secondary_groups_are_reported() {
    let case = Case::new();
    let zero = "zero_optimization={stage: 3, stage3_max_reuse_distance: 0, stage3_param_persistence_threshold: 0";
    let plain = format!("{zero}}}");
    let secondary = format!("{zero}, zero_hpz_partition_size: 2}}");
    let batches = ["train_micro_batch_size_per_gpu=1", "train_batch_size=8", "training.trace=true"];
    let args = |zero| [&["-n", "4", "--set", zero], &sets(&batches)[..]].concat();
    case.train(&[&args(&plain)[..], &["--max-steps", "3", "--out", "plain"]].concat());
    let told = case.train(&[&args(&secondary)[..], &["--max-steps", "3", "--plain"]].concat());
    assert!(told.contains("ZeRO stage 3 with secondary shards in groups of 2 ranks, "), "{told}");
    assert_eq!(case.losses("run"), case.losses("plain"));
    let report = case.report("run");
    let ranks = report["memory"]["ranks"].as_array().unwrap();
    let sent = |key: &str| ranks.iter().map(|rank| rank[key].as_u64().unwrap()).collect::<Vec<_>>();
    let across = sent("expected_sent_bytes_across_near_groups");
    assert_eq!(across.iter().sum::<u64>(), 2 * (1 + 2) * report["parameters"].as_u64().unwrap() * 4);
    assert!(sent("expected_sent_bytes_per_step").iter().zip(&across).all(|(all, across)| all > across));
    let instructions = &report["instructions"];
    let [first, again] = ["gather", "gather_secondary"].map(|kind| instructions[kind].as_u64().unwrap());
    assert!(first > 0 && again > first, "{instructions}");
    assert_eq!(report["layers_gathered"], first + again);
    let trace = std::fs::read_to_string(case.path("run/trace.json")).unwrap();
    assert!(trace.contains("gather_secondary segments ["), "the trace names the gathers");
    let planned = json(&case, &args(&secondary));
    assert_eq!((&planned["zero_hpz_partition_size"], &planned["data_parallel_shard_degree"]), (&2.into(), &4.into()));
    assert_eq!(planned["stages"][0]["sent_bytes_across_near_groups"], across[0]);
    let told = plan(&case, &args(&secondary));
    assert!(told.contains("secondary shards in groups of 2 ranks; sent to other groups: "), "{told}");
}

/// Plans a trillion parameters over a thousand ranks without allocating weights.
#[test]
fn a_trillion_parameters_can_be_planned_on_one_machine() {
    let case = Case::new();
    let model = sets(&[
        "model={type: gpt2, vocab_size: 50257, n_positions: 2048, n_embd: 25600, n_layer: 128, n_head: 160}",
        "train_micro_batch_size_per_gpu=1",
        "bf16.enabled=true",
        "activation_checkpointing.enabled=true",
    ]);
    let trillion = [&["--world-size", "1024"], &model[..]].concat();
    let told = plan(&case, &[&trillion[..], &["--device-memory", "80GiB"]].concat());
    assert!(told.contains("1,008,014,617,600"), "{told}");
    assert!(told.contains("does not fit: a rank needs") && told.contains("85.9 GB: `--device-memory`"), "{told}");
    assert!(told.contains("any one of these changes makes it fit") && told.contains("of disk per rank"), "{told}");
    // The memory of other machines is unknown, so without a limit the plan does not say whether the model fits.
    assert!(!plan(&case, &trillion).contains("fit"));
}

/// The lists of a schedule grow with stages × micro-batches, and the time to plan must not grow faster. The test does
/// not assert this: a slow planner only makes the test take longer.
#[test]
fn a_deep_pipeline_with_many_micro_batches_is_planned_in_time() {
    let case = Case::new();
    let deep = sets(&[
        "model={type: gpt2, vocab_size: 256, n_positions: 16, n_embd: 16, n_layer: 32, n_head: 2}",
        "train_micro_batch_size_per_gpu=1",
        "gradient_accumulation_steps=256",
        "pipeline.stages=32",
    ]);
    let told = plan(&case, &[&deep[..], &["--set", "pipeline.schedule=gpipe", "--device-memory", "1kB"]].concat());
    assert!(told.contains("does not fit: a rank needs") && told.contains("more ranks do not help either"), "{told}");
    // With p stages and m micro-batches, the bubble of 1F1B takes (p − 1)/(m + p − 1) of a step. The bubble of ZB-H1
    // takes about a third of that.
    assert!(plan(&case, &deep).contains("1f1b: 10.8 % of a step is bubble"));
    assert!(plan(&case, &[&deep[..], &["--set", "pipeline.schedule=zb_h1"]].concat()).contains("zb_h1: "));
}

/// On one machine, fewer ranks have more memory each. With a fixed memory per rank, more ranks have less state each.
#[test]
fn another_number_of_ranks_is_advised_if_no_setting_helps() {
    let case = Case::new();
    let wide = ["--set", "model={type: gpt2, vocab_size: 256, n_positions: 16, n_embd: 64, n_layer: 24, n_head: 2}"];
    let told = plan(&case, &[&wide[..], &["-n", "400000"]].concat());
    assert!(told.contains("use fewer ranks on this machine: with "), "{told}");
    let told = plan(&case, &[&wide[..], &["-n", "2", "--device-memory", "5MB"]].concat());
    assert!(told.contains("use more ranks with the same memory each: with "), "{told}");
}

/// Stages 0 to 3 over N ranks: 16Ψ, 8Ψ + 8Ψ/N, 4Ψ + 12Ψ/N and 16Ψ/N bytes, as in figure 1 of the ZeRO paper.
#[test]
fn stage_memory_follows_the_closed_forms_of_the_zero_paper() {
    let case = Case::new();
    // Sizes are powers of two, so that shards need almost no rounding.
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
        assert!((bytes - expected).abs() <= 0.03 * expected + 5e4, "{cell} is printed, the formula gives {expected}");
    };
    let two = row("2");
    for (cell, expected) in two[1..].iter().zip([16.0, 12.0, 10.0, 8.0]) {
        near(cell, expected * psi);
    }
}

/// The check before the launch counts the vocabulary of the tokenizer.
#[test]
fn a_vocabulary_of_the_tokenizer_counts() {
    let case = Case::new();
    let tokenizer = concat!("data.tokenizer=", env!("CARGO_MANIFEST_DIR"), "/../examples/data/stories-tokenizer.json");
    let auto = ["-n", "1", "--set", tokenizer, "--set", "model.vocab_size=auto"];
    let needed = json(&case, &auto)["planned_peak_bytes"].as_u64().unwrap();
    let limit = format!("training.memory_limit={}", needed - 1);
    let told = case.train_fails(2, &[&auto[..], &["--set", &limit]].concat());
    assert!(told.starts_with("error: does not fit: a rank needs"), "{told}");
    assert!(!case.path("run").exists(), "a run was started");
}

#[test]
fn a_configuration_that_does_not_fit_is_rejected_before_launch() {
    let case = Case::new();
    let wide = [&["-n", "2"], &sets(&WIDE)[..]].concat();
    let needs = |more: &[&str]| json(&case, &[&wide, more].concat())["planned_peak_bytes"].as_u64().unwrap();
    let recompute = ["--set", "activation_checkpointing.enabled=true"];
    let set = format!("training.memory_limit={}", (needs(&[]) + needs(&recompute)) / 2);
    let limit = [&wide[..], &["--plain", "--max-steps", "2", "--set", &set]].concat();
    let told = case.train_fails(2, &limit);
    assert!(told.starts_with("error: does not fit: a rank needs"), "{told}");
    assert!(
        told.contains(": `training.memory_limit`") && told.contains("--set activation_checkpointing.enabled=true"),
        "{told}"
    );
    assert!(!case.path("run").exists(), "a run was started");
    // The advised setting does fit.
    let advice = first_advice(&told);
    let changes: Vec<&str> = advice.trim().split(": ").next().unwrap().split(' ').collect();
    case.train(&[&limit[..], &changes].concat());
    // `--force` trains anyway.
    case.train(&[&limit[..], &["--force", "--out", "forced"]].concat());
}

/// With long sequences, a tiled MLP is the smallest change that makes the model fit.
#[test]
fn a_tiled_mlp_is_advised() {
    let case = Case::new();
    let long = sets(&[
        "model={type: gpt2, vocab_size: 256, n_positions: 2048, n_embd: 60, n_layer: 2, n_head: 2}",
        "train_micro_batch_size_per_gpu=1",
    ]);
    let tiles = ["--set", "model.tiled_mlp_rows=64"];
    let of = |more: &[&str]| json(&case, &[&long[..], more].concat())["planned_peak_bytes"].as_u64().unwrap();
    let (whole, tiled) = (of(&[]), of(&tiles));
    assert!(tiled < whole, "{whole} bytes untiled, {tiled} bytes tiled");
    let limit = format!("{}", (whole + tiled) / 2);
    let told = plan(&case, &[&long[..], &["--device-memory", &limit]].concat());
    let advice = first_advice(&told);
    assert!(advice.contains("--set model.tiled_mlp_rows=64: "), "{told}");
    assert!(plan(&case, &[&long[..], &tiles, &["--device-memory", &limit]].concat()).contains("fits: "));
    // A model whose MLP is tiled already gets no such advice.
    let told = plan(&case, &[&long[..], &tiles, &["--device-memory", "1MB"]].concat());
    assert!(told.contains("does not fit") && !told.contains("--set model.tiled"), "{told}");
}

/// Ring attention holds the keys and values of fewer ranks, and is advised if that suffices.
#[test]
fn ring_attention_is_advised() {
    let case = Case::new();
    let long = sets(&[
        "model={type: gpt2, vocab_size: 64, n_positions: 4096, n_embd: 64, n_layer: 2, n_head: 2}",
        "train_micro_batch_size_per_gpu=1",
        "mesh.context_parallel_degree=8",
    ]);
    let ring = ["--set", "mesh.context_parallel_rotate_method=alltoall"];
    let long = [&["-n", "8"], &long[..]].concat();
    let of = |more: &[&str]| json(&case, &[&long[..], more].concat())["planned_peak_bytes"].as_u64().unwrap();
    let (gathered, passed) = (of(&[]), of(&ring));
    assert!(passed < gathered * 4 / 5, "{gathered} bytes with gathered keys and values, {passed} bytes with a ring");
    let limit = format!("{}", (gathered + passed) / 2);
    let told = plan(&case, &[&long[..], &["--device-memory", &limit]].concat());
    let advice = first_advice(&told);
    assert!(advice.contains("--set mesh.context_parallel_rotate_method=alltoall: "), "{told}");
    // Ranks that already use it get no such advice.
    let told = plan(&case, &[&long[..], &ring, &["--device-memory", "1MB"]].concat());
    assert!(told.contains("does not fit") && !told.contains("rotate_method"), "{told}");
}

/// If one sample does not fit, the plan advises that more ranks share it: they exchange heads, and beyond the number of
/// heads they pass keys and values around. If a layer does not fit, the plan advises that more ranks split it.
#[test]
fn more_ranks_per_sequence_and_per_layer_are_advised() {
    let case = Case::new();
    let advised = |model: &str, ranks: &str, wanted: &[&str]| {
        let config = sets(&[model, "train_micro_batch_size_per_gpu=1", "train_batch_size=8"]);
        let config = [&["-n", ranks], &config[..]].concat();
        let wanted = sets(wanted);
        let fits = json(&case, &[&config[..], &wanted].concat())["planned_peak_bytes"].as_u64().unwrap();
        let told = plan(&case, &[&config[..], &["--device-memory", &fits.to_string()]].concat());
        let setting =
            format!("--set {}", wanted.iter().skip(1).step_by(2).copied().collect::<Vec<_>>().join(" --set "));
        assert!(told.contains(&format!("{setting}: ")), "no {setting} in\n{told}");
    };
    let long = "model={type: gpt2, vocab_size: 64, n_positions: 4096, n_embd: 64, n_layer: 2, n_head: 2}";
    advised(long, "8", &["sequence_parallel_size=2", "gradient_accumulation_steps=2"]);
    let ring = [
        "sequence_parallel_size=2",
        "mesh.context_parallel_degree=2",
        "mesh.context_parallel_rotate_method=alltoall",
        "gradient_accumulation_steps=4",
    ];
    advised(long, "8", &ring);
    let wide = "model={type: gpt2, vocab_size: 64, n_positions: 64, n_embd: 512, n_layer: 2, n_head: 8}";
    advised(wide, "8", &["tensor_parallel.autotp_size=4", "gradient_accumulation_steps=4"]);
}

/// Activations shrink with the number of ranks per sequence or layer, except for working memory.
#[test]
fn activations_shrink_with_the_number_of_ranks() {
    let case = Case::new();
    let model = sets(&[
        "model={type: gpt2, vocab_size: 256, n_positions: 1024, n_embd: 256, n_layer: 8, n_head: 8}",
        "train_micro_batch_size_per_gpu=1",
    ]);
    let of = |ranks: u64, setting: &str| {
        let told = json(&case, &[&["-n", &ranks.to_string()], &model[..], &["--set", setting]].concat());
        told["stages"][0]["planned_peak_bytes"]["activations"].as_f64().unwrap()
    };
    let one = of(1, "sequence_parallel_size=1");
    for ranks in [2, 4] {
        for setting in [
            format!("sequence_parallel_size={ranks}"),
            format!("mesh={{context_parallel_degree: {ranks}}}"),
            format!("mesh={{context_parallel_degree: {ranks}, context_parallel_rotate_method: alltoall}}"),
            format!("tensor_parallel={{autotp_size: {ranks}}}"),
        ] {
            let share = of(ranks, &setting) * ranks as f64 / one;
            println!("{setting}: {share:.3} of an even share");
            assert!((1.0..1.1).contains(&share), "{setting}: {share}");
        }
    }
}

/// A configuration with a lower stage is advised to use all memory savings of stage 3 before offload to a disk.
#[test]
fn stage_3_without_prefetching_is_advised_before_offload_to_disk() {
    let case = Case::new();
    let model = "model={type: gpt2, vocab_size: 20000, n_positions: 128, n_embd: 256, n_layer: 8, n_head: 4}";
    let wide = ["-n", "8", "--set", model, "--set", "zero_optimization={stage: 1}"];
    let late = sets(&[
        "zero_optimization.stage=3",
        "zero_optimization.stage3_max_reuse_distance=0",
        "zero_optimization.stage3_prefetch_bucket_size=0",
        "activation_checkpointing.enabled=true",
    ]);
    let least = json(&case, &[&wide[..], &late].concat())["planned_peak_bytes"].as_u64().unwrap();
    let told = plan(&case, &[&wide[..], &["--device-memory", &format!("{}", least + 1000)]].concat());
    let advice = first_advice(&told);
    assert!(late.iter().all(|word| advice.contains(word)) && !advice.contains("nvme"), "{told}");
    // With still less memory, the micro-batch is smaller too.
    let model = "model={type: gpt2, vocab_size: 256, n_positions: 128, n_embd: 256, n_layer: 8, n_head: 4}";
    let narrow = ["-n", "2", "--set", model, "--set", "zero_optimization={stage: 1}"];
    let small = sets(&["train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=4"]);
    let least = json(&case, &[&narrow[..], &late, &small].concat())["planned_peak_bytes"].as_u64().unwrap();
    let limit = format!("{}", least + 1000);
    let told =
        plan(&case, &[&narrow[..], &["--set", "gradient_accumulation_steps=2", "--device-memory", &limit]].concat());
    let advice = first_advice(&told);
    assert!(late.iter().chain(&small).all(|word| advice.contains(word)) && !advice.contains("nvme"), "{told}");
}

/// Other launchers do not check the plan before they start the ranks. A rank that exceeds the limit stops with a table
/// of its memory.
#[test]
fn an_exceeded_limit_is_an_error_with_a_table() {
    let case = Case::new();
    let limited = sets(&[&WIDE[..], &["training.memory_limit=8MB"]].concat());
    let args = [&["--config", "ds.yaml", "--plain"], &limited[..]].concat();
    let port = port();
    let ranks = [0, 1].map(|rank| Alone::rank(case.command(&args), rank, 2, port));
    let told = ranks.map(Alone::end);
    let (_, error) = told.iter().find(|(code, _)| *code == Some(2)).unwrap_or_else(|| panic!("{told:?}"));
    assert!(error.contains("`, more than its limit of 8.0 MB"), "{error}");
    for wanted in ["in: training.memory_limit", "activations: ", "optimizer_state: ", "help: "] {
        assert!(error.contains(wanted), "{wanted} is not in\n{error}");
    }
}
