//! Parses exported traces.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use zero_pipeline::simulate::{LayerCosts, Link, SegmentCosts};
use zero_pipeline::trace::{Process, Slice};
use zero_pipeline::{
    Costs, Degrees, Mesh, Program, Schedule, Stages, Timeline, World, ZeroStage, schedule, simulate, trace,
};

use crate::shapes::shape;

/// Returns the timeline of 1F1B on two stages, with messages that take time.
fn timeline(forward: f64) -> Timeline {
    let shape = shape(2, ZeroStage::Zero);
    let stages = Stages::new(&shape, 2, vec![0..1, 1..2]).unwrap();
    let layer = LayerCosts { forward, backward: 0.5, inputs: 10, input_gradients: 10, ..LayerCosts::default() };
    let pipe = Link { latency: 0.125, bandwidth: f64::INFINITY };
    let costs = Costs { pipe, ..Costs::of_compute(vec![layer; 2], vec![SegmentCosts::default(); 2]) };
    let programs: Vec<Program> =
        (0..2).map(|stage| schedule::training(Schedule::OneFOneB, &shape, &stages, stage, 3)).collect();
    let world = World { shape: &shape, stages: &stages, mesh: Mesh::new(2, Degrees::stages(2)).unwrap(), capacity: 0 };
    simulate(&programs, &world, &costs).unwrap()
}

/// Returns a trace's events of one kind.
fn events(trace: &Value, kind: &str) -> Vec<Value> {
    let all = trace["traceEvents"].as_array().expect("a list of events");
    all.iter().filter(|event| event["ph"] == kind).cloned().collect()
}

#[test]
fn ranks_are_processes_and_lanes_are_threads() {
    let (measured, simulated) = (timeline(0.25), timeline(0.5));
    let text = trace::chrome(&[("measured", &measured), ("simulated", &simulated)], &[], 1);
    let trace: Value = serde_json::from_str(&text).unwrap();
    let mut names: BTreeMap<(u64, u64), String> = BTreeMap::new();
    let mut processes = vec![];
    for event in events(&trace, "M") {
        let (process, thread) = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
        let name = event["args"]["name"].as_str().map(String::from);
        match event["name"].as_str().unwrap() {
            "process_name" => processes.push((process, name.unwrap())),
            "thread_name" => assert_eq!(names.insert((process, thread), name.unwrap()), None),
            _ => {}
        }
    }
    let expected = ["rank 0, measured", "rank 1, measured", "rank 0, simulated", "rank 1, simulated"];
    assert_eq!(processes, (0..).zip(expected.map(String::from)).collect::<Vec<_>>());
    let lanes =
        |process| names.range((process, 0)..(process + 1, 0)).map(|(_, name)| name.as_str()).collect::<Vec<_>>();
    assert_eq!(lanes(0), ["compute", "activations to stage 1"]);
    assert_eq!(lanes(3), ["compute", "gradients to stage 0"]);

    let complete = events(&trace, "X");
    assert_eq!(complete.len(), measured.events.len() + simulated.events.len());
    let used: BTreeSet<(u64, u64)> =
        complete.iter().map(|e| (e["pid"].as_u64().unwrap(), e["tid"].as_u64().unwrap())).collect();
    assert_eq!(used, names.into_keys().collect());
    for (event, of) in complete.iter().zip(measured.events.iter().chain(&simulated.events)) {
        assert_eq!(event["ts"].as_f64().unwrap(), of.start * 1e6);
        assert_eq!(event["dur"].as_f64().unwrap(), of.seconds() * 1e6);
        assert_eq!(event["name"], of.instruction.to_string());
        assert_eq!(event["cat"], of.instruction.kind());
    }
    let forward = complete.iter().find(|event| event["cat"] == "forward" && event["pid"] == 1).unwrap();
    assert_eq!(forward["args"], serde_json::json!({ "layer": 1, "micro_batch": 0 }));
    assert_eq!((forward["ts"].as_f64(), forward["dur"].as_f64()), (Some(375_000.0), Some(250_000.0)));
}

#[test]
fn additional_processes_are_shown_below_their_rank() {
    let slice = |name: &str, start, end| Slice { name: name.into(), category: "copy", start, end };
    let threads = vec![("copies".to_string(), vec![slice("a", 0.5, 1.0), slice("b", 1.0, 3.0)])];
    let gpu = Process { name: "rank 1, its GPU".into(), rank: 1, threads };
    let trace: Value = serde_json::from_str(&trace::chrome(&[("measured", &timeline(0.25))], &[gpu], 1)).unwrap();
    let about = |process: u64, what: &str, key: &str| {
        let all = events(&trace, "M");
        let event = all.iter().find(|event| event["pid"] == process && event["name"] == what).unwrap();
        event["args"][key].clone()
    };
    assert_eq!(about(2, "process_name", "name"), "rank 1, its GPU");
    assert_eq!(about(2, "thread_name", "name"), "copies");
    // Ranks have even sort indices, so the process is sorted after rank 1 and before a rank 2.
    let places = [0, 1, 2].map(|process| about(process, "process_sort_index", "sort_index").as_u64().unwrap());
    assert_eq!(places, [0, 2, 3]);
    let slices: Vec<_> = events(&trace, "X").into_iter().filter(|event| event["pid"] == 2).collect();
    assert_eq!((slices.len(), &slices[1]["name"], &slices[1]["cat"]), (2, &"b".into(), &"copy".into()));
    assert_eq!((slices[1]["ts"].as_f64(), slices[1]["dur"].as_f64()), (Some(1e6), Some(2e6)));
}

#[test]
fn an_empty_timeline_is_a_valid_trace() {
    let trace: Value = serde_json::from_str(&trace::chrome(&[], &[], 1)).unwrap();
    assert_eq!(trace["traceEvents"], serde_json::json!([]));
}
