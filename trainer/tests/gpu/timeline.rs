//! Tests the timeline of traced steps on a GPU.

use std::collections::BTreeSet;
use std::time::Duration;

use super::world::{config, gpt2, train, world};
use super::{has_gpu, mock, resident, settings};
use zero_engine::{GpuSpan, Subject, Track};
use zero_train::Engine;
use zero_train::ops::measure;

/// Returns the spans of GPU work in two traced steps, with their names, and the number of instructions in a step.
fn traced(ranks: usize, text: &str) -> Vec<(Vec<(GpuSpan, &'static str)>, usize)> {
    let text = text.replace("{device: cuda", "{device: cuda, trace: true");
    world(ranks, |comm| {
        let mut engine = Engine::with_communicator(config(ranks, &text), gpt2(), comm).unwrap();
        train(&mut engine, 2);
        let named = |span: &GpuSpan| match span.subject {
            Subject::Number(index) => engine.program().instructions[index].kind(),
            Subject::Transfer { kind, .. } => kind.name(),
        };
        let spans = engine.timing().gpu_spans().to_vec();
        (spans.iter().map(|span| (*span, named(span))).collect(), engine.program().instructions.len())
    })
}

/// The timeline of a traced run has every copy, and no operation begins before the operations that it depends on. The
/// multiply-accumulates of the step are counted.
#[test]
fn the_timeline_shows_the_work_of_the_gpu() {
    if !has_gpu() {
        return;
    }
    // With all state on the host, gradients are copied to the host after their backward, and parameters arrive before
    // their use.
    let (spans, instructions) = traced(1, &settings("cuda", 3, 1, "")).remove(0);
    let on = |track| spans.iter().filter(move |(span, _)| span.track == track).copied().collect::<Vec<_>>();
    let (compute, down, up) = (on(Track::Compute), on(Track::ToHost), on(Track::FromHost));
    assert_eq!(compute.len(), 2 * instructions);
    for (before, after) in compute.iter().zip(&compute[1..]) {
        // Events are accurate to half a microsecond, and times are floats in milliseconds.
        assert!(before.0.end <= after.0.start + Duration::from_micros(50), "{before:?} {after:?}");
    }
    assert!(!down.is_empty() && !up.is_empty(), "{spans:?}");
    for (copy, what) in &down {
        let same = |(span, _): &&(GpuSpan, &str)| span.subject == copy.subject && span.start <= copy.start;
        let made = compute.iter().rfind(same).unwrap_or_else(|| panic!("a copy in {what} starts before {what}"));
        assert!(made.0.start <= copy.start);
    }
    // The GPU counts the same number of multiply-accumulates as the CPU.
    let macs = |device: &str| {
        let counted = world(1, |comm| {
            let mut engine = Engine::with_communicator(config(1, &settings(device, 1, 1, "")), gpt2(), comm).unwrap();
            let before = measure::macs();
            train(&mut engine, 1);
            measure::macs() - before
        });
        counted[0]
    };
    assert_eq!(macs("cuda"), macs("cpu"));
}

/// With NCCL, collectives run on their own streams.
#[test]
fn collectives_are_in_the_timeline() {
    if !mock::has_gpus(2) || !has_gpu() {
        return;
    }
    for (spans, _) in traced(2, &resident("cuda", 3, 1, "")) {
        let kinds: BTreeSet<&str> =
            spans.iter().filter(|(span, _)| span.track == Track::Collectives).map(|(_, kind)| *kind).collect();
        assert!(kinds.contains("all_gather") && kinds.contains("reduce_scatter"), "{kinds:?}");
    }
}
