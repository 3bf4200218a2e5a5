//! Where the time of a step goes.

pub mod gpu_timeline;
pub mod points;
pub mod profile;
pub mod trace;

use std::time::{Duration, Instant};

use zero_config::Config;
use zero_cuda::{Subject, Track};
use zero_partition::Ledger;
use zero_pipeline::{Instruction, Program};

use crate::timing::gpu_timeline::{GpuSpan, GpuTimeline};
use crate::timing::points::Points;
use crate::timing::profile::Profile;

/// What a span of a rank's time was spent on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TimeCategory {
    /// Reading and tokenising samples.
    Data,
    /// Forward passes.
    Forward,
    /// Forward passes that were run again.
    Recomputation,
    /// Backward passes.
    Backward,
    /// Starting and awaiting collectives and messages: what communication did not hide behind compute, and what a pipeline
    /// stage waited for others.
    Communication,
    /// Starting and awaiting reads and writes of the disk: what did not hide behind the rest.
    Disk,
    /// Norm and optimizer.
    Update,
}

impl TimeCategory {
    /// All of them, in the order in which reports show them.
    pub const ALL: [Self; 7] =
        [Self::Data, Self::Forward, Self::Recomputation, Self::Backward, Self::Communication, Self::Disk, Self::Update];

    /// Its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::Forward => "forward",
            Self::Recomputation => "recomputation",
            Self::Backward => "backward",
            Self::Communication => "communication",
            Self::Disk => "disk",
            Self::Update => "update",
        }
    }
}

/// The same, in finer parts: what DeepSpeed tells apart, and what else a step here consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// As [`TimeCategory::Data`].
    Data,
    /// As [`TimeCategory::Forward`].
    Forward,
    /// As [`TimeCategory::Recomputation`].
    Recomputation,
    /// As [`TimeCategory::Backward`].
    Backward,
    /// Gradients on their way to one sum.
    Reduce,
    /// Sharded parameters on their way to where they are used.
    Gather,
    /// What was updated, on its way to all ranks that keep it.
    Refresh,
    /// Between pipeline stages.
    Messages,
    /// As [`TimeCategory::Disk`].
    Disk,
    /// As [`TimeCategory::Update`].
    Update,
}

const PHASES: [Phase; Phase::COUNT] = [
    Phase::Data,
    Phase::Forward,
    Phase::Recomputation,
    Phase::Backward,
    Phase::Reduce,
    Phase::Gather,
    Phase::Refresh,
    Phase::Messages,
    Phase::Disk,
    Phase::Update,
];

impl Phase {
    const COUNT: usize = Self::Update as usize + 1;

    fn of(instruction: &Instruction) -> Self {
        match instruction {
            Instruction::Load { .. } => Self::Data,
            Instruction::Forward { .. } | Instruction::Keep { .. } | Instruction::Discard { .. } => Self::Forward,
            Instruction::Recompute { .. } => Self::Recomputation,
            Instruction::Backward { .. } | Instruction::BackwardInput { .. } | Instruction::BackwardWeight { .. } => {
                Self::Backward
            }
            Instruction::Gather { .. } | Instruction::AwaitGather { .. } | Instruction::Release { .. } => Self::Gather,
            Instruction::Reduce { .. } | Instruction::AwaitReduce { .. } => Self::Reduce,
            Instruction::Refresh { .. } | Instruction::AwaitRefresh { .. } => Self::Refresh,
            Instruction::Send { .. }
            | Instruction::AwaitSend { .. }
            | Instruction::Receive { .. }
            | Instruction::AwaitReceive { .. } => Self::Messages,
            Instruction::Fetch { .. }
            | Instruction::AwaitFetch { .. }
            | Instruction::Offload { .. }
            | Instruction::AwaitOffload { .. } => Self::Disk,
            Instruction::UpdateTile { .. }
            | Instruction::Accumulate { .. }
            | Instruction::GradientNorm
            | Instruction::Update { .. } => Self::Update,
        }
    }

    fn lane(self) -> TimeCategory {
        match self {
            Self::Data => TimeCategory::Data,
            Self::Forward => TimeCategory::Forward,
            Self::Recomputation => TimeCategory::Recomputation,
            Self::Backward => TimeCategory::Backward,
            Self::Reduce | Self::Gather | Self::Refresh | Self::Messages => TimeCategory::Communication,
            Self::Disk => TimeCategory::Disk,
            Self::Update => TimeCategory::Update,
        }
    }
}

