//! The measured timeline of all ranks, together with a simulation from the measured costs.
//!
//! Each instruction records its start and end. The actual end of a communication is not measured. A collective is
//! therefore drawn from its start, or from the end of the previous collective if that is later, until the rank has
//! finished waiting for it. A message is drawn until its receiver has it. GPU work is timed by the GPU's own clock.

use std::collections::{BTreeMap, HashMap};

use zero_engine::timing::gpu_timeline;
use zero_engine::timing::trace::{Done, gathered, steps};
use zero_engine::{Engine, Error};
use zero_pipeline::simulate::{Costs, LayerCosts, SegmentCosts};
use zero_pipeline::{
    Action, Coordinates, Event, Instruction, Lane, Message, Program, Timeline, Transfer, World, trace::chrome,
};

/// Returns the trace of all ranks in Chrome's format on rank 0, if a trace was recorded. A collective in this case.
/// `first_step` is the first step of this process.
pub(in crate::train) fn of_all_ranks(engine: &Engine, first_step: u64) -> Result<Option<String>, Error> {
    if !engine.timing().is_recorded() {
        return Ok(None);
    }
    let mut ranks = gathered(&**engine.communicator(), engine.timing().spans())?;
    let gpus = gpu_timeline::gathered(&**engine.communicator(), engine.timing().gpu_spans())?;
    // The ranks of a tensor group run the same instructions together, so only the first rank is shown.
    let group = engine.config().tensor_size();
    ranks = ranks.into_iter().step_by(group).collect();
    if engine.communicator().rank() > 0 || ranks.iter().all(Vec::is_empty) {
        return Ok(None);
    }
    let stage_plan = engine.stage_plan().of_all_replicates();
    let shape = engine.zero().layout().shape();
    let stages = stage_plan.training(shape);
    let (programs, world) = (stage_plan.of_all_ranks(&stages), stage_plan.world(shape));
    let measured = timeline(&ranks, &programs, &world);
    let simulated = stage_plan.simulate(&stages, shape, &costs(&ranks, &programs, &world))?;
    let gpus = gpu_timeline::processes(&gpus, &programs);
    Ok(Some(chrome(&[("measured", &measured), ("simulated", &simulated)], &gpus, first_step)))
}

fn timeline(ranks: &[Vec<Done>], programs: &[Program], world: &World) -> Timeline {
    // Arrival time of each message, by sender and step.
    let mut arrivals: HashMap<(usize, usize, Message), f64> = HashMap::new();
    for (rank, done) in ranks.iter().enumerate() {
        for (step, done) in steps(done).enumerate() {
            for one in done {
                if let Some(Instruction::AwaitReceive { message }) = programs[rank].instructions.get(one.index) {
                    let at = Coordinates { stage: message.from, ..world.mesh.coordinates(rank) };
                    arrivals.insert((world.mesh.rank(at), step, *message), one.end);
                }
            }
        }
    }
    let mut events = vec![];
    for (rank, done) in ranks.iter().enumerate() {
        let mut free: BTreeMap<Lane, f64> = BTreeMap::new();
        for (step, done) in steps(done).enumerate() {
            let mut started: Vec<(&Instruction, Transfer<'_>, f64)> = vec![];
            for one in done {
                let Some(instruction) = programs[rank].instructions.get(one.index) else { continue };
                let event = |lane, instruction: &Instruction, start, end| Event {
                    rank,
                    lane,
                    instruction: instruction.clone(),
                    start,
                    end,
                };
                events.push(event(Lane::Compute, instruction, one.start, one.end));
                let mut beside = |lane: Lane, instruction: &Instruction, start: f64, end: f64| {
                    let start = start.max(free.get(&lane).copied().unwrap_or(0.0));
                    let end = end.max(start);
                    free.insert(lane, end);
                    events.push(event(lane, instruction, start, end));
                };
                match instruction.effects().action {
                    Action::Starts(Transfer::Send(message)) => {
                        let end = arrivals.get(&(rank, step, *message)).copied().unwrap_or(one.end);
                        beside(Lane::Channel(message.channel()), instruction, one.start, end);
                    }
                    Action::Starts(transfer) if transfer.lane() == Lane::Collectives => {
                        started.push((instruction, transfer, one.start));
                    }
                    Action::Awaits(transfer) => {
                        let position = started.iter().position(|(_, started, _)| *started == transfer);
                        if let Some((collective, _, start)) = position.map(|position| started.remove(position)) {
                            beside(Lane::Collectives, collective, start, one.end);
                        }
                    }
                    _ => {}
                }
            }
        }
    }
    events.sort_by(|a, b| (a.rank, a.lane).cmp(&(b.rank, b.lane)).then(a.start.total_cmp(&b.start)));
    Timeline { ranks: ranks.len(), events }
}

/// Returns the mean durations of instructions, with zero time for communication. The simulation therefore shows the
/// step with all communication overlapped and without interference.
fn costs(ranks: &[Vec<Done>], programs: &[Program], world: &World) -> Costs {
    let mut means: HashMap<(&'static str, usize), (f64, f64)> = HashMap::new();
    for (rank, done) in ranks.iter().enumerate() {
        // Skips the first step, which touches all memory for the first time.
        let skipped = usize::from(steps(done).count() > 1);
        for one in steps(done).skip(skipped).flatten() {
            let Some(instruction) = programs[rank].instructions.get(one.index) else { continue };
            let subject = match instruction {
                Instruction::Forward { layer, .. }
                | Instruction::Recompute { layer, .. }
                | Instruction::Backward { layer, .. }
                | Instruction::BackwardInput { layer, .. }
                | Instruction::BackwardWeight { layer, .. } => *layer,
                Instruction::Accumulate { segment, .. } | Instruction::Update { segment } => *segment,
                Instruction::Load { .. } => 0,
                _ => continue,
            };
            let (sum, count) = means.entry((instruction.kind(), subject)).or_default();
            *sum += one.end - one.start;
            *count += 1.0;
        }
    }
    let mean = |kind, subject| means.get(&(kind, subject)).map_or(0.0, |(sum, count)| sum / count);
    let layer = |layer| LayerCosts {
        forward: mean("forward", layer),
        backward: mean("backward", layer),
        backward_input: mean("backward_input", layer),
        backward_weight: mean("backward_weight", layer),
        ..LayerCosts::default()
    };
    let segment = |segment| SegmentCosts {
        accumulate: mean("accumulate", segment),
        update: mean("update", segment),
        ..SegmentCosts::default()
    };
    let layers = (0..world.shape.layers.len()).map(layer).collect();
    let segments = (0..world.shape.segments.len()).map(segment).collect();
    Costs { load: mean("load", 0), ..Costs::of_compute(layers, segments) }
}
