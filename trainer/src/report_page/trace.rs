//! Reads `trace.json`: one measured step of all ranks, and how much of the communication overlapped with compute.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use super::json_file;
use zero_engine::Error;
use zero_engine::timing::gpu_timeline::{common, length, united};

/// Maximum number of lanes in the timeline. A screen shows fewer.
const MOST_LANES: usize = 64;

/// A span in seconds.
#[derive(Debug, Clone)]
struct Span {
    name: String,
    kind: String,
    start: f64,
    end: f64,
    /// Whether the span loads the first micro-batch, which begins a step.
    begins_step: bool,
}

/// The spans of each lane. The key is the process and the number of the lane in the file.
type Lanes = BTreeMap<(u64, u64), Vec<Span>>;

/// Returns `timeline` (one measured step) and `overlap` (one entry per rank) of a run. Returns null without a trace.
///
/// # Errors
/// Fails if the file is damaged.
pub(super) fn read(path: &Path) -> Result<Value, Error> {
    let Some(trace) = json_file(path)? else { return Ok(Value::Null) };
    Ok(timeline(&trace))
}

fn timeline(trace: &Value) -> Value {
    let (mut processes, mut threads) = (BTreeMap::new(), BTreeMap::new());
    let mut lanes = Lanes::new();
    for event in trace["traceEvents"].as_array().into_iter().flatten() {
        let (Some(process), Some(thread)) = (event["pid"].as_u64(), event["tid"].as_u64()) else { continue };
        let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
        match (event["ph"].as_str(), event["name"].as_str()) {
            (Some("M"), Some("process_name")) => drop(processes.insert(process, text(&event["args"]["name"]))),
            (Some("M"), Some("thread_name")) => drop(threads.insert((process, thread), text(&event["args"]["name"]))),
            (Some("X"), _) => {
                let (Some(start), Some(length)) = (event["ts"].as_f64(), event["dur"].as_f64()) else { continue };
                let kind = text(&event["cat"]);
                lanes.entry((process, thread)).or_default().push(Span {
                    begins_step: kind == "load" && event["args"]["micro_batch"] == 0,
                    name: text(&event["name"]),
                    kind,
                    start: start / 1e6,
                    end: (start + length) / 1e6,
                });
            }
            _ => {}
        }
    }
    // Keeps names such as `rank 0, measured` and `rank 0, its GPU`. Omits the simulated step.
    let name = |process: &u64| processes.get(process).and_then(|name: &String| name.strip_prefix("rank "));
    lanes.retain(|(process, _), _| name(process).is_some_and(|name| !name.ends_with(", simulated")));
    let Some((start, end, number, steps)) = middle_step(&lanes) else { return Value::Null };
    let in_step = |span: &&Span| span.end > start && span.start < end && span.end > span.start;
    let rows: Vec<Value> = lanes
        .iter()
        .filter(|(_, spans)| spans.iter().any(|span| in_step(&span)))
        .map(|(lane, spans)| {
            let cut = |span: &Span| {
                json!({ "name": span.name, "kind": span.kind, "start": span.start.max(start) - start, "end": span.end.min(end) - start })
            };
            json!({
                "rank": name(&lane.0).map(|name| name.trim_end_matches(", measured")),
                "lane": threads.get(lane),
                "spans": spans.iter().filter(in_step).map(cut).collect::<Vec<_>>(),
            })
        })
        .collect();
    let measured = |process: &u64| name(process).and_then(|name| name.strip_suffix(", measured"));
    let ranks: BTreeMap<u64, &str> = lanes.keys().filter_map(|(id, _)| Some((*id, measured(id)?))).collect();
    let overlap: Vec<Value> = ranks.iter().map(|(process, rank)| overlap(rank, *process, &lanes, &threads)).collect();
    // Traces of earlier versions do not name their first step.
    let number = trace["otherData"]["first_step"].as_u64().unwrap_or(1) as usize + number - 1;
    json!({
        "timeline": { "seconds": end - start, "lanes": rows.len(), "rows": &rows[..rows.len().min(MOST_LANES)],
            "step": number, "steps": steps },
        "overlap": overlap,
    })
}

