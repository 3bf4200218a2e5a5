//! The cost table: measuring it, predicting steps from it, and choosing overlap by it.

use crate::case;

use case::{Case, sets};
use serde_json::Value;

/// Writes the cost table `costs.json`, and returns what the benchmark prints.
fn measure(case: &Case, args: &[&str]) -> String {
    let bench = ["bench", "costs", "--config", "ds.yaml", "--steps", "2", "--out", "costs.json"];
    case.succeed(&[&bench, args].concat())
}

#[test]
fn a_cost_table_predicts_the_time_of_steps() {
    let case = Case::new();
    let told = measure(&case, &["-n", "2"]);
    assert!(told.contains("transformer.h.*") && told.contains("all_gather") && told.contains("written to"), "{told}");
    let plan = |args: &[&str]| {
        case.succeed(&[&["plan", "--config", "ds.yaml", "-n", "2", "--costs", "costs.json"], args].concat())
    };
    let json = |args: &[&str]| -> Value { serde_json::from_str(&plan(&[&["--json"], args].concat())).unwrap() };

    let found = json(&[]);
    let time = &found["time"];
    let seconds = time["step_seconds"].as_f64().unwrap();
    assert!(seconds > 0.0 && time["ranks"].as_array().unwrap().len() == 2, "{time}");
    // Two micro-batches of two samples of 16 tokens.
    let rate = time["tokens_per_second"].as_f64().unwrap();
    assert!((rate * seconds - 64.0).abs() < 1e-6, "{time}");
    for rank in time["ranks"].as_array().unwrap() {
        let of = |name: &str| rank[name].as_f64().unwrap();
        assert!(of("computing") > 0.0 && of("collectives") > 0.0, "{rank}");
        assert!((of("computing") + of("idle") - seconds).abs() < 1e-9, "{rank}");
    }
    let told = plan(&["--stages"]);
    assert!(told.contains("from the cost table") && told.contains("communication "), "{told}");
    // More layers of a measured kind and more micro-batches take more computing time.
    let of = |args: &[&str]| json(args)["time"]["ranks"][0]["computing"].as_f64().unwrap();
    assert!(of(&["--set", "model.n_layer=8"]) > of(&[]));
    assert!(of(&["--set", "gradient_accumulation_steps=3"]) > of(&[]));

    // Codes take time to write and read.
    let coded = ["--set", "zero_optimization={stage: 3, zero_quantized_weights: true, zero_quantized_gradients: true}"];
    assert!(json(&coded)["time"]["ranks"][0]["collectives"].as_f64().unwrap() > 0.0);
    let table = std::fs::read_to_string(case.path("costs.json")).unwrap();
    let mut without: Value = serde_json::from_str(&table).unwrap();
    let codes = without.as_object_mut().unwrap().remove("codes").unwrap();
    for times in codes.as_array().unwrap() {
        assert!(["quantize", "dequantize"].iter().all(|time| times[time]["median"].as_f64().unwrap() > 0.0), "{times}");
    }
    std::fs::write(case.path("costs.json"), without.to_string()).unwrap();
    let told = json(&coded)["time"]["missing"].as_str().unwrap().to_string();
    assert!(told.contains("lacks the times of 8-bit and 4-bit codes"), "{told}");
    std::fs::write(case.path("costs.json"), table).unwrap();

    // A plan names the first setting that differs between the table and the configuration.
    let missing = |args: &[&str]| json(args)["time"]["missing"].as_str().unwrap().to_string();
    assert!(missing(&["--set", "train_micro_batch_size_per_gpu=1"]).contains("micro-batch 2, but the plan has 1"));
    assert!(missing(&["--set", "bf16.enabled=true"]).contains("dtype f32, but the plan has bf16"));
    let tiles = missing(&["--set", "model.tiled_mlp_rows=64"]);
    assert!(tiles.contains("MLP tile rows: off, but the plan has 64"), "{tiles}");
    assert!(missing(&["--set", "launcher.threads_per_rank=7"]).contains("the plan has 7"));
    assert!(missing(&["--world-size", "4"]).contains("ranks per group: 2, but the plan has 4"));
    let missing = missing(&["--set", "model.n_embd=32"]);
    assert!(missing.starts_with("the table has no layer like `"), "{missing}");

    // The choice of overlap does not change the results.
    let run =
        |out: &str, set: &str| case.train(&["-n", "2", "--plain", "--max-steps", "3", "--out", out, "--set", set]);
    let told = run("by_table", "training.cost_table=costs.json");
    assert!(told.contains("with compute: the cost table predicts "), "{told}");
    let losses = case.losses("by_table");
    for (out, overlap) in [("with", true), ("without", false)] {
        run(out, &format!("zero_optimization.overlap_comm={overlap}"));
        assert_eq!(losses, case.losses(out));
    }
    // The resolved configuration contains the choice.
    let resolved = std::fs::read_to_string(case.path("by_table/resolved.yaml")).unwrap();
    assert!(resolved.contains("overlap_comm: true") || resolved.contains("overlap_comm: false"), "{resolved}");
}

