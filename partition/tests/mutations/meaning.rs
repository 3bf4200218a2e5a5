//! Carries out a program on symbols, with the rules of the runtime and none of the validator's.
//!
//! One rank stands for all. A gradient is the list of backwards that contributed to it, with the version of the
//! parameters that each of them read; sums keep the order of their summands, for it decides about bits.

use std::collections::BTreeSet;

use zero_pipeline::Instruction::*;
use zero_pipeline::{ModelShape, Placement, Program};

/// One backward's contribution: (micro-batch, layer, versions of the parameters that forward and backward read).
type Contribution = (usize, usize, Vec<u32>);
/// A sum over micro-batches, in order; each summand in the order of its contributions.
type Sum = Vec<Vec<Contribution>>;

/// What a step comes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Meaning {
    /// The gradient that each segment's update saw.
    updates: Vec<Sum>,
    /// The gradients that the norm saw.
    norm: Vec<Sum>,
    /// Parameters after the step: what the rank itself holds.
    parameters: Vec<Values>,
}

/// A segment's full parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Values {
    Absent,
    /// Every element is of this version.
    Version(u32),
    /// This rank's part is of the new version, the others' parts are of the old one.
    Mixed,
}

struct Segment {
    full: Values,
    /// Version of the shard where parameters are sharded.
    shard: u32,
    /// What a gather under way will bring.
    gathering: Option<u32>,
    open: Vec<Contribution>,
    accumulator: Sum,
    reduced: Sum,
    update: Option<Sum>,
}

#[derive(Default)]
struct MicroBatch {
    loaded: bool,
    /// Layers that have run, with what they read.
    forward: Vec<Vec<u32>>,
    /// The layer whose inputs are there.
    flow: Option<usize>,
    /// Layers whose inputs are kept, and those whose forward has kept what the backward needs.
    kept: BTreeSet<usize>,
    saved: BTreeSet<usize>,
    /// Layers whose backward is still to come.
    waiting: usize,
}