/// Returns the traced step of median duration: its start, its end, its number counted from 1, and the number of steps.
/// Ignores the first step, because it touches all memory for the first time. Returns the whole trace if the trace does
/// not show where steps begin.
fn middle_step(lanes: &Lanes) -> Option<(f64, f64, usize, usize)> {
    let all = || lanes.values().flatten();
    let first = all().map(|span| span.start).min_by(f64::total_cmp)?;
    let last = all().map(|span| span.end).max_by(f64::total_cmp)?;
    let (&process, _) = lanes.keys().map(|(process, thread)| (process, thread)).next()?;
    let of_rank = lanes.iter().filter(|((of, _), _)| *of == process).flat_map(|(_, spans)| spans);
    let mut starts: Vec<f64> = of_rank.filter(|span| span.begins_step).map(|span| span.start).collect();
    starts.sort_by(f64::total_cmp);
    if starts.is_empty() {
        return Some((first, last, 1, 1));
    }
    starts.push(last);
    // A step ends with its last span. Work after the step, such as an evaluation, is not traced.
    let end = |from: f64, to: f64| {
        let of_step = all().filter(|span| span.start >= from && span.start < to);
        of_step.map(|span| span.end.min(to)).fold(from, f64::max)
    };
    let mut steps: Vec<(f64, f64, usize, usize)> = starts
        .windows(2)
        .enumerate()
        .map(|(i, pair)| (pair[0], end(pair[0], pair[1]), i + 1, starts.len() - 1))
        .collect();
    if steps.len() > 1 {
        steps.remove(0);
    }
    steps.sort_by(|a, b| (a.1 - a.0).total_cmp(&(b.1 - b.0)));
    steps.get(steps.len() / 2).copied()
}

/// Returns the seconds of communication and disk transfers of a rank in all traced steps, and the part that overlapped
/// with compute.
fn overlap(rank: &str, process: u64, lanes: &Lanes, threads: &BTreeMap<(u64, u64), String>) -> Value {
    let is_compute = |thread: &u64| threads.get(&(process, *thread)).is_some_and(|name| name == "compute");
    let of_rank = || lanes.iter().filter(|((of, _), _)| *of == process);
    let (mut compute, mut beside) = (vec![], vec![]);
    for ((_, thread), spans) in of_rank() {
        let wanted = spans.iter().filter(|span| !is_compute(thread) || !span.kind.starts_with("await"));
        let intervals = wanted.map(|span| (span.start, span.end));
        if is_compute(thread) { compute.extend(intervals) } else { beside.extend(intervals) }
    }
    let (compute, beside) = (united(compute.into_iter()), united(beside.into_iter()));
    let hidden = common(&compute, &beside);
    json!({ "rank": rank, "compute": length(&compute), "communication": length(&beside), "overlapped": length(&hidden) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(process: u64, thread: u64, what: &str, name: &str) -> Value {
        json!({ "ph": "M", "pid": process, "tid": thread, "name": what, "args": { "name": name } })
    }

    fn span(process: u64, thread: u64, kind: &str, at: f64, length: f64) -> Value {
        json!({ "ph": "X", "pid": process, "tid": thread, "name": kind, "cat": kind, "ts": at, "dur": length,
            "args": { "micro_batch": 0 } })
    }

    #[test]
    fn the_median_step_is_shown_and_overlap_covers_all_steps() {
        let mut events = vec![
            name(0, 0, "process_name", "rank 0, measured"),
            name(0, 0, "thread_name", "compute"),
            name(0, 1, "thread_name", "collectives"),
            name(1, 0, "process_name", "rank 0, simulated"),
            span(1, 0, "forward", 0.0, 1e6),
        ];
        for (at, length) in [(0.0, 9e5), (1e6, 1e5), (2e6, 3e5), (3e6, 2e5)] {
            events.push(span(0, 0, "load", at, 0.0));
            events.push(span(0, 0, "forward", at, length));
            events.push(span(0, 0, "await_gather", at + length, 1e5));
            events.push(span(0, 1, "gather", at + length - 5e4, 1.5e5));
        }
        let found = timeline(&json!({ "traceEvents": events, "otherData": { "first_step": 11 } }));
        // The steps after the first take 0.2, 0.4 and 0.3 s.
        let shown = &found["timeline"];
        assert_eq!((&shown["step"], &shown["steps"]), (&json!(14), &json!(4)));
        assert_eq!(shown["rows"].as_array().unwrap().len(), 2, "{shown}");
        assert_eq!(shown["rows"][1]["lane"], "collectives");
        assert_eq!(shown["rows"][0]["rank"], "0");
        let of = |key: &str| (found["overlap"][0][key].as_f64().unwrap() * 1e3).round();
        assert_eq!((of("compute"), of("communication"), of("overlapped")), (1500.0, 600.0, 200.0));
    }

    #[test]
    fn a_trace_without_spans_is_none() {
        assert_eq!(timeline(&json!({ "traceEvents": [] })), Value::Null);
        assert_eq!(timeline(&json!([1, 2])), Value::Null);
    }
}
