//! Checks the programs of all ranks together, before anything runs.
//!
//! Every rank's program is walked with a model of what the instruction needs and leaves; then the collectives
//! of all ranks are compared. A violation names rank, instruction and reason.

use std::collections::BTreeSet;
use std::fmt;

use crate::instruction::{Instruction, LayerId, Program, SegmentId};
use crate::shape::{ModelShape, Placement};

/// Why a program must not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Violation {
    /// Rank whose program it is.
    pub rank: usize,
    /// Index of the instruction, or the program's length if it is what is missing at the end.
    pub index: usize,
    /// The instruction, as text.
    pub instruction: String,
    /// What is wrong.
    pub reason: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}, instruction {} ({}): {}", self.rank, self.index, self.instruction, self.reason)
    }
}

/// Checks the programs of all ranks, one for each.
///
/// # Errors
/// The first violation.
pub fn validate(programs: &[Program], shape: &ModelShape) -> Result<(), Violation> {
    for (rank, program) in programs.iter().enumerate() {
        walk(rank, program, shape)?;
    }
    same_collectives(programs)
}

fn walk(rank: usize, program: &Program, shape: &ModelShape) -> Result<(), Violation> {
    let mut state = State::new(shape, program);
    for (index, instruction) in program.instructions.iter().enumerate() {
        state.apply(instruction).map_err(|reason| Violation {
            rank,
            index,
            instruction: instruction.to_string(),
            reason,
        })?;
    }
    state.finish().map_err(|reason| Violation {
        rank,
        index: program.instructions.len(),
        instruction: "end".into(),
        reason,
    })
}

fn same_collectives(programs: &[Program]) -> Result<(), Violation> {
    let collectives = |program: &Program| -> Vec<(usize, Instruction)> {
        program.instructions.iter().cloned().enumerate().filter(|(_, i)| i.is_collective()).collect()
    };
    let Some((first, others)) = programs.split_first() else { return Ok(()) };
    let expected = collectives(first);
    for (other, program) in others.iter().enumerate() {
        let found = collectives(program);
        for k in 0..expected.len().max(found.len()) {
            let (theirs, ours) = (expected.get(k), found.get(k));
            if theirs.map(|(_, i)| i) != ours.map(|(_, i)| i) {
                let text = |entry: Option<&(usize, Instruction)>| {
                    entry.map_or("nothing".to_string(), |(_, instruction)| format!("`{instruction}`"))
                };
                return Err(Violation {
                    rank: other + 1,
                    index: ours.map_or(program.instructions.len(), |(index, _)| *index),
                    instruction: ours.map_or("end".into(), |(_, i)| i.to_string()),
                    reason: format!("collective {k} is {} here but {} on rank 0", text(ours), text(theirs)),
                });
            }
        }
    }
    Ok(())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parameters {
    Released,
    Gathering,
    Gathered,
}

struct State<'a> {
    shape: &'a ModelShape,
    micro_batches: usize,
    /// Whether the program trains: has a backward.
    trains: bool,
    parameters: Vec<Parameters>,
    loaded: BTreeSet<usize>,
    forwarded: BTreeSet<(usize, LayerId)>,
    backwarded: BTreeSet<(usize, LayerId)>,
    /// The micro-batch whose local gradient a segment holds, from its first backward until it is accumulated or reduced.
    open: Vec<Option<usize>>,
    /// Open gradients to which all layers have contributed: (micro-batch, segment).
    complete: BTreeSet<(usize, SegmentId)>,
    /// Micro-batches in each replicated accumulator or reduced shard, which are added up in their order.
    gathered_up: Vec<usize>,
    reducing: Vec<(Vec<SegmentId>, usize)>,
    reduced: Vec<bool>,
    norm: bool,
    updated: Vec<bool>,
    refreshing: Vec<Vec<SegmentId>>,
    refreshed: Vec<bool>,
}

type Check = Result<(), String>;

fn ensure(condition: bool, reason: impl FnOnce() -> String) -> Check {
    if condition { Ok(()) } else { Err(reason()) }
}

impl<'a> State<'a> {
    fn new(shape: &'a ModelShape, program: &Program) -> Self {
        let count = shape.segments.len();
        let initial = |s: &crate::SegmentShape| match s.placements.parameters {
            Placement::Replicated => Parameters::Gathered,
            Placement::Sharded => Parameters::Released,
        };
        Self {
            shape,
            micro_batches: program.micro_batches,
            trains: program.instructions.iter().any(|i| matches!(i, Instruction::Backward { .. })),
            parameters: shape.segments.iter().map(initial).collect(),
            loaded: BTreeSet::new(),
            forwarded: BTreeSet::new(),
            backwarded: BTreeSet::new(),
            open: vec![None; count],
            complete: BTreeSet::new(),
            gathered_up: vec![0; count],
            reducing: vec![],
            reduced: vec![false; count],
            norm: false,
            updated: vec![false; count],
            refreshing: vec![],
            refreshed: vec![false; count],
        }
    }

