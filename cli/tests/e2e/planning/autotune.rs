//! Runs `zero-train autotune` on a tiny model.

use crate::case;

use std::fs::{self, File};
use std::io::Read;
use std::process::{Child, Command, Stdio};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::Value;

use case::{Case, signal, succeed, text, wait_for};

/// A small search space: two ranks with ZeRO stages 0 and 2, and one rank, each with micro-batches of 1 and 2.
const SPACE: [&str; 6] = [
    "--set",
    "autotuning={fast: true, repeats: 2, space: {launcher.num_processes: [1, 2], zero_optimization.stage: [0, 2], train_micro_batch_size_per_gpu: [1, 2]}}",
    "--set",
    "zero_optimization.stage=2",
    "-n",
    "2",
];

/// One rank with micro-batches of 1, 2, 4 and 8. Its measurements take less time, since nothing is exchanged.
const OF_ONE_RANK: [&str; 6] = [
    "--set",
    "autotuning={fast: true, repeats: 2, space: {train_micro_batch_size_per_gpu: [1, 2, 4, 8]}}",
    "--set",
    "gradient_accumulation_steps=4",
    "-n",
    "1",
];

fn autotune(case: &Case, space: &[&str], more: &[&str]) -> Command {
    case.command(&[&["autotune", "--config", "ds.yaml", "--out", "tuned"], space, more].concat())
}