/// The meaning of a program, or where the runtime would fail.
pub(crate) fn meaning(program: &Program, shape: &ModelShape) -> Result<Meaning, String> {
    let sharded = |s: usize| shape.segments[s].placements.parameters == Placement::Sharded;
    let mut segments: Vec<Segment> = (0..shape.segments.len())
        .map(|s| Segment {
            full: if sharded(s) { Values::Absent } else { Values::Version(0) },
            shard: 0,
            gathering: None,
            open: vec![],
            accumulator: vec![],
            reduced: vec![],
            update: None,
        })
        .collect();
    let mut micro_batches: Vec<MicroBatch> = (0..program.micro_batches).map(|_| MicroBatch::default()).collect();
    let mut reducing: Vec<(Vec<usize>, usize, Vec<Sum>)> = vec![];
    let mut refreshing: Vec<Vec<usize>> = vec![];
    let mut norm: Option<Vec<Sum>> = None;
    for (index, instruction) in program.instructions.iter().enumerate() {
        let fail = |what: &str| Err(format!("instruction {index} ({instruction}): {what}"));
        match instruction {
            Load { micro_batch } => {
                let state = &mut micro_batches[*micro_batch];
                (state.loaded, state.flow) = (true, Some(0));
            }
            Gather { segment } => {
                let segment = &mut segments[*segment];
                if segment.gathering.is_some() {
                    return fail("the shard is in use");
                }
                segment.gathering = Some(segment.shard);
            }
            AwaitGather { segment } => {
                let segment = &mut segments[*segment];
                match segment.gathering.take() {
                    Some(version) => segment.full = Values::Version(version),
                    None => return fail("nothing to wait for"),
                }
            }
            Release { segment } => segments[*segment].full = Values::Absent,
            BackwardInput { .. }
            | BackwardWeight { .. }
            | Send { .. }
            | AwaitSend { .. }
            | Receive { .. }
            | AwaitReceive { .. } => return fail("not of a program for one pipeline stage"),
            Forward { layer, micro_batch } => {
                let read =
                    read(&segments, shape, *layer).ok_or_else(|| format!("instruction {index} reads nothing"))?;
                let state = &mut micro_batches[*micro_batch];
                if !state.loaded || state.flow != Some(*layer) || state.forward.len() != *layer {
                    return fail("no input");
                }
                state.forward.push(read);
                if *layer + 1 < shape.layers.len() {
                    state.flow = Some(*layer + 1);
                    state.saved.insert(*layer);
                }
                state.waiting = *layer + 1;
            }
            Keep { layer, micro_batch } => {
                let state = &mut micro_batches[*micro_batch];
                if state.flow != Some(*layer) {
                    return fail("no input");
                }
                state.kept.insert(*layer);
            }
            Discard { layer, micro_batch } => drop(micro_batches[*micro_batch].saved.remove(layer)),
            Recompute { layer, micro_batch } => {
                let read =
                    read(&segments, shape, *layer).ok_or_else(|| format!("instruction {index} reads nothing"))?;
                let state = &mut micro_batches[*micro_batch];
                if !state.kept.remove(layer) && state.flow != Some(*layer) {
                    return fail("no input");
                }
                state.forward[*layer] = read;
                state.flow = Some(*layer + 1);
                state.saved.insert(*layer);
            }
            Backward { layer, micro_batch } => {
                let mut read =
                    read(&segments, shape, *layer).ok_or_else(|| format!("instruction {index} reads nothing"))?;
                let state = &mut micro_batches[*micro_batch];
                if state.forward.len() != shape.layers.len() || state.waiting != *layer + 1 {
                    return fail("no gradient of its output");
                }
                let is_last = *layer + 1 == shape.layers.len();
                if if is_last { state.flow != Some(*layer) } else { !state.saved.remove(layer) } {
                    return fail("nothing to go back through");
                }
                state.flow = None;
                state.waiting = *layer;
                read.extend(&state.forward[*layer]);
                for &s in &shape.layers[*layer].segments {
                    segments[s].open.push((*micro_batch, *layer, read.clone()));
                }
            }
            Accumulate { segment, .. } => {
                let segment = &mut segments[*segment];
                match std::mem::take(&mut segment.open) {
                    open if open.is_empty() => return fail("no gradient"),
                    open => segment.accumulator.push(open),
                }
            }
            Reduce { segments: bucket, micro_batch } => {
                let mut sums = vec![];
                for &s in bucket {
                    let sum = match shape.segments[s].placements.gradients {
                        Placement::Sharded => vec![std::mem::take(&mut segments[s].open)],
                        Placement::Replicated => std::mem::take(&mut segments[s].accumulator),
                    };
                    if sum.iter().all(Vec::is_empty) {
                        return fail("no gradient");
                    }
                    sums.push(sum);
                }
                reducing.push((bucket.clone(), *micro_batch, sums));
            }
            AwaitReduce { segments: bucket, micro_batch } => {
                let Some(position) = reducing.iter().position(|(b, m, _)| b == bucket && m == micro_batch) else {
                    return fail("nothing to wait for");
                };
                let (bucket, _, sums) = reducing.remove(position);
                for (s, sum) in bucket.into_iter().zip(sums) {
                    segments[s].reduced.extend(sum);
                }
            }
            GradientNorm => norm = Some(segments.iter().map(|s| s.reduced.clone()).collect()),
            Update { segment } => {
                let placements = shape.segments[*segment].placements;
                let segment = &mut segments[*segment];
                if norm.is_none() || segment.update.is_some() {
                    return fail("no norm, or no gradient");
                }
                segment.update = Some(std::mem::take(&mut segment.reduced));
                match (placements.parameters, placements.optimizer) {
                    (Placement::Sharded, _) => segment.shard += 1,
                    (Placement::Replicated, Placement::Sharded) => segment.full = Values::Mixed,
                    (Placement::Replicated, Placement::Replicated) => segment.full = Values::Version(1),
                }
            }
            Refresh { segments: bucket } => {
                if bucket.iter().any(|&s| segments[s].update.is_none()) {
                    return fail("sends old values");
                }
                refreshing.push(bucket.clone());
            }
            AwaitRefresh { segments: bucket } => {
                let Some(position) = refreshing.iter().position(|b| b == bucket) else {
                    return fail("nothing to wait for");
                };
                refreshing.remove(position).into_iter().for_each(|s| segments[s].full = Values::Version(1));
            }
        }
    }
    let gathering = segments.iter().any(|s| s.gathering.is_some());
    if gathering || !reducing.is_empty() || !refreshing.is_empty() {
        return Err("something is under way at the end".into());
    }
    let held = |s: &Segment| if s.full == Values::Absent { Values::Version(s.shard) } else { s.full };
    Ok(Meaning {
        parameters: segments.iter().map(held).collect(),
        norm: norm.unwrap_or_default(),
        updates: segments.into_iter().map(|s| s.update.unwrap_or_default()).collect(),
    })
}

/// The version of each segment that a layer reads; `None` if one of them is not there as a whole.
fn read(segments: &[Segment], shape: &ModelShape, layer: usize) -> Option<Vec<u32>> {
    let version = |&s: &usize| match segments[s].full {
        Values::Version(version) => Some(version),
        Values::Absent | Values::Mixed => None,
    };
    shape.layers[layer].segments.iter().map(version).collect()
}