/// Seconds by [`Phase`].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PhaseSeconds([f64; Phase::COUNT]);

impl PhaseSeconds {
    /// Those of some phases together.
    pub fn of(&self, phases: &[Phase]) -> f64 {
        phases.iter().map(|&phase| self.0[phase as usize]).sum()
    }
}

impl std::ops::Sub for PhaseSeconds {
    type Output = Self;
    fn sub(self, earlier: Self) -> Self {
        Self(std::array::from_fn(|phase| self.0[phase] - earlier.0[phase]))
    }
}

impl std::ops::AddAssign for PhaseSeconds {
    fn add_assign(&mut self, more: Self) {
        self.0.iter_mut().zip(more.0).for_each(|(sum, more)| *sum += more);
    }
}

/// An instruction of a training step that was carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Its index in the step's program.
    pub index: usize,
    /// Since all ranks had been made.
    pub start: Duration,
    /// Likewise.
    pub end: Duration,
}

/// Steps of which the timeline is kept: what a picture can show, and little beside the run.
const TRACED_STEPS: usize = 20;

/// Whether a run keeps its timeline.
pub fn is_traced(config: &Config) -> bool {
    config.wall_clock_breakdown || config.training.trace
}

/// Bytes of the timeline of a program of so many instructions: the host's, and a GPU's, which has copies and collectives besides.
pub fn timeline_bytes(instructions: usize, on_gpu: bool) -> u64 {
    let of_gpu = if on_gpu { 2 * size_of::<GpuSpan>() } else { 0 };
    (TRACED_STEPS * instructions * (size_of::<Span>() + of_gpu)) as u64
}

/// A GPU's clock, and what is read from it.
#[derive(Debug)]
struct OfGpu {
    timeline: GpuTimeline,
    /// With `wall_clock_breakdown`.
    every_step: bool,
    /// Something of the running step is recorded.
    recorded: bool,
    phases: PhaseSeconds,
    spans: Vec<GpuSpan>,
}

/// Seconds by lane, calls by instruction, and the timeline where it is wanted.
#[derive(Debug)]
pub struct Timing {
    origin: Instant,
    phases: PhaseSeconds,
    calls: std::collections::BTreeMap<&'static str, u64>,
    spans: Option<Vec<Span>>,
    steps: usize,
    /// With `memory_breakdown`.
    points: Option<Points>,
    /// In the step of `flops_profiler`.
    profile: Option<Profile>,
    gpu: Option<OfGpu>,
}

impl Timing {
    /// Keeps the timeline of programs of so many instructions, if it is to, and what is held in a step. All ranks make it at about the same time, behind a barrier.
    pub fn new(traced: Option<usize>, holds: bool) -> Self {
        Self {
            origin: Instant::now(),
            phases: PhaseSeconds::default(),
            calls: std::collections::BTreeMap::new(),
            spans: traced.map(|instructions| Vec::with_capacity(TRACED_STEPS * instructions)),
            steps: 0,
            points: holds.then(Points::new),
            profile: None,
            gpu: None,
        }
    }

    /// Reads a GPU's clock as well: in the steps of the timeline and of a profile, or in all.
    pub(crate) fn with_gpu(self, timeline: Option<GpuTimeline>, every_step: bool) -> Self {
        let gpu = timeline.map(|timeline| OfGpu {
            timeline,
            every_step,
            recorded: false,
            phases: PhaseSeconds::default(),
            spans: vec![],
        });
        Self { gpu, ..self }
    }

    /// Before an instruction, with its place in a training step's program.
    pub(crate) fn enter(&mut self, index: Option<usize>) -> candle_core::Result<()> {
        let (Some(gpu), Some(index)) = (&mut self.gpu, index) else { return Ok(()) };
        let is_traced = self.spans.is_some() && self.steps + usize::from(index == 0) <= TRACED_STEPS;
        if is_traced || gpu.every_step || self.profile.is_some() {
            gpu.recorded = true;
            gpu.timeline.enter(index)?;
        }
        Ok(())
    }

    /// After it.
    pub(crate) fn leave(&mut self) -> candle_core::Result<()> {
        match &mut self.gpu {
            Some(gpu) if gpu.recorded => gpu.timeline.leave(),
            _ => Ok(()),
        }
    }

