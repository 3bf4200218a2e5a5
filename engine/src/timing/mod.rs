//! Measures the time of a step by category.

pub mod gpu_timeline;
pub mod points;
pub mod profile;
pub mod trace;

use std::time::{Duration, Instant};

use zero_config::Config;
use zero_cuda::{Subject, Track};
use zero_partition::Ledger;
use zero_pipeline::{Action, Computation, Instruction, Program, Transfer};

use crate::timing::gpu_timeline::{GpuSpan, GpuTimeline};
use crate::timing::points::Points;
use crate::timing::profile::Profile;

/// Category of a rank's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TimeCategory {
    /// Loading and tokenizing samples.
    Data,
    /// Forward passes.
    Forward,
    /// Recomputed forward passes.
    Recomputation,
    /// Backward passes.
    Backward,
    /// Starting and awaiting collectives and messages: the communication time that did not overlap with compute, plus
    /// the time in which a pipeline stage waited for other stages.
    Communication,
    /// Starting and awaiting disk I/O: the I/O time that did not overlap with other work.
    Disk,
    /// Gradient norm and optimizer.
    Update,
}

impl TimeCategory {
    /// All categories, in the order of reports.
    pub const ALL: [Self; 7] =
        [Self::Data, Self::Forward, Self::Recomputation, Self::Backward, Self::Communication, Self::Disk, Self::Update];

    /// Returns the category's name in reports.
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

/// A finer category than `TimeCategory`: the phases that DeepSpeed distinguishes, and the other parts of a step.
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
    /// Reducing gradients.
    Reduce,
    /// Gathering sharded parameters.
    Gather,
    /// Gathering replicated parameters after their shards were updated.
    Refresh,
    /// Outer steps of replicates that train independently.
    Outer,
    /// Messages between pipeline stages.
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
    Phase::Outer,
    Phase::Messages,
    Phase::Disk,
    Phase::Update,
];

impl Phase {
    const COUNT: usize = Self::Update as usize + 1;

    fn of(instruction: &Instruction) -> Self {
        match instruction.effects().action {
            Action::Computes(computation) => match computation {
                Computation::Load => Self::Data,
                Computation::Forward(_) => Self::Forward,
                Computation::Recompute(_) => Self::Recomputation,
                Computation::Backward(_) | Computation::BackwardInput(_) | Computation::BackwardWeight(_) => {
                    Self::Backward
                }
                Computation::Accumulate(_)
                | Computation::Update(_)
                | Computation::MeasureTile(_)
                | Computation::UpdateTile(_) => Self::Update,
            },
            Action::Starts(transfer) | Action::Awaits(transfer) => match transfer {
                Transfer::Gather(_) | Transfer::GatherSecondary(_) => Self::Gather,
                Transfer::Reduce(..) => Self::Reduce,
                Transfer::Refresh(_) => Self::Refresh,
                Transfer::OuterStep(_) => Self::Outer,
                Transfer::Send(_) | Transfer::Receive(_) => Self::Messages,
                Transfer::Fetch(_) | Transfer::Offload(_) => Self::Disk,
            },
            Action::Meets => Self::Update,
            Action::Releases => Self::Gather,
            Action::Saves => Self::Forward,
        }
    }

    fn lane(self) -> TimeCategory {
        match self {
            Self::Data => TimeCategory::Data,
            Self::Forward => TimeCategory::Forward,
            Self::Recomputation => TimeCategory::Recomputation,
            Self::Backward => TimeCategory::Backward,
            Self::Reduce | Self::Gather | Self::Refresh | Self::Outer | Self::Messages => TimeCategory::Communication,
            Self::Disk => TimeCategory::Disk,
            Self::Update => TimeCategory::Update,
        }
    }
}

/// Seconds by [`Phase`].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PhaseSeconds([f64; Phase::COUNT]);

impl PhaseSeconds {
    /// Sums the seconds of several phases.
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

/// One executed instruction of a training step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The instruction's index in the step's program.
    pub index: usize,
    /// Start, as time since the timeline's origin. The origin is the engine's creation, after a barrier of all ranks.
    pub start: Duration,
    /// End, as time since the same origin.
    pub end: Duration,
}

/// Maximum number of steps in a timeline, so that it fits into a chart and takes little memory.
const TRACED_STEPS: usize = 20;

/// Returns whether a run records a timeline.
pub fn is_traced(config: &Config) -> bool {
    config.wall_clock_breakdown || config.training.trace
}

/// Returns the size in bytes of a timeline for a program of `instructions` instructions. A GPU's timeline also contains
/// copies and collectives.
pub fn timeline_bytes(instructions: usize, on_gpu: bool) -> u64 {
    let of_gpu = if on_gpu { 2 * size_of::<GpuSpan>() } else { 0 };
    (TRACED_STEPS * instructions * (size_of::<Span>() + of_gpu)) as u64
}

/// The timeline of a GPU and its totals.
#[derive(Debug)]
struct OfGpu {
    timeline: GpuTimeline,
    /// Whether to record every step, as with `wall_clock_breakdown`.
    every_step: bool,
    /// Whether an instruction of the running step was recorded.
    recorded: bool,
    phases: PhaseSeconds,
    spans: Vec<GpuSpan>,
}

