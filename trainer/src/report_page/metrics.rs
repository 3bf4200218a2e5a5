//! Reads `metrics.jsonl` and computes the curves and the totals of a run from it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use super::curve::{Point, curve};
use super::{damaged, no_run};
use zero_engine::Error;

/// The fields of a line of `metrics.jsonl` that the page shows.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Line {
    step: u64,
    pub(super) loss: Option<f64>,
    lr: Option<f64>,
    grad_norm: Option<f64>,
    loss_scale: Option<f64>,
    #[serde(default)]
    skipped: bool,
    tokens: Option<f64>,
    step_ms: Option<f64>,
    tokens_per_s: Option<f64>,
    sent_bytes: Option<f64>,
    peak_bytes: Option<f64>,
    eval_loss: Option<f64>,
    /// Present if a rank was slow in this step.
    rank_ms: Option<Value>,
}

/// Reads all lines. An incomplete last line is skipped, because the run may be writing it.
///
/// # Errors
/// Fails if the file does not exist or cannot be read, or if another line is damaged.
pub(super) fn read(path: &Path) -> Result<Vec<Line>, Error> {
    let file = File::open(path).map_err(|error| no_run(path, &error))?;
    let (mut reader, mut text, mut lines) = (BufReader::new(file), vec![], vec![]);
    loop {
        text.clear();
        if reader.read_until(b'\n', &mut text).map_err(|error| no_run(path, &error))? == 0 {
            return Ok(lines);
        }
        match serde_json::from_slice::<Line>(&text) {
            Ok(line) => lines.push(line),
            Err(_) if text.last() != Some(&b'\n') => return Ok(lines),
            Err(error) => {
                let place = format!("{}:{}", path.display(), lines.len() + 1);
                let help = "remove the line or restore the file; resuming the run also removes unreadable lines";
                return Err(damaged(place, &format!("the line does not contain the metrics of a step: {error}"), help));
            }
        }
    }
}

/// Extracts one metric from a line.
type Metric = fn(&Line) -> Option<f64>;

/// The curves that have a value at each step. Null stands for a value that is not finite.
const AT_EACH_STEP: [(&str, Metric); 6] = [
    ("loss", |line| line.loss),
    ("grad_norm", |line| line.grad_norm),
    ("lr", |line| line.lr),
    ("tokens_per_s", |line| line.tokens_per_s),
    ("step_ms", |line| line.step_ms),
    ("sent_bytes", |line| line.sent_bytes),
];

/// The curves without a value at some steps. Null stands for a missing value.
const AT_SOME_STEPS: [(&str, Metric); 3] = [
    ("eval_loss", |line| line.eval_loss),
    ("loss_scale", |line| line.loss_scale),
    ("peak_bytes", |line| line.peak_bytes),
];

/// Returns all curves by name, thinned.
pub(super) fn curves(lines: &[Line]) -> Value {
    let each = AT_EACH_STEP.iter().map(|(name, value)| {
        let points: Vec<Point> = lines.iter().map(|line| (line.step, value(line))).collect();
        // Omits metrics that an older version of the program did not write.
        let has_value = points.iter().any(|(_, value)| value.is_some());
        ((*name).to_string(), if has_value { curve(&points) } else { Value::Null })
    });
    let some = AT_SOME_STEPS.iter().map(|(name, value)| {
        let points: Vec<Point> =
            lines.iter().filter_map(|line| value(line).map(|value| (line.step, Some(value)))).collect();
        ((*name).to_string(), curve(&points))
    });
    each.chain(some).collect::<serde_json::Map<_, _>>().into()
}

/// Returns the loss over the learning rate, thinned: `steps`, `rates`, `values` and the original number of points.
/// Returns null without points.
pub(super) fn loss_over_lr(lines: &[Line]) -> Value {
    // Steps without a learning rate are omitted.
    let tried: Vec<(Point, f64)> = lines.iter().filter_map(|line| Some(((line.step, line.loss), line.lr?))).collect();
    let points: Vec<Point> = tried.iter().map(|(point, _)| *point).collect();
    let mut curve = curve(&points);
    if let Some(steps) = curve["steps"].as_array() {
        let rates: BTreeMap<u64, f64> = tried.iter().map(|((step, _), rate)| (*step, *rate)).collect();
        curve["rates"] = steps.iter().filter_map(|step| rates.get(&step.as_u64()?)).copied().collect();
    }
    curve
}

/// Returns the totals over all lines.
pub(super) fn totals(lines: &[Line]) -> Value {
    let finite = |value: Metric| lines.iter().filter_map(value);
    let sum = |value: Metric| finite(value).fold(0.0, |sum, value| sum + value);
    let best = lines.iter().filter_map(|line| Some((line.eval_loss?, line.step))).min_by(|a, b| a.0.total_cmp(&b.0));
    let count = |is: fn(&Line) -> bool| lines.iter().filter(|line| is(line)).count();
    json!({
        "steps": lines.len(),
        "last_step": lines.last().map(|line| line.step),
        "first_loss": lines.first().and_then(|line| line.loss),
        "last_loss": lines.last().and_then(|line| line.loss),
        "lowest_eval_loss": best.map(|(loss, _)| loss),
        "lowest_eval_step": best.map(|(_, step)| step),
        "median_tokens_per_s": median(finite(|line| line.tokens_per_s).collect()),
        "median_step_ms": median(finite(|line| line.step_ms).collect()),
        "median_sent_bytes": median(finite(|line| line.sent_bytes).collect()),
        "tokens": sum(|line| line.tokens),
        "sent_bytes": sum(|line| line.sent_bytes),
        "step_seconds": sum(|line| line.step_ms) / 1e3,
        "peak_bytes": finite(|line| line.peak_bytes).max_by(f64::total_cmp),
        "skipped_steps": count(|line| line.skipped),
        "not_finite_steps": count(|line| line.loss.is_none()),
        "straggler_steps": count(|line| line.rank_ms.is_some()),
    })
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