/// A table that was measured with split layers or split sequences also predicts pipelines, with either schedule.
#[test]
fn a_cost_table_predicts_steps_of_tensor_groups_and_context_groups() {
    let case = Case::new();
    for shared in ["tensor_parallel={autotp_size: 2}", "sequence_parallel_size=2"] {
        let set = ["--set", shared];
        measure(&case, &[&["-n", "2"], &set[..]].concat());
        let plan = |schedule: &str| {
            let pipeline = format!("pipeline={{stages: 2, schedule: {schedule}}}");
            let settings = sets(&[&pipeline, "gradient_accumulation_steps=4"]);
            let args = ["plan", "--json", "--config", "ds.yaml", "-n", "4", "--costs", "costs.json"];
            let plan = case.json(&[&args[..], &set, &settings].concat());
            plan["time"]["step_seconds"].as_f64().unwrap_or_else(|| panic!("{}", plan["time"]))
        };
        for schedule in ["1f1b", "zb_h1"] {
            assert!(plan(schedule) > 0.0, "{shared}, {schedule}");
        }
    }
}

/// Without pipeline stages, each layer takes as long as on the slowest rank. With stages, it takes the mean over the
/// ranks.
#[test]
fn only_pipelines_compute_at_the_mean_speed_of_the_ranks() {
    let case = Case::new();
    measure(&case, &["-n", "2"]);
    let mut table: Value = serde_json::from_slice(&std::fs::read(case.path("costs.json")).unwrap()).unwrap();
    assert!(table["slowest_rank"]["median"].as_f64().unwrap() >= 1.0, "{}", table["slowest_rank"]);
    let computing = |table: &Value, args: &[&str]| {
        std::fs::write(case.path("costs.json"), table.to_string()).unwrap();
        let args = [&["plan", "--json", "--config", "ds.yaml", "-n", "2", "--costs", "costs.json"], args].concat();
        let plan = case.json(&args);
        plan["time"]["ranks"][0]["computing"].as_f64().unwrap_or_else(|| panic!("{}", plan["time"]))
    };
    let mut of = |slowest: f64, args: &[&str]| {
        table["slowest_rank"]["median"] = slowest.into();
        computing(&table, args)
    };
    let staged = sets(&["pipeline={stages: 2}", "zero_optimization.stage=1"]);
    assert_eq!(of(1.0, &[]), of(4.0, &[]));
    assert!(of(1.0, &staged) > of(4.0, &staged));
}