    /// After a training step: waits for the GPU, where something was recorded.
    pub(crate) fn settle(&mut self, program: &Program) -> candle_core::Result<()> {
        let Some(gpu) = self.gpu.as_mut().filter(|gpu| gpu.recorded) else { return Ok(()) };
        gpu.recorded = false;
        let spans = gpu.timeline.take()?;
        for span in &spans {
            let (Track::Compute, Subject::Number(index)) = (span.track, span.subject) else { continue };
            let Some(instruction) = program.instructions.get(index) else { continue };
            let duration = span.end - span.start;
            gpu.phases.0[Phase::of(instruction) as usize] += duration.as_secs_f64();
            if let Some(profile) = &mut self.profile {
                profile.note_time(instruction, duration);
            }
        }
        if self.spans.is_some() && self.steps <= TRACED_STEPS {
            gpu.spans.extend(spans.iter().map(|span| GpuSpan::new(span, self.origin)));
        }
        Ok(())
    }

    /// An instruction that is done. `index` is its place in a training step's program; evaluation is not in the timeline.
    pub fn record(&mut self, instruction: &Instruction, index: Option<usize>, started: Instant) {
        let duration = started.elapsed();
        self.phases.0[Phase::of(instruction) as usize] += duration.as_secs_f64();
        *self.calls.entry(instruction.kind()).or_default() += 1;
        if let (Some(profile), Some(_)) = (&mut self.profile, index) {
            profile.note_macs(instruction);
            if self.gpu.is_none() {
                profile.note_time(instruction, duration);
            }
        }
        // A step begins with the first instruction of its program.
        self.steps += usize::from(index == Some(0));
        if let (Some(spans), Some(index), true) = (&mut self.spans, index, self.steps <= TRACED_STEPS) {
            let start = started.duration_since(self.origin);
            spans.push(Span { index, start, end: start + duration });
        }
    }

    /// What an instruction has held: what the ledger says, and what the allocator has counted beside it.
    pub(crate) fn hold(&mut self, instruction: &Instruction, index: Option<usize>, ledger: &Ledger, beside: u64) {
        if let (Some(points), Some(index)) = (&mut self.points, index) {
            points.note(instruction, index, ledger, beside);
        }
    }

    /// What the parts of the last training step have held, with `memory_breakdown`.
    pub fn points(&self) -> Option<&Points> {
        self.points.as_ref()
    }

    /// Profiles the training step that comes.
    pub(crate) fn begin_profile(&mut self, layers: usize) {
        self.profile = Some(Profile::begin(layers));
    }

    /// Ends the profile.
    pub(crate) fn take_profile(&mut self) -> Option<Profile> {
        self.profile.take()
    }

    /// Seconds spent on a lane since the engine was made. Of the host: it is ahead of a GPU, and waits where it reads from one.
    #[must_use]
    pub fn seconds(&self, lane: TimeCategory) -> f64 {
        let of_lane = PHASES.into_iter().filter(|phase| phase.lane() == lane);
        of_lane.map(|phase| self.phases.0[phase as usize]).sum()
    }

    /// The same by phase; with `wall_clock_breakdown` on a GPU by that one's clock.
    pub fn phases(&self) -> PhaseSeconds {
        match &self.gpu {
            Some(gpu) if gpu.every_step => gpu.phases,
            _ => self.phases,
        }
    }

    /// Instructions carried out, by kind.
    pub fn calls(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.calls.iter().map(|(&kind, &calls)| (kind, calls))
    }

    /// Whether the timeline is recorded.
    #[must_use]
    pub fn is_recorded(&self) -> bool {
        self.spans.is_some()
    }

    /// The timeline; empty unless it is recorded.
    #[must_use]
    pub fn spans(&self) -> &[Span] {
        self.spans.as_deref().unwrap_or_default()
    }

    /// That of this rank's GPU; empty without one, or unless it is recorded.
    #[must_use]
    pub fn gpu_spans(&self) -> &[GpuSpan] {
        self.gpu.as_ref().map_or(&[], |gpu| &gpu.spans)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timeline_of_a_long_run_has_its_first_steps() {
        let mut timing = Timing::new(Some(0), false);
        for _ in 0..TRACED_STEPS + 5 {
            for index in 0..3 {
                timing.record(&Instruction::GradientNorm, Some(index), Instant::now());
            }
            // An evaluation.
            timing.record(&Instruction::Load { micro_batch: 0 }, None, Instant::now());
        }
        assert_eq!(timing.spans().len(), 3 * TRACED_STEPS);
        assert_eq!(timing.calls().map(|(_, calls)| calls).sum::<u64>(), 4 * (TRACED_STEPS as u64 + 5));
        assert!(Timing::new(None, false).spans().is_empty());
    }
}
