//! The cost table: measuring it, predicting steps from it, and choosing overlap by it.

use crate::case;

use case::{Case, text};
use serde_json::Value;

#[test]
fn a_cost_table_predicts_the_time_of_steps() {
    let case = Case::new();
    let measured = case
        .command(&["bench", "costs", "--config", "ds.yaml", "-n", "2", "--steps", "2", "--out", "costs.json"])
        .output()
        .unwrap();
    assert!(measured.status.success(), "{}", text(&measured.stderr));
    let told = text(&measured.stdout);
    assert!(told.contains("transformer.h.*") && told.contains("all_gather") && told.contains("written to"), "{told}");
    let plan = |args: &[&str]| {
        let args = [&["plan", "--config", "ds.yaml", "-n", "2", "--costs", "costs.json"], args].concat();
        let output = case.command(&args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
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
    assert!(of(&["--set", "gradient_accumulation_steps=3"]) > 2.0 * of(&[]));

    // A plan names the first setting for which the table does not hold.
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

#[test]
fn an_invalid_table_is_an_error_that_names_the_file() {
    let case = Case::new();
    let refused = |table: &str| {
        let args = ["plan", "--config", "ds.yaml", "--costs", table];
        let output = case.command(&args).output().unwrap();
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{told}");
        assert!(told.starts_with(&format!("error: {table}: ")) && told.contains("help: measure a table"), "{told}");
        told
    };
    assert!(refused("none.json").contains("cannot read the cost table"));
    for (content, wanted) in [
        ("nonsense", "not a cost table"),
        ("{}", "it has no version"),
        (r#"{"version": 99}"#, "has version 99"),
        (r#"{"version": 1}"#, "missing field"),
    ] {
        std::fs::write(case.path("bad.json"), content).unwrap();
        let told = refused("bad.json");
        assert!(told.contains(wanted), "{wanted} is not in {told}");
    }
}

/// Each rank computes the updates of its own matrices. The rank with the most work on them decides the time.
#[test]
fn updates_of_matrices_are_predicted_by_their_work() {
    let case = Case::new();
    let muon = "optimizer={type: Muon, params: {lr: 0.01, matrices: ['*mlp.c_fc*']}}";
    let args =
        ["bench", "costs", "--config", "ds.yaml", "--steps", "2", "--out", "costs.json", "-n", "2", "--set", muon];
    let measured = case.command(&args).output().unwrap();
    assert!(measured.status.success(), "{}", text(&measured.stderr));
    assert!(text(&measured.stdout).contains("update per multiply-add"), "{}", text(&measured.stdout));
    let mut table: Value = serde_json::from_slice(&std::fs::read(case.path("costs.json")).unwrap()).unwrap();
    assert!(table["update_matrix"]["median"].as_f64().unwrap() > 0.0, "{table}");
    table["update_matrix"]["median"] = 1.0.into();
    std::fs::write(case.path("slow.json"), table.to_string()).unwrap();
    let seconds = |stage: u8| {
        let stage = format!("zero_optimization.stage={stage}");
        let args = ["plan", "--json", "--config", "ds.yaml", "-n", "2", "--costs", "slow.json", "--set", muon];
        let output =
            case.command(&[&args[..], &["--set", "model.n_layer=3", "--set", &stage]].concat()).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
        plan["time"]["step_seconds"].as_f64().unwrap_or_else(|| panic!("{}", plan["time"]))
    };
    // One of two ranks has two of the three matrices.
    let (all, two) = (seconds(0), seconds(2));
    assert!((all / two - 1.5).abs() < 0.01, "{all} {two}");
}