/// Seconds by phase, calls by instruction, and optionally the timeline.
#[derive(Debug)]
pub struct Timing {
    origin: Instant,
    phases: PhaseSeconds,
    calls: std::collections::BTreeMap<&'static str, u64>,
    spans: Option<Vec<Span>>,
    steps: usize,
    /// The peak memory of each part of a step; `None` without `memory_breakdown`.
    points: Option<Points>,
    /// The profile that is being recorded; `None` outside of the step that `flops_profiler` selects.
    profile: Option<Profile>,
    gpu: Option<OfGpu>,
}

impl Timing {
    /// Starts the clock. With `traced`, records a timeline for programs with that number of instructions. With `holds`,
    /// records the memory of each part of a step. Ranks call this after a barrier, so that their clocks agree.
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

    /// Also records times on the GPU: in every step, or only in the steps of the timeline and of a profile.
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

    /// Marks the start of an instruction. `index` is its position in a training step's program.
    pub(crate) fn enter(&mut self, index: Option<usize>) -> candle_core::Result<()> {
        let (Some(gpu), Some(index)) = (&mut self.gpu, index) else { return Ok(()) };
        let is_traced = self.spans.is_some() && self.steps + usize::from(index == 0) <= TRACED_STEPS;
        if is_traced || gpu.every_step || self.profile.is_some() {
            gpu.recorded = true;
            gpu.timeline.enter(index)?;
        }
        Ok(())
    }

    /// Marks the end of an instruction.
    pub(crate) fn leave(&mut self) -> candle_core::Result<()> {
        match &mut self.gpu {
            Some(gpu) if gpu.recorded => gpu.timeline.leave(),
            _ => Ok(()),
        }
    }

    /// Reads the GPU's times after a training step. Waits for the GPU if times were recorded.
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

    /// Records an executed instruction. `index` is its position in a training step's program; instructions of an
    /// evaluation have no position and are not in the timeline.
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
        // The first instruction of the program starts a step.
        self.steps += usize::from(index == Some(0));
        if let (Some(spans), Some(index), true) = (&mut self.spans, index, self.steps <= TRACED_STEPS) {
            let start = started.duration_since(self.origin);
            spans.push(Span { index, start, end: start + duration });
        }
    }

    /// Records that this rank's replicate has waited for the other replicates since `started`, before an outer step.
    pub(crate) fn record_meeting(&mut self, started: Instant) {
        self.phases.0[Phase::Outer as usize] += started.elapsed().as_secs_f64();
    }

    /// Records the bytes held during an instruction: those in the ledger, and `beside`, which the allocator counted in
    /// addition to the ledger.
    pub(crate) fn hold(&mut self, instruction: &Instruction, index: Option<usize>, ledger: &Ledger, beside: u64) {
        if let (Some(points), Some(index)) = (&mut self.points, index) {
            points.note(instruction, index, ledger, beside);
        }
    }

    /// Returns the peak memory of each part of the last training step; `None` without `memory_breakdown`.
    pub fn points(&self) -> Option<&Points> {
        self.points.as_ref()
    }

    /// Starts a profile of the next training step.
    pub(crate) fn begin_profile(&mut self, layers: usize) {
        self.profile = Some(Profile::begin(layers));
    }

    /// Ends the profile and returns it.
    pub(crate) fn take_profile(&mut self) -> Option<Profile> {
        self.profile.take()
    }

    /// Returns the seconds of a category since the engine was created, on the host's clock. The host runs ahead of a
    /// GPU and waits only where it reads a result.
    #[must_use]
    pub fn seconds(&self, lane: TimeCategory) -> f64 {
        let of_lane = PHASES.into_iter().filter(|phase| phase.lane() == lane);
        of_lane.map(|phase| self.phases.0[phase as usize]).sum()
    }

    /// Returns the seconds by phase since the engine was created: on the GPU's clock if a run on a GPU sets
    /// `wall_clock_breakdown`, and otherwise on the host's clock.
    pub fn phases(&self) -> PhaseSeconds {
        match &self.gpu {
            Some(gpu) if gpu.every_step => gpu.phases,
            _ => self.phases,
        }
    }

    /// Returns the number of executed instructions, by kind.
    pub fn calls(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.calls.iter().map(|(&kind, &calls)| (kind, calls))
    }

    /// Returns whether a timeline is recorded.
    #[must_use]
    pub fn is_recorded(&self) -> bool {
        self.spans.is_some()
    }

    /// Returns the timeline; empty unless recorded.
    #[must_use]
    pub fn spans(&self) -> &[Span] {
        self.spans.as_deref().unwrap_or_default()
    }

    /// Returns the timeline of this rank's GPU; empty without a GPU, or unless recorded.
    #[must_use]
    pub fn gpu_spans(&self) -> &[GpuSpan] {
        self.gpu.as_ref().map_or(&[], |gpu| &gpu.spans)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timeline_keeps_the_first_steps() {
        let mut timing = Timing::new(Some(0), false);
        for _ in 0..TRACED_STEPS + 5 {
            for index in 0..3 {
                timing.record(&Instruction::GradientNorm, Some(index), Instant::now());
            }
            // An instruction of an evaluation.
            timing.record(&Instruction::Load { micro_batch: 0 }, None, Instant::now());
        }
        assert_eq!(timing.spans().len(), 3 * TRACED_STEPS);
        assert_eq!(timing.calls().map(|(_, calls)| calls).sum::<u64>(), 4 * (TRACED_STEPS as u64 + 5));
        assert!(Timing::new(None, false).spans().is_empty());
    }
}
