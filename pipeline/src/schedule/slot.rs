//! The schedules themselves: lists of whole forwards and backwards of chunks for each stage.
//!
//! Every schedule processes micro-batches in ascending order, in both the forward and the backward of each chunk, so
//! the order in which gradients are summed does not depend on the schedule.

use std::fmt;

use crate::message::StageId;

/// Pipeline schedule: the order in which micro-batches flow through the stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// All forwards, then all backwards. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using
    /// Pipeline Parallelism", NeurIPS 2019.
    GPipe,
    /// Alternates forwards and backwards, and starts each backward as early as possible. Takes as long as GPipe, but
    /// fewer micro-batches are alive. Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training",
    /// SOSP 2019 (with a flush).
    OneFOneB,
    /// 1F1B with several chunks of layers on each stage. The bubble is shorter than with 1F1B, but there are more
    /// messages. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    /// SC 2021.
    Interleaved,
    /// 1F1B that defers weight gradients to fill the bubble. ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism",
    /// ICLR 2024.
    ZeroBubble,
}

/// All schedules.
pub const SCHEDULES: [Schedule; 4] = [Schedule::GPipe, Schedule::OneFOneB, Schedule::Interleaved, Schedule::ZeroBubble];

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::GPipe => "gpipe",
            Self::OneFOneB => "1f1b",
            Self::Interleaved => "interleaved_1f1b",
            Self::ZeroBubble => "zb_h1",
        })
    }
}

/// The kind of work of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Work {
    /// The forward.
    Forward,
    /// The whole backward.
    Backward,
    /// The part of the backward that the previous stage waits for: gradients of inputs.
    BackwardInput,
    /// The deferred rest of the backward: gradients of weights.
    BackwardWeight,
}

/// One unit of work of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot {
    /// Kind of work.
    pub work: Work,
    /// Index among the stage's chunks, from 0.
    pub chunk: usize,
    /// Micro-batch to run on.
    pub micro_batch: usize,
}

/// Dimensions of the pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Number of stages.
    pub stages: usize,
    /// Number of chunks per stage.
    pub chunks: usize,
    /// Number of micro-batches per step.
    pub micro_batches: usize,
}

impl Schedule {
    /// Returns the work of `stage` in a training step, in order. Only [`Schedule::Interleaved`] supports more than one
    /// chunk per stage. All other schedules use only chunk 0.
    #[must_use]
    pub fn slots(self, size: Size, stage: StageId) -> Vec<Slot> {
        match self {
            Self::GPipe => gpipe(size),
            Self::OneFOneB => one_f_one_b(size, stage),
            Self::Interleaved => interleaved(size, stage),
            Self::ZeroBubble => zero_bubble(size, stage),
        }
    }
}

fn slot(work: Work) -> impl Fn(usize) -> Slot {
    move |micro_batch| Slot { work, chunk: 0, micro_batch }
}

fn gpipe(size: Size) -> Vec<Slot> {
    let all = 0..size.micro_batches;
    all.clone().map(slot(Work::Forward)).chain(all.map(slot(Work::Backward))).collect()
}

/// Returns the number of forwards that a stage runs before it alternates forwards and backwards: the number of stages
/// after this one, but at most the number of micro-batches.
fn warm_up(size: Size, stage: StageId) -> usize {
    (size.stages - 1 - stage).min(size.micro_batches)
}

fn one_f_one_b(size: Size, stage: StageId) -> Vec<Slot> {
    let (ahead, all) = (warm_up(size, stage), size.micro_batches);
    let mut slots: Vec<Slot> = (0..ahead).map(slot(Work::Forward)).collect();
    for micro_batch in ahead..all {
        slots.extend([slot(Work::Forward)(micro_batch), slot(Work::Backward)(micro_batch - ahead)]);
    }
    slots.extend((all - ahead..all).map(slot(Work::Backward)));
    slots
}

/// Returns the slots of 1F1B, with the weight gradients of up to `stage` (the stage's index) micro-batches deferred.
/// The last stage defers the most, because it would otherwise idle at the end; stage 0 defers none. Every stage
/// therefore keeps at most as many micro-batches alive as the first stage of 1F1B.
fn zero_bubble(size: Size, stage: StageId) -> Vec<Slot> {
    let (ahead, all) = (warm_up(size, stage), size.micro_batches);
    let mut slots: Vec<Slot> = (0..ahead).map(slot(Work::Forward)).collect();
    let mut weights = 0;
    for micro_batch in 0..all {
        if ahead + micro_batch < all {
            slots.push(slot(Work::Forward)(ahead + micro_batch));
        }
        slots.push(slot(Work::BackwardInput)(micro_batch));
        if micro_batch >= stage {
            slots.push(slot(Work::BackwardWeight)(weights));
            weights += 1;
        }
    }
    slots.extend((weights..all).map(slot(Work::BackwardWeight)));
    slots
}

/// Micro-batches run in groups of equal size: all micro-batches of a group run through a stage's first chunk, then
/// through its second, and so on. A group size equal to the number of stages keeps every stage busy with the fewest
/// micro-batches in flight. If the number of micro-batches is not a multiple of that size, groups are larger.
fn interleaved(size: Size, stage: StageId) -> Vec<Slot> {
    let Size { stages, chunks, micro_batches } = size;
    let total = chunks * micro_batches;
    let rounds = (1..=(micro_batches / stages).max(1)).rev().find(|rounds| micro_batches.is_multiple_of(*rounds));
    let group = micro_batches / rounds.unwrap_or(1);
    let groups = || (0..micro_batches).step_by(group).map(|first| first..first + group);
    let pass = |work, order: fn(usize, usize) -> usize| -> Vec<Slot> {
        let of_group = |group: std::ops::Range<usize>| {
            (0..chunks).flat_map(move |chunk| {
                let chunk = order(chunk, chunks);
                group.clone().map(move |micro_batch| Slot { work, chunk, micro_batch })
            })
        };
        groups().flat_map(of_group).collect()
    };
    let forwards = pass(Work::Forward, |chunk, _| chunk);
    let backwards = pass(Work::Backward, |chunk, chunks| chunks - 1 - chunk);
    let ahead = ((stages - 1 - stage) * 2 + (chunks - 1) * group).min(total);
    let mut slots = forwards[..ahead].to_vec();
    for (&forward, &backward) in forwards[ahead..].iter().zip(&backwards) {
        slots.extend([forward, backward]);
    }
    slots.extend(&backwards[total - ahead..]);
    slots
}