    fn apply(&mut self, instruction: &Instruction) -> Check {
        match instruction {
            Instruction::Load { micro_batch } => {
                ensure(*micro_batch < self.micro_batches, || "no such micro-batch".into())?;
                ensure(self.loaded.insert(*micro_batch), || "loaded twice".into())
            }
            Instruction::Gather { segment } => {
                self.sharded(*segment)?;
                self.expect(*segment, Parameters::Released)?;
                self.parameters[*segment] = Parameters::Gathering;
                Ok(())
            }
            Instruction::AwaitGather { segment } => {
                self.expect(*segment, Parameters::Gathering)?;
                self.parameters[*segment] = Parameters::Gathered;
                Ok(())
            }
            Instruction::Release { segment } => {
                self.sharded(*segment)?;
                self.expect(*segment, Parameters::Gathered)?;
                self.parameters[*segment] = Parameters::Released;
                Ok(())
            }
            Instruction::Forward { layer, micro_batch } => self.forward(*layer, *micro_batch),
            Instruction::Backward { layer, micro_batch } => self.backward(*layer, *micro_batch),
            Instruction::Accumulate { segment, micro_batch } => {
                self.segment(*segment)?;
                let placement = self.shape.segments[*segment].placements.gradients;
                ensure(placement == Placement::Replicated, || {
                    "its gradients are sharded: they are reduced, not accumulated".into()
                })?;
                self.take(*segment, *micro_batch)?;
                self.add_up(*segment, *micro_batch)
            }
            Instruction::Reduce { segments, micro_batch } => self.reduce(segments, *micro_batch),
            Instruction::AwaitReduce { segments, micro_batch } => {
                let position = self.reducing.iter().position(|(s, m)| s == segments && m == micro_batch);
                let position = position.ok_or("no such reduction was started")?;
                self.reducing.remove(position);
                for &segment in segments {
                    if self.shape.segments[segment].placements.gradients == Placement::Sharded {
                        self.add_up(segment, *micro_batch)?;
                    }
                    self.reduced[segment] = self.gathered_up[segment] == self.micro_batches;
                }
                Ok(())
            }
            Instruction::GradientNorm => {
                self.all_reduced()?;
                ensure(!std::mem::replace(&mut self.norm, true), || "computed twice".into())
            }
            Instruction::Update { segment } => {
                self.segment(*segment)?;
                ensure(self.norm, || "before the gradient norm".into())?;
                ensure(self.reduced[*segment], || "its gradients are not reduced".into())?;
                let sharded = self.shape.segments[*segment].placements.parameters == Placement::Sharded;
                ensure(!sharded || self.parameters[*segment] == Parameters::Released, || {
                    "its gathered parameters would be stale".into()
                })?;
                ensure(!std::mem::replace(&mut self.updated[*segment], true), || "updated twice".into())
            }
            Instruction::Refresh { segments } => {
                for &segment in segments {
                    self.segment(segment)?;
                    ensure(self.needs_refresh(segment), || format!("segment {segment} needs no refresh"))?;
                    ensure(self.updated[segment], || format!("segment {segment} is not updated"))?;
                }
                self.refreshing.push(segments.clone());
                Ok(())
            }
            Instruction::AwaitRefresh { segments } => {
                let position = self.refreshing.iter().position(|s| s == segments);
                self.refreshing.remove(position.ok_or("no such refresh was started")?);
                segments.iter().for_each(|&s| self.refreshed[s] = true);
                Ok(())
            }
        }
    }

    fn forward(&mut self, layer: LayerId, micro_batch: usize) -> Check {
        self.layer(layer)?;
        ensure(self.loaded.contains(&micro_batch), || "its micro-batch is not loaded".into())?;
        ensure(layer == 0 || self.forwarded.contains(&(micro_batch, layer - 1)), || {
            "the layer before has not run".into()
        })?;
        self.readable(layer)?;
        ensure(self.forwarded.insert((micro_batch, layer)), || "run twice".into())
    }