#[test]
fn an_invalid_table_is_an_error_that_names_the_file() {
    let case = Case::new();
    let refused = |table: &str| {
        let told = case.fail(2, &["plan", "--config", "ds.yaml", "--costs", table]);
        assert!(told.starts_with(&format!("error: {table}: ")) && told.contains("help: measure a table"), "{told}");
        told
    };
    assert!(refused("none.json").contains("cannot read the cost table"));
    for (content, wanted) in [
        ("nonsense", "not a cost table"),
        ("{}", "it has no version"),
        (r#"{"version": 99}"#, "has version 99"),
        (r#"{"version": 2}"#, "has version 2"),
        (r#"{"version": 3}"#, "missing field"),
    ] {
        std::fs::write(case.path("bad.json"), content).unwrap();
        let told = refused("bad.json");
        assert!(told.contains(wanted), "{wanted} is not in {told}");
    }
}

/// Each rank computes the updates of its own matrices. The rank with the most work on them decides the time.
#[test]
fn matrix_update_times_follow_the_work_of_the_busiest_rank() {
    let case = Case::new();
    let muon = "optimizer={type: Muon, params: {lr: 0.01, matrices: ['*mlp.c_fc*']}}";
    let told = measure(&case, &["-n", "2", "--set", muon]);
    assert!(told.contains("update per multiply-add"), "{told}");
    let mut table: Value = serde_json::from_slice(&std::fs::read(case.path("costs.json")).unwrap()).unwrap();
    assert!(table["update_matrix"]["median"].as_f64().unwrap() > 0.0, "{table}");
    table["update_matrix"]["median"] = 1.0.into();
    std::fs::write(case.path("slow.json"), table.to_string()).unwrap();
    let seconds = |stage: u8| {
        let stage = format!("zero_optimization.stage={stage}");
        let args = ["plan", "--json", "--config", "ds.yaml", "-n", "2", "--costs", "slow.json", "--set", muon];
        let plan = case.json(&[&args[..], &sets(&["model.n_layer=3", &stage])].concat());
        plan["time"]["step_seconds"].as_f64().unwrap_or_else(|| panic!("{}", plan["time"]))
    };
    // At stage 2, one of the two ranks updates two of the three matrices.
    let (all, two) = (seconds(0), seconds(2));
    assert!((all / two - 1.5).abs() < 0.01, "{all} {two}");
}

/// The cost table of four ranks contains the times of groups of two consecutive ranks, and of groups of two ranks that
/// are 2 apart.
#[test]
fn collectives_of_a_mesh_are_predicted_by_the_times_of_its_groups() {
    let case = Case::new();
    let told = measure(&case, &["-n", "4"]);
    assert!(told.contains("all_reduce by groups of 2 ranks that are 2 apart"), "{told}");
    assert!(told.contains("all_gather by groups of 2 consecutive ranks"), "{told}");
    let measured: Value = serde_json::from_slice(&std::fs::read(case.path("costs.json")).unwrap()).unwrap();
    // Writes a table in which one collective of one kind of group takes a second, and all others take no time.
    let with = |ranks: u64, apart: u64, slow: &str| {
        let mut table = measured.clone();
        let mut found = 0;
        for times in table["transfers"]["groups"].as_array_mut().unwrap() {
            let is_it = times["group"] == serde_json::json!({"ranks": ranks, "apart": apart});
            for operation in ["all_gather", "reduce_scatter", "all_reduce"] {
                let is_slow = is_it && operation == slow;
                found += u32::from(is_slow);
                (times[operation]["latency"], times[operation]["seconds_per_byte"]) =
                    (if is_slow { 1.0.into() } else { 0.0.into() }, 0.0.into());
            }
        }
        assert_eq!(found, 1, "{table}");
        std::fs::write(case.path("slow.json"), table.to_string()).unwrap();
    };
    // The seconds that rank 0 spends in collectives equal the number of slow collectives in which it takes part.
    let collectives = |settings: &[&str]| {
        let args = ["plan", "--json", "--config", "ds.yaml", "-n", "4", "--costs", "slow.json"];
        let plan = case.json(&[&args[..], &sets(settings)].concat());
        plan["time"]["ranks"][0]["collectives"].as_f64().unwrap_or_else(|| panic!("{}", plan["time"])).round()
    };
    let (flat, hybrid, pipeline) = (
        ["zero_optimization.stage=2"],
        ["zero_optimization.stage=2", "mesh={data_parallel_replicate_degree: 2}"],
        ["zero_optimization.stage=2", "pipeline.stages=2"],
    );
    with(2, 2, "all_reduce");
    let (replicated, none) = (collectives(&hybrid), collectives(&flat));
    assert!(replicated > 0.0 && none == 0.0, "{replicated} {none}");
    with(2, 1, "reduce_scatter");
    assert_eq!(
        (collectives(&hybrid), collectives(&flat)),
        (replicated, 0.0),
        "each shard is reduced over its replicates"
    );
    assert!(collectives(&pipeline) > 0.0);
    with(4, 1, "reduce_scatter");
    assert_eq!((collectives(&hybrid), collectives(&flat), collectives(&pipeline)), (0.0, replicated, 0.0));
    // Secondary shards move gathers from all ranks to groups of two.
    let again = "zero_optimization={stage: 3, stage3_max_reuse_distance: 0, stage3_param_persistence_threshold: 0}";
    let (plain, secondary) = ([again], [again, "zero_optimization.zero_hpz_partition_size=2"]);
    with(2, 1, "all_gather");
    let near = collectives(&secondary);
    assert!(near > 0.0 && collectives(&plain) == 0.0, "{near}");
    with(4, 1, "all_gather");
    let all = collectives(&secondary);
    assert!(all > 0.0, "{all}");
    assert_eq!(collectives(&plain), all + near);
}
