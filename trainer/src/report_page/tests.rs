//! Tests pages of synthetic run folders.

use std::fmt::Write as _;

use tempfile::TempDir;

use super::*;

/// Text that a page executes if it does not escape the text.
const HOSTILE: &str = "</script><script>window.hacked = 1</script><img src=x onerror=hacked()>";

/// Creates a run folder with this many steps, an evaluation every ten steps, and a loss that is not finite at step 5.
fn folder(parent: &TempDir, name: &str, steps: u64) -> PathBuf {
    let folder = parent.path().join(name);
    fs::create_dir_all(&folder).unwrap();
    let mut text = String::new();
    for step in 1..=steps {
        let loss = if step == 5 { Value::Null } else { json!(5.0 / step as f64) };
        let eval_loss = if step % 10 == 0 { json!(6.0 / step as f64) } else { Value::Null };
        let line = json!({
            "step": step, "loss": loss, "lr": 1e-3, "grad_norm": 0.5, "loss_scale": null, "skipped": step == 5,
            "samples": 4, "tokens": 64, "step_ms": 2.5, "tokens_per_s": 25600.0, "sent_bytes": 1000,
            "peak_bytes": 1 << 20, "eval_loss": eval_loss,
        });
        writeln!(text, "{line}").unwrap();
    }
    fs::write(folder.join("metrics.jsonl"), text).unwrap();
    folder
}

fn finish(folder: &Path, last_loss: f64) {
    let report = json!({ "finished": "done", "steps": 20, "last_loss": last_loss, "transport": HOSTILE });
    fs::write(folder.join("report.json"), report.to_string()).unwrap();
}