    fn backward(&mut self, layer: LayerId, micro_batch: usize) -> Check {
        self.layer(layer)?;
        ensure(self.forwarded.contains(&(micro_batch, layer)), || "its forward has not run".into())?;
        let last = layer + 1 == self.shape.layers.len();
        ensure(last || self.backwarded.contains(&(micro_batch, layer + 1)), || {
            "the backward of the layer behind has not run".into()
        })?;
        self.readable(layer)?;
        ensure(self.backwarded.insert((micro_batch, layer)), || "run twice".into())?;
        for &segment in &self.shape.layers[layer].segments {
            let holds = self.open[segment].replace(micro_batch);
            ensure(holds.is_none_or(|other| other == micro_batch), || {
                format!("segment {segment} still holds the gradient of another micro-batch")
            })?;
        }
        self.complete.extend(self.shape.completed_by(layer).into_iter().map(|s| (micro_batch, s)));
        Ok(())
    }

    fn reduce(&mut self, segments: &[SegmentId], micro_batch: usize) -> Check {
        for &segment in segments {
            self.segment(segment)?;
            match self.shape.segments[segment].placements.gradients {
                Placement::Sharded => self.take(segment, micro_batch)?,
                Placement::Replicated => {
                    ensure(self.gathered_up[segment] == self.micro_batches, || {
                        let (has, all) = (self.gathered_up[segment], self.micro_batches);
                        format!("segment {segment} has {has} of {all} micro-batches")
                    })?;
                    let pending = self.reducing.iter().any(|(segments, _)| segments.contains(&segment));
                    ensure(!pending && !self.reduced[segment], || format!("segment {segment} is reduced already"))?;
                }
            }
        }
        self.reducing.push((segments.to_vec(), micro_batch));
        Ok(())
    }

    /// Takes a complete local gradient out of its segment.
    fn take(&mut self, segment: SegmentId, micro_batch: usize) -> Check {
        ensure(self.complete.remove(&(micro_batch, segment)), || {
            format!("segment {segment}'s gradient of that micro-batch is not complete")
        })?;
        self.open[segment] = None;
        Ok(())
    }

    /// Sums have one order: that of the micro-batches.
    fn add_up(&mut self, segment: SegmentId, micro_batch: usize) -> Check {
        let next = self.gathered_up[segment];
        self.gathered_up[segment] += 1;
        ensure(micro_batch == next, || format!("segment {segment} adds up micro-batch {next} next"))
    }

    fn finish(&self) -> Check {
        ensure(self.reducing.is_empty(), || "a reduction was not awaited".into())?;
        ensure(self.refreshing.is_empty(), || "a refresh was not awaited".into())?;
        for (segment, shape) in self.shape.segments.iter().enumerate() {
            if shape.placements.parameters == Placement::Sharded {
                ensure(self.parameters[segment] == Parameters::Released, || {
                    format!("segment {segment} is still gathered")
                })?;
            }
            if self.trains {
                ensure(self.updated[segment], || format!("segment {segment} was never updated"))?;
                ensure(self.refreshed[segment] || !self.needs_refresh(segment), || {
                    format!("segment {segment} differs between ranks: it was updated but not refreshed")
                })?;
            }
        }
        let all = self.micro_batches * self.shape.layers.len();
        ensure(self.forwarded.len() == all, || "not every layer ran on every micro-batch".into())?;
        ensure(!self.trains || self.backwarded.len() == all, || "not every backward ran".into())
    }

    fn needs_refresh(&self, segment: SegmentId) -> bool {
        let placements = self.shape.segments[segment].placements;
        placements.parameters == Placement::Replicated && placements.optimizer == Placement::Sharded
    }

    fn all_reduced(&self) -> Check {
        match self.reduced.iter().position(|r| !r) {
            None => Ok(()),
            Some(segment) => Err(format!("the gradients of segment {segment} are not reduced")),
        }
    }

    fn readable(&self, layer: LayerId) -> Check {
        for &segment in &self.shape.layers[layer].segments {
            ensure(self.parameters[segment] == Parameters::Gathered, || {
                format!("reads segment {segment}, which is {:?}", self.parameters[segment]).to_lowercase()
            })?;
        }
        Ok(())
    }

    fn layer(&self, layer: LayerId) -> Check {
        ensure(layer < self.shape.layers.len(), || "no such layer".into())
    }

    fn segment(&self, segment: SegmentId) -> Check {
        ensure(segment < self.shape.segments.len(), || format!("there is no segment {segment}"))
    }

    fn sharded(&self, segment: SegmentId) -> Check {
        self.segment(segment)?;
        let placement = self.shape.segments[segment].placements.parameters;
        ensure(placement == Placement::Sharded, || "its parameters are replicated".into())
    }

    fn expect(&self, segment: SegmentId, state: Parameters) -> Check {
        self.segment(segment)?;
        ensure(self.parameters[segment] == state, || {
            format!("its parameters are {:?}, not {state:?}", self.parameters[segment]).to_lowercase()
        })
    }
}
