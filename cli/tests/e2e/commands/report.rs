//! `zero-train report` on runs of a tiny model and on large runs whose names contain HTML. A browser opens the pages.

use crate::case;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use case::{Case, text};

/// Runs `report` and returns the page.
fn report(case: &Case, args: &[&str], out: &str) -> String {
    assert_eq!(case.succeed(&[&["report"], args].concat()), format!("report  {out}\n"));
    fs::read_to_string(case.path(out)).unwrap()
}

/// Runs a `report` that must fail, and returns standard error.
fn refused(case: &Case, args: &[&str]) -> String {
    let output = case.command(&[&["report"], args].concat()).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{args:?}");
    assert_eq!(text(&output.stdout), "");
    text(&output.stderr)
}

fn data(page: &str) -> Value {
    let (_, after) = page.split_once(r#"<script type="application/json" id="data">"#).expect("the element");
    serde_json::from_str(after.split("</script").next().unwrap()).unwrap()
}

/// Checks that the elements of a page are closed in order, and that it refers to no other file.
fn check_markup(page: &str) {
    assert!(page.starts_with("<!doctype html>"), "{}", &page[..40]);
    let mut open: Vec<String> = vec![];
    let mut rest = page;
    while let Some(at) = rest.find('<') {
        rest = &rest[at + 1..];
        let (tag, after) = rest.split_once('>').expect("a tag ends");
        let name: String = tag.trim_start_matches('/').chars().take_while(char::is_ascii_alphanumeric).collect();
        match (tag.starts_with('/'), name.as_str()) {
            (true, _) => assert_eq!(open.pop().as_deref(), Some(name.as_str()), "</{name}> closes another element"),
            (false, "" | "meta") => {}
            (false, "style" | "script") => {
                let end = after.find(&format!("</{name}>")).expect("the element is closed");
                rest = &after[end + name.len() + 3..];
                continue;
            }
            (false, _) => open.push(name),
        }
        assert!(!tag.contains("src=") && !tag.contains("href="), "<{tag}> names another file");
        rest = after;
    }
    assert_eq!(open, Vec::<String>::new(), "elements that are not closed");
    assert_eq!(page.matches("://").count(), 1, "only the namespace of SVG");
    assert!(page.contains("\"http://www.w3.org/2000/svg\""));
    assert!(!page.contains("@import") && page.matches("url(").count() == page.matches("url(#").count());
}

/// Checks that the curves of a short run contain the values of all lines of its metrics.
fn check_curves(run: &Value, lines: &[Value]) {
    for key in ["loss", "lr", "grad_norm", "tokens_per_s", "step_ms", "sent_bytes", "peak_bytes"] {
        let of = |key: &str| lines.iter().map(|line| line[key].clone()).collect::<Vec<_>>();
        assert_eq!(run["curves"][key]["steps"], json!(of("step")), "{key}");
        let values = run["curves"][key]["values"].as_array().unwrap();
        assert!(values.iter().zip(of(key)).all(|(shown, line)| shown.as_f64() == line.as_f64()), "{key}: {values:?}");
    }
    let evaluated: Vec<&Value> = lines.iter().filter(|line| !line["eval_loss"].is_null()).collect();
    let of = |key: &str| evaluated.iter().map(|line| line[key].clone()).collect::<Vec<_>>();
    assert!(!evaluated.is_empty());
    let shown = &run["curves"]["eval_loss"];
    assert_eq!((&shown["steps"], &shown["values"]), (&json!(of("step")), &json!(of("eval_loss"))));
}

const TRACED: [&str; 6] = ["--set", "wall_clock_breakdown=true", "--set", "training.eval_every=5", "--quiet", "-n"];

#[test]
fn a_report_page_has_the_numbers_of_the_run() {
    let case = Case::new();
    case.train(&[&TRACED[..], &["2"]].concat());
    let page = report(&case, &["run"], "run/report.html");
    check_markup(&page);
    let data = data(&page);
    let run = &data["runs"][0];
    assert_eq!(run["finished"], "done");
    check_curves(run, &case.metrics("run"));
    assert_eq!(run["report"], case.report("run"));
    assert_eq!(run["configuration"], fs::read_to_string(case.path("run/resolved.yaml")).unwrap());
    let timeline = &run["timeline"];
    assert!(timeline["steps"].as_u64() >= Some(10) && timeline["seconds"].as_f64() > Some(0.0), "{timeline}");
    let ranks: Vec<&Value> = run["overlap"].as_array().unwrap().iter().map(|rank| &rank["rank"]).collect();
    assert_eq!(ranks, ["0", "1"]);
    for one in run["overlap"].as_array().unwrap() {
        assert!(
            one["communication"].as_f64() > Some(0.0) && one["overlapped"].as_f64() <= one["communication"].as_f64()
        );
    }
    case.train(&[&TRACED[..], &["1", "--out", "other", "--set", "zero_optimization.stage=0"]].concat());
    // While it trains, a run has no report, and its last line may be half-written.
    fs::remove_file(case.path("other/report.json")).unwrap();
    let metrics = case.path("other/metrics.jsonl");
    fs::write(&metrics, fs::read_to_string(&metrics).unwrap() + "{\"step\": 21, \"lo").unwrap();
    let several = report(&case, &["run", "other", "--out", "both.html"], "both.html");
    check_markup(&several);
    let data = self::data(&several);
    check_curves(&data["runs"][0], &case.metrics("run"));
    assert_eq!((&data["runs"][1]["finished"], &data["runs"][1]["totals"]["steps"]), (&Value::Null, &json!(20)));
    let keys: Vec<&Value> = data["differences"].as_array().unwrap().iter().map(|row| &row["key"]).collect();
    assert!(keys.iter().any(|key| **key == "zero_optimization.stage"), "{keys:?}");
    let running = report(&case, &["other"], "other/report.html");
    fs::create_dir(case.path("empty")).unwrap();
    fs::write(case.path("empty/metrics.jsonl"), "").unwrap();
    let empty = report(&case, &["empty", "--out", "empty.html"], "empty.html");
    let pages = [
        ("finished", page),
        ("several", several),
        ("running", running),
        ("empty", empty),
        ("range", range_test(&case)),
        ("large", large(&case)),
    ];
    check_in_browser(&pages);
}

/// Returns the page of a learning rate range test, which also plots the loss over the learning rate.
fn range_test(case: &Case) -> String {
    let test = "scheduler={type: LRRangeTest, params: {lr_range_test_min_lr: 0.0001, lr_range_test_step_size: 1, \
                lr_range_test_step_rate: 20}}";
    case.train(&["--quiet", "--out", "range", "--set", test]);
    let page = report(case, &["range"], "range/report.html");
    check_markup(&page);
    let (lines, data) = (case.metrics("range"), data(&page));
    let of = |key: &str| lines.iter().map(|line| line[key].clone()).collect::<Vec<_>>();
    let curve = &data["runs"][0]["curves"]["loss_over_lr"];
    assert_eq!(
        (&curve["steps"], &curve["rates"], &curve["values"]),
        (&json!(of("step")), &json!(of("lr")), &json!(of("loss")))
    );
    let (first, last) = (of("lr")[0].as_f64().unwrap(), of("lr")[lines.len() - 1].as_f64().unwrap());
    assert!(first == 1e-4 && (last / first - (1.0 + 20.0 * (lines.len() - 1) as f64)).abs() < 1e-9, "{first} {last}");
    page
}

/// Returns the page of eight runs of 10,000 lines with spikes. Their names and configurations try to run a script.
fn large(case: &Case) -> String {
    let mut folders = vec![];
    for index in 0..8_u32 {
        let name = format!("{index} <img src=x onerror=\"window.hacked=1\"> with a long name");
        let folder = case.path(&name);
        fs::create_dir_all(&folder).unwrap();
        let mut lines = String::new();
        for step in (1..=100_000_u32).step_by(10) {
            let (x, noise) = (f64::from(step), f64::from(step.wrapping_mul(2_654_435_761) >> 20) / 4096.0);
            let loss = (2.0 + f64::from(index) / 4.0) + 8.0 / (1.0 + x / 2e3) + noise / 5.0;
            let spike = if step == 50_001 { 1e4 } else { 1.0 };
            let loss = if step == 70_001 { Value::Null } else { json!(loss) };
            let line = json!({ "step": step, "loss": loss, "lr": 3e-4 * (1.0 - x / 1e5), "grad_norm": (0.5 + noise) * spike,
                "loss_scale": 65536, "skipped": step == 70_001, "samples": 8, "tokens": 1024, "step_ms": 20.0 + noise,
                "tokens_per_s": 51_200.0 - 1e3 * noise, "sent_bytes": 123_456_789_u64, "peak_bytes": (3_u64 << 30) + u64::from(index << 26),
                "eval_loss": if step % 1_000 == 1 { loss.clone() } else { Value::Null } });
            writeln!(lines, "{line}").unwrap();
        }
        fs::write(folder.join("metrics.jsonl"), lines).unwrap();
        fs::write(folder.join("resolved.yaml"), "train_batch_size: 8\n# </script><script>window.hacked=1</script>\n")
            .unwrap();
        fs::copy(case.path("run/report.json"), folder.join("report.json")).unwrap();
        folders.push(name);
    }
    let args: Vec<&str> = folders.iter().map(String::as_str).chain(["--out", "large.html"]).collect();
    let page = report(case, &args, "large.html");
    assert!(page.len() < 8 << 20, "{} bytes", page.len());
    let shown = data(&page)["runs"][0]["curves"]["grad_norm"].clone();
    let most = shown["values"].as_array().unwrap().iter().filter_map(Value::as_f64).fold(0.0, f64::max);
    assert!(most > 5e3 && shown["values"].as_array().unwrap().len() <= 3_000, "the spike is kept: {most}");
    assert_eq!(shown["points"], 10_000);
    page
}

/// Opens the pages in a browser at several widths, light and dark. Prints a message if node or a browser is missing.
fn check_in_browser(pages: &[(&str, String)]) {
    // The folder is kept after the test, so that its pages and pictures can be inspected.
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("run-report");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    for (name, page) in pages {
        fs::write(folder.join(name).with_extension("html"), page).unwrap();
    }
    let script: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/report_page/check.mjs");
    match Command::new("node").arg(script).arg(&folder).output() {
        Err(error) => println!("skipped: node does not start: {error}"),
        Ok(output) => {
            let said = text(&output.stdout);
            print!("{said}");
            // The script exits with 77 if no browser starts.
            let is_right = output.status.success() || output.status.code() == Some(77);
            assert!(is_right, "{said}{}", text(&output.stderr));
        }
    }
}

#[test]
fn unreadable_runs_are_errors_with_path_and_help() {
    let case = Case::new();
    let missing = refused(&case, &["none"]);
    assert!(missing.contains("none/metrics.jsonl") && missing.contains("help: give a run folder"), "{missing}");
    let several = refused(&case, &["one", "two"]);
    assert!(several.contains("--out FILE"), "{several}");
    fs::create_dir(case.path("run")).unwrap();
    fs::write(case.path("run/metrics.jsonl"), "{\"step\": 1, \"loss\": 2.5}\nnonsense\n{\"step\": 3}\n").unwrap();
    let damaged = refused(&case, &["run"]);
    assert!(damaged.contains("in: run/metrics.jsonl:2") && damaged.contains("help: "), "{damaged}");
    assert!(!case.path("run/report.html").exists());
    fs::write(case.path("run/metrics.jsonl"), "{\"step\": 1, \"loss\": 2.5}\n").unwrap();
    let unwritable = case.command(&["report", "run", "--out", "nowhere/page.html"]).output().unwrap();
    let said = text(&unwritable.stderr);
    assert!(!unwritable.status.success() && said.contains("nowhere") && said.contains("--out"), "{said}");
}
