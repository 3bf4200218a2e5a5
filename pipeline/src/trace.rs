//! Timelines in Chrome's trace event format, which Perfetto opens: each rank a process, each lane a thread.
//!
//! The format: <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>. Times are in microseconds.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::instruction::Instruction;
use crate::timeline::{Event, Lane, Timeline};

/// The JSON of one or more timelines, each with a name that its processes carry: `[("measured", &run), ("simulated", &plan)]`
/// gives both, one below the other and on one axis of time.
#[must_use]
pub fn chrome(timelines: &[(&str, &Timeline)]) -> String {
    let mut events = vec![];
    let mut first = 0;
    for (name, timeline) in timelines {
        for rank in 0..timeline.ranks {
            let of_rank = || timeline.events.iter().filter(move |event| event.rank == rank);
            let lanes: Vec<Lane> = of_rank().map(|event| event.lane).collect::<BTreeSet<_>>().into_iter().collect();
            let process = first + rank;
            events.push(about(process, 0, "process_name", "name", json!(format!("rank {rank}, {name}"))));
            events.push(about(process, 0, "process_sort_index", "sort_index", json!(process)));
            for (thread, lane) in lanes.iter().enumerate() {
                events.push(about(process, thread, "thread_name", "name", json!(lane.to_string())));
                events.push(about(process, thread, "thread_sort_index", "sort_index", json!(thread)));
            }
            let thread = |event: &Event| lanes.binary_search(&event.lane).unwrap_or(lanes.len());
            events.extend(of_rank().map(|event| complete(process, thread(event), event)));
        }
        first += timeline.ranks;
    }
    json!({ "traceEvents": events, "displayTimeUnit": "ms" }).to_string()
}

/// An event of metadata.
fn about(process: usize, thread: usize, what: &str, key: &str, value: Value) -> Value {
    json!({ "ph": "M", "pid": process, "tid": thread, "name": what, "args": { key: value } })
}

fn complete(process: usize, thread: usize, event: &Event) -> Value {
    json!({
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": event.instruction.to_string(),
        "cat": event.instruction.kind(),
        "ts": event.start * 1e6,
        "dur": event.seconds() * 1e6,
        "args": arguments(&event.instruction),
    })
}

/// What an instruction is about, to search and to group by.
fn arguments(instruction: &Instruction) -> Value {
    match instruction {
        Instruction::Load { micro_batch } => json!({ "micro_batch": micro_batch }),
        Instruction::Forward { layer, micro_batch }
        | Instruction::Keep { layer, micro_batch }
        | Instruction::Discard { layer, micro_batch }
        | Instruction::Recompute { layer, micro_batch }
        | Instruction::Backward { layer, micro_batch }
        | Instruction::BackwardInput { layer, micro_batch }
        | Instruction::BackwardWeight { layer, micro_batch } => json!({ "layer": layer, "micro_batch": micro_batch }),
        Instruction::Gather { segment }
        | Instruction::AwaitGather { segment }
        | Instruction::Release { segment }
        | Instruction::Update { segment } => json!({ "segment": segment }),
        Instruction::Accumulate { segment, micro_batch } => json!({ "segment": segment, "micro_batch": micro_batch }),
        Instruction::Reduce { segments, micro_batch } | Instruction::AwaitReduce { segments, micro_batch } => {
            json!({ "segments": segments, "micro_batch": micro_batch })
        }
        Instruction::Refresh { segments } | Instruction::AwaitRefresh { segments } => json!({ "segments": segments }),
        Instruction::Send { message }
        | Instruction::AwaitSend { message }
        | Instruction::Receive { message }
        | Instruction::AwaitReceive { message } => {
            json!({ "content": message.content.to_string(), "from_stage": message.from, "to_stage": message.to })
        }
        Instruction::UpdateTile { segment, tile } => json!({ "segment": segment, "tile": tile }),
        Instruction::Fetch { item }
        | Instruction::AwaitFetch { item }
        | Instruction::Offload { item }
        | Instruction::AwaitOffload { item } => json!({ "item": item.to_string() }),
        Instruction::GradientNorm => json!({}),
    }
}
