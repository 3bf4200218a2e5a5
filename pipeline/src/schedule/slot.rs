//! When a stage does what: the schedules themselves, as lists of whole forwards and backwards of chunks.
//!
//! Every schedule takes the micro-batches in ascending order, in the forward and in the backward of each chunk: so gradients
//! are added up in one order, whatever the schedule.

use std::fmt;

use crate::message::StageId;

/// How micro-batches flow through the stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// All forwards, then all backwards. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    /// Parallelism", NeurIPS 2019.
    GPipe,
    /// One forward, one backward, as soon as there is something to run backward: as long as GPipe, with fewer micro-batches
    /// alive. Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019 (with a flush).
    OneFOneB,
    /// The same with several chunks of layers on each stage: a shorter bubble for more messages. Narayanan et al., "Efficient
    /// Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021.
    Interleaved,
    /// 1F1B with the gradients of weights put off into what would be its bubble. ZB-H1 of Qi et al., "Zero Bubble Pipeline
    /// Parallelism", ICLR 2024.
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

/// What is done with a chunk and a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Work {
    /// Forward.
    Forward,
    /// Backward, whole.
    Backward,
    /// Backward as far as the stage before needs it.
    BackwardInput,
    /// The rest of it.
    BackwardWeight,
}

/// One piece of work of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot {
    /// What.
    pub work: Work,
    /// Which of the stage's chunks, from 0.
    pub chunk: usize,
    /// On which micro-batch.
    pub micro_batch: usize,
}

/// The pipeline that a schedule is written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Number of stages.
    pub stages: usize,
    /// Chunks of each stage.
    pub chunks: usize,
    /// Micro-batches of a step.
    pub micro_batches: usize,
}

impl Schedule {
    /// What `stage` does in a training step, in order. Only [`Schedule::Interleaved`] knows more than one chunk a stage; the
    /// others run a stage's chunks one after another, which is right but deadlocks across several stages.
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

/// Forwards ahead of the first backward: as many as there are stages behind.
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

/// As 1F1B, but `stage` micro-batches' weight gradients are put off: the last stage, which has nothing to wait for at the
/// beginning, has them left for the end, where it would wait; the first one puts off none. So every stage keeps at most as many
/// micro-batches as the first stage of 1F1B.
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

/// Micro-batches go through in groups of equally many: a group through a stage's first chunk, then through its second, and so
/// on. A group of as many as there are stages keeps everybody busy with the least in flight; where they do not come out even,
/// groups are larger.
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