/// Parses the data in a page as a browser does.
fn data(page: &str) -> Value {
    let (_, after) = page.split_once(r#"<script type="application/json" id="data">"#).expect("the element");
    serde_json::from_str(after.split("</script").next().unwrap()).unwrap()
}

fn error(folders: &[PathBuf]) -> String {
    let error = report_page(folders).unwrap_err();
    assert_ne!(error.exit_status(), 0);
    error.to_string()
}

#[test]
fn a_page_has_all_curves_and_totals() {
    let parent = TempDir::new().unwrap();
    let folder = folder(&parent, "first", 20);
    finish(&folder, 0.25);
    let data = data(&report_page(std::slice::from_ref(&folder)).unwrap());
    let run = &data["runs"][0];
    assert_eq!((&run["name"], &run["finished"]), (&json!("first"), &json!("done")));
    let steps: Vec<u64> = (1..=20).collect();
    for name in ["loss", "lr", "grad_norm", "tokens_per_s", "step_ms", "sent_bytes", "peak_bytes"] {
        assert_eq!(run["curves"][name]["steps"], json!(steps), "{name}");
    }
    assert_eq!(run["curves"]["loss"]["values"][4], Value::Null, "not finite");
    assert_eq!(run["curves"]["loss"]["values"][19], 0.25);
    assert_eq!(run["curves"]["eval_loss"], json!({ "steps": [10, 20], "values": [0.6, 0.3], "points": 2 }));
    assert_eq!(run["curves"]["loss_scale"], Value::Null);
    let totals = &run["totals"];
    assert_eq!(
        (&totals["steps"], &totals["tokens"], &totals["sent_bytes"]),
        (&json!(20), &json!(1280.0), &json!(20000.0))
    );
    assert_eq!((&totals["skipped_steps"], &totals["not_finite_steps"]), (&json!(1), &json!(1)));
    assert_eq!((&totals["lowest_eval_loss"], &totals["lowest_eval_step"]), (&json!(0.3), &json!(20)));
}

#[test]
fn a_range_test_has_the_loss_over_the_learning_rate() {
    let parent = TempDir::new().unwrap();
    let folder = folder(&parent, "range", 20);
    let curves = || data(&report_page(std::slice::from_ref(&folder)).unwrap())["runs"][0]["curves"].clone();
    let configure = |kind: &str| {
        fs::write(folder.join("resolved.yaml"), format!("train_batch_size: 4\nscheduler: {{type: {kind}}}\n")).unwrap();
    };
    configure("WarmupLR");
    assert_eq!(curves()["loss_over_lr"], Value::Null);
    configure("LRRangeTest");
    let (curves, steps) = (curves(), (1..=20).collect::<Vec<u64>>());
    let over = &curves["loss_over_lr"];
    assert_eq!((&over["steps"], &over["values"]), (&json!(steps), &curves["loss"]["values"]));
    assert_eq!(over["rates"], json!(vec![1e-3; 20]));
    let text = fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    let mut line: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    let mut long = String::new();
    for step in 1..=10_000_u64 {
        (line["step"], line["lr"], line["loss"]) =
            (json!(step), json!(step as f64 * 1e-6), json!((step * 7919) % 1000));
        writeln!(long, "{line}").unwrap();
    }
    fs::write(folder.join("metrics.jsonl"), long).unwrap();
    let over = data(&report_page(std::slice::from_ref(&folder)).unwrap())["runs"][0]["curves"]["loss_over_lr"].clone();
    let (steps, rates) = (over["steps"].as_array().unwrap(), over["rates"].as_array().unwrap());
    assert!(steps.len() < 4_000 && steps.len() == rates.len() && over["points"] == 10_000);
    for (step, rate) in steps.iter().zip(rates) {
        assert_eq!(rate.as_f64().unwrap(), step.as_f64().unwrap() * 1e-6, "a thinned curve keeps each point's rate");
    }
}

#[test]
fn a_page_is_self_contained() {
    let parent = TempDir::new().unwrap();
    let page = report_page(&[folder(&parent, "empty", 0)]).unwrap();
    assert!(page.len() < 50 * 1024, "{} bytes", page.len());
    zero_planner::page::check_self_contained(&page, &STYLES, &SCRIPTS);
}

#[test]
fn text_from_files_cannot_leave_its_element() {
    let parent = TempDir::new().unwrap();
    let folder = folder(&parent, "<script>window.hacked = 1", 20);
    finish(&folder, 0.25);
    fs::write(folder.join("resolved.yaml"), format!("train_batch_size: 4\n# {HOSTILE}\n")).unwrap();
    let page = report_page(&[folder]).unwrap();
    assert_eq!(page.matches("<script").count(), 2, "one for the data and one for the code");
    assert_eq!(page.matches("</script").count(), 2);
    assert!(!page.contains("<img"));
    let data = data(&page);
    assert_eq!(data["runs"][0]["report"]["transport"], HOSTILE);
    assert!(data["runs"][0]["configuration"].as_str().unwrap().contains(HOSTILE));
    assert_eq!(data["runs"][0]["name"], "<script>window.hacked = 1");
}

#[test]
fn a_run_without_a_report_has_not_finished_and_its_last_line_may_be_half_written() {
    let parent = TempDir::new().unwrap();
    let folder = folder(&parent, "running", 12);
    let metrics = folder.join("metrics.jsonl");
    let text = fs::read_to_string(&metrics).unwrap();
    fs::write(&metrics, &text[..text.len() - 30]).unwrap();
    let page = data(&report_page(std::slice::from_ref(&folder)).unwrap());
    assert_eq!((&page["runs"][0]["finished"], &page["runs"][0]["report"]), (&Value::Null, &Value::Null));
    assert_eq!(page["runs"][0]["totals"]["steps"], 11);
    // Simulates a run that was resumed after its report was written: the report has the loss of an earlier step.
    finish(&folder, 1.0);
    let page = data(&report_page(&[folder]).unwrap());
    assert_eq!((&page["runs"][0]["finished"], &page["runs"][0]["is_report_old"]), (&Value::Null, &json!(true)));
}

#[test]
fn several_runs_are_overlaid_with_the_keys_that_differ() {
    let parent = TempDir::new().unwrap();
    let folders = [folder(&parent, "a/run", 20), folder(&parent, "b/run", 30)];
    for (folder, stage) in folders.iter().zip([1, 3]) {
        let config = format!(
            "train_micro_batch_size_per_gpu: 2\nmodel: {{type: gpt2, vocab_size: 256, n_positions: 16, n_embd: 16, n_layer: 2, n_head: 2}}\n\
             data: {{train: corpus.txt}}\ntraining: {{max_steps: 20}}\nzero_optimization: {{stage: {stage}}}\n"
        );
        fs::write(folder.join("resolved.yaml"), config).unwrap();
    }
    let data = data(&report_page(&folders).unwrap());
    assert_eq!(data["runs"][1]["curves"]["loss"]["steps"].as_array().unwrap().len(), 30);
    // Both folders are named `run`, so the page uses their paths.
    assert_eq!(data["runs"][1]["name"], folders[1].display().to_string());
    let differences = data["differences"].as_array().unwrap();
    assert!(
        differences.contains(&json!({ "key": "zero_optimization.stage", "values": ["1", "3"] })),
        "{differences:?}"
    );
    assert!(differences.iter().all(|row| row["values"][0] != row["values"][1]), "{differences:?}");
}

#[test]
fn missing_and_damaged_files_are_errors_with_path_and_help() {
    let parent = TempDir::new().unwrap();
    let missing = error(&[parent.path().join("none")]);
    assert!(missing.contains("none/metrics.jsonl") && missing.contains("help: give a run folder"), "{missing}");
    let folder = folder(&parent, "damaged", 3);
    let metrics = folder.join("metrics.jsonl");
    let whole = fs::read_to_string(&metrics).unwrap();
    fs::write(&metrics, whole.replacen("\"step\":2", "\"step\":", 1)).unwrap();
    let damaged = error(std::slice::from_ref(&folder));
    assert!(damaged.contains("metrics.jsonl:2") && damaged.contains("help: "), "{damaged}");
    fs::write(&metrics, whole).unwrap();
    for name in ["report.json", "trace.json"] {
        for text in ["{\"steps\": ", "[]", ""] {
            fs::write(folder.join(name), text).unwrap();
            let damaged = error(std::slice::from_ref(&folder));
            assert!(damaged.contains(name) && damaged.contains("help: "), "{damaged}");
        }
        fs::remove_file(folder.join(name)).unwrap();
    }
    fs::write(folder.join("resolved.yaml"), "a: [1").unwrap();
    assert!(error(std::slice::from_ref(&folder)).contains("resolved.yaml"));
    fs::remove_file(folder.join("resolved.yaml")).unwrap();
    report_page(&[folder]).unwrap();
}