#[test]
fn the_best_configuration_can_be_trained() {
    let case = Case::new();
    let said = succeed(&mut autotune(&case, &SPACE, &[]));
    for word in ["configurations to plan", "profile 1 of ", " predicted), ", "round 1: ", "\nbest: ", "tuned/best.yaml"]
    {
        assert!(said.contains(word), "{word}: {said}");
    }
    // Six candidates: micro-batches of 1 and 2 on one rank, and on two ranks at each of the two ZeRO stages.
    let journal = fs::read_to_string(case.path("tuned/results.jsonl")).unwrap();
    let lines: Vec<Value> = journal.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let rows = lines.last().unwrap()["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 6, "{said}");
    assert!(rows.iter().all(|row| row["predicted_seconds"].as_f64().is_some_and(|seconds| seconds > 0.0)), "{rows:?}");
    // The measured memory does not exceed the planned one.
    for row in rows.iter().filter(|row| row["state"] == "measured") {
        let of = |key: &str| row[key].as_f64().unwrap();
        assert!(of("measured_bytes") <= of("planned_bytes"), "{row}");
        assert!(row["metric"]["low"].as_f64() <= row["metric"]["value"].as_f64());
    }
    let page = fs::read_to_string(case.path("tuned/report.html")).unwrap();
    assert!(page.starts_with("<!doctype html>") || page.starts_with("<!DOCTYPE html>"), "{}", &page[..40]);
    case.succeed(&["--config", "tuned/best.yaml", "--quiet", "--max-steps", "3", "--out", "best"]);
    assert_eq!(case.metrics("best")[0]["samples"], 4, "the global batch has changed");
}

#[test]
fn an_interrupted_search_writes_its_results_and_can_be_resumed() {
    let case = Case::new();
    let mut command = autotune(&case, &OF_ONE_RANK, &[]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let journal = case.path("tuned/results.jsonl");
    wait_for(|| fs::read_to_string(&journal).is_ok_and(|text| text.contains("\"run\"")));
    signal(child.id(), "INT");
    let output = child.wait_with_output().unwrap();
    let said = text(&output.stdout);
    // On a fast machine, the search may have finished before the signal.
    assert!(matches!(output.status.code(), Some(130 | 0)), "{said}{}", text(&output.stderr));
    assert!(case.path("tuned/best.yaml").exists() && case.path("tuned/report.html").exists());
    let said = succeed(&mut autotune(&case, &OF_ONE_RANK, &["--resume"]));
    assert!(!said.contains("profile 1 of "), "the resumed search profiles again: {said}");
}

/// Starts a search on a pseudo-terminal with this many rows and columns. Returns the process and the controlling end of
/// the terminal.
fn on_a_terminal(case: &Case, (rows, columns): (u16, u16)) -> (Child, File) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let name = ptsname(&ours, vec![]).unwrap().into_string().unwrap();
    let theirs = File::options().read(true).write(true).open(name).unwrap();
    tcsetwinsize(&theirs, Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    let mut command = autotune(case, &OF_ONE_RANK, &[]);
    (command.env("TERM", "xterm-256color").stdout(theirs).spawn().unwrap(), File::from(ours))
}

#[test]
fn a_terminal_shows_one_table_that_is_redrawn() {
    for (rows, columns) in [(30, 70), (6, 140)] {
        let case = Case::new();
        let (mut child, mut terminal) = on_a_terminal(&case, (rows, columns));
        let mut screen = vt100::Parser::new(rows.try_into().unwrap(), columns.try_into().unwrap(), 500);
        let (mut headings, mut wrapped, mut bytes) = (vec![], 0, [0; 4096]);
        // Reading fails once the last process that has the terminal open has ended.
        while let Ok(count @ 1..) = terminal.read(&mut bytes) {
            screen.process(&bytes[..count]);
            let screen = screen.screen();
            let shown = screen.contents();
            headings.push(shown.matches("memory planned").count().max(shown.matches("configurations, ").count()));
            let is_over = shown.contains("\nbest: ");
            wrapped = wrapped.max((0..rows).filter(|&row| !is_over && screen.row_wrapped(row)).count());
        }
        assert!(child.wait().unwrap().success());
        assert_eq!(wrapped, 0, "lines of the table are wider than {columns}");
        assert_eq!(headings.iter().max(), Some(&1), "{}", screen.screen().contents());
        // The scrollback contains no part of an earlier table.
        screen.screen_mut().set_scrollback(500);
        let mut all = String::new();
        for back in (1..=screen.screen().scrollback()).rev() {
            screen.screen_mut().set_scrollback(back);
            all += &format!("{}\n", screen.screen().rows(0, columns).next().unwrap());
        }
        screen.screen_mut().set_scrollback(0);
        let shown = screen.screen().contents();
        all += &shown;
        assert_eq!(all.matches("configurations, ").count(), 1, "{all}");
        assert!(all.contains("\nbest: "), "{all}");
        if rows == 30 {
            for word in ["4 configurations, ", "rank   predicted    measured", "   1  ", " runs", "±"] {
                assert!(shown.contains(word), "{word}: {shown}");
            }
        }
    }
}

#[test]
fn mistakes_are_reported_before_anything_runs() {
    let case = Case::new();
    let wrong = ["autotune", "--config", "ds.yaml", "--set", "autotuning.space={zero_optimization.stag: [1]}"];
    let errors = case.fail(2, &wrong);
    assert!(errors.contains("zero_optimization.stag") && errors.contains("zero_optimization.stage"), "{errors}");
    let many = "autotuning.space={training.seed: {from: 1, to: 1000, step: 1}, data.shuffle: [true, false], training.eval_every: {from: 0, to: 20, step: 1}}";
    let errors = case.fail(2, &["autotune", "--config", "ds.yaml", "--set", many]);
    assert!(errors.contains("more than 20000 configurations"), "{errors}");
    let errors =
        case.fail(1, &["autotune", "--config", "ds.yaml", "--set", "autotuning.metric_path=ds.yaml/best.json"]);
    assert!(errors.contains("in: autotuning.metric_path"), "{errors}");
    assert!(!case.path("autotuning_results").exists());
    // Training warns that it does not tune.
    let output = case.run(&["--plain", "--max-steps", "1", "--set", "autotuning.enabled=true"]);
    assert!(output.status.success() && text(&output.stderr).contains("autotun"), "{}", text(&output.stderr));
}
