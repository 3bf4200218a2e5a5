//! Exports timelines in Chrome's trace event format, which Perfetto opens. Each rank is a process and each lane a
//! thread; additional processes, for example a device, can be added.
//!
//! Format: <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>. Times are in
//! microseconds.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use crate::effects::Operand;
use crate::instruction::Instruction;
use crate::timeline::{Event, Lane, Timeline};

/// An additional process, shown below a rank of the first timeline.
#[derive(Debug, Clone, PartialEq)]
pub struct Process {
    /// Display name.
    pub name: String,
    /// Rank below which it is shown.
    pub rank: usize,
    /// Threads: (name, slices in order of time).
    pub threads: Vec<(String, Vec<Slice>)>,
}

/// One slice of a thread.
#[derive(Debug, Clone, PartialEq)]
pub struct Slice {
    /// Display name.
    pub name: String,
    /// Trace category.
    pub category: &'static str,
    /// Start in seconds since the beginning of the timelines.
    pub start: f64,
    /// End in seconds since the beginning of the timelines.
    pub end: f64,
}

/// Returns the JSON of one or more timelines, each with a name for its processes: `[("measured", &run), ("simulated",
/// &plan)]` shows both timelines on one time axis, the second below the first. Each additional process is shown below
/// its rank. `first_step` is the number of the first step in the timelines.
#[must_use]
pub fn chrome(timelines: &[(&str, &Timeline)], others: &[Process], first_step: u64) -> String {
    let mut events = vec![];
    let mut first = 0;
    for (name, timeline) in timelines {
        for rank in 0..timeline.ranks {
            let of_rank = || timeline.events.iter().filter(move |event| event.rank == rank);
            let lanes: Vec<Lane> = of_rank().map(|event| event.lane).collect::<BTreeSet<_>>().into_iter().collect();
            let process = first + rank;
            events.push(about(process, 0, "process_name", "name", json!(format!("rank {rank}, {name}"))));
            events.push(about(process, 0, "process_sort_index", "sort_index", json!(2 * process)));
            for (thread, lane) in lanes.iter().enumerate() {
                events.push(about(process, thread, "thread_name", "name", json!(lane.to_string())));
                events.push(about(process, thread, "thread_sort_index", "sort_index", json!(thread)));
            }
            let thread = |event: &Event| lanes.binary_search(&event.lane).unwrap_or(lanes.len());
            events.extend(of_rank().map(|event| complete(process, thread(event), event)));
        }
        first += timeline.ranks;
    }
    for (process, other) in (first..).zip(others) {
        events.push(about(process, 0, "process_name", "name", json!(other.name)));
        events.push(about(process, 0, "process_sort_index", "sort_index", json!(2 * other.rank + 1)));
        for (thread, (name, slices)) in other.threads.iter().enumerate() {
            events.push(about(process, thread, "thread_name", "name", json!(name)));
            events.push(about(process, thread, "thread_sort_index", "sort_index", json!(thread)));
            events.extend(slices.iter().map(|slice| {
                let microseconds = [slice.start * 1e6, (slice.end - slice.start) * 1e6];
                span(process, thread, &slice.name, slice.category, microseconds, json!({}))
            }));
        }
    }
    json!({ "traceEvents": events, "displayTimeUnit": "ms", "otherData": { "first_step": first_step } }).to_string()
}

/// Returns a metadata event.
fn about(process: usize, thread: usize, what: &str, key: &str, value: Value) -> Value {
    json!({ "ph": "M", "pid": process, "tid": thread, "name": what, "args": { key: value } })
}

fn complete(process: usize, thread: usize, event: &Event) -> Value {
    let (instruction, microseconds) = (&event.instruction, [event.start * 1e6, event.seconds() * 1e6]);
    span(process, thread, &instruction.to_string(), instruction.kind(), microseconds, arguments(instruction))
}

/// Returns a complete event, with start and duration in microseconds.
fn span(
    process: usize,
    thread: usize,
    name: &str,
    category: &str,
    [start, duration]: [f64; 2],
    arguments: Value,
) -> Value {
    json!({
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": name,
        "cat": category,
        "ts": start,
        "dur": duration,
        "args": arguments,
    })
}

/// Returns the instruction's operands, for searching and grouping.
fn arguments(instruction: &Instruction) -> Value {
    let mut arguments = Map::new();
    for operand in instruction.effects().operands.into_iter().flatten() {
        let (key, value) = match operand {
            Operand::MicroBatch(micro_batch) => ("micro_batch", json!(micro_batch)),
            Operand::Layer(layer) => ("layer", json!(layer)),
            Operand::Segment(segment) => ("segment", json!(segment)),
            Operand::Segments(segments) => ("segments", json!(segments)),
            Operand::Tile(tile) => ("tile", json!(tile)),
            Operand::Item(item) => ("item", json!(item.to_string())),
            Operand::To(message) | Operand::From(message) => {
                arguments.insert("from_stage".into(), json!(message.from));
                arguments.insert("to_stage".into(), json!(message.to));
                ("content", json!(message.content.to_string()))
            }
        };
        arguments.insert(key.into(), value);
    }
    Value::Object(arguments)
}
