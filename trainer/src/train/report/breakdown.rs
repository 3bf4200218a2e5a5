//! `wall_clock_breakdown`: the times of the phases of a step, under DeepSpeed's names.

use crate::monitor::metric::{self, Metric, Scalar};
use zero_engine::timing::{Phase, PhaseSeconds, Timing};

/// A part of a step: its name in DeepSpeed's line, its metric, and its phases.
struct StepPart {
    name: &'static str,
    metric: &'static Metric,
    phases: &'static [Phase],
}

/// The first five parts are DeepSpeed's. `bwd` is the sum of `bwd_inner` and `bwd_allreduce`.
static PARTS: [StepPart; 9] = [
    part("fwd", &metric::FORWARD_TIME, &[Phase::Forward]),
    part("bwd", &metric::BACKWARD_TIME, &[Phase::Backward, Phase::Recomputation, Phase::Reduce]),
    part("bwd_inner", &metric::BACKWARD_INNER_TIME, &[Phase::Backward, Phase::Recomputation]),
    part("bwd_allreduce", &metric::BACKWARD_ALLREDUCE_TIME, &[Phase::Reduce]),
    part("step", &metric::UPDATE_TIME, &[Phase::Update, Phase::Refresh, Phase::Outer]),
    part("data", &metric::DATA_TIME, &[Phase::Data]),
    part("gather", &metric::GATHER_TIME, &[Phase::Gather]),
    part("pipeline", &metric::MESSAGES_TIME, &[Phase::Messages]),
    part("disk", &metric::DISK_TIME, &[Phase::Disk]),
];

const fn part(name: &'static str, metric: &'static Metric, phases: &'static [Phase]) -> StepPart {
    StepPart { name, metric, phases }
}

/// The times of this rank's phases in the last step, and in the steps since the last line.
#[derive(Default)]
pub(in crate::train) struct Breakdown {
    before: PhaseSeconds,
    last: PhaseSeconds,
    since: PhaseSeconds,
    steps: u32,
}

impl Breakdown {
    /// Begins a step. Call it before the step, so that an evaluation after the previous step does not count.
    pub(in crate::train) fn begin(&mut self, timing: &Timing) {
        self.before = timing.phases();
    }

    /// Ends a step.
    pub(in crate::train) fn end(&mut self, timing: &Timing) {
        self.last = timing.phases() - self.before;
        self.since += self.last;
        self.steps += 1;
    }

    /// Returns the times of the last step, for monitors.
    pub(in crate::train) fn scalars(&self) -> impl Iterator<Item = Scalar> {
        let last = self.last;
        PARTS.iter().map(move |part| Scalar { metric: part.metric, value: last.of(part.phases) * 1e3 })
    }

    /// Returns the mean over the steps since the last line, in DeepSpeed's format.
    pub(in crate::train) fn line(&mut self) -> String {
        let (since, steps) = (std::mem::take(&mut self.since), std::mem::take(&mut self.steps).max(1));
        let of = |part: &StepPart| {
            let ms = since.of(part.phases) * 1e3 / f64::from(steps);
            // Omits parts that took no time, except DeepSpeed's `fwd`.
            (ms > 0.0 || part.name == "fwd").then(|| format!(" | {}: {ms:.2}", part.name))
        };
        format!("time (ms){}", PARTS.iter().filter_map(of).collect::<String>())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use zero_pipeline::Instruction;

    use super::*;

    #[test]
    fn the_phases_of_a_step_are_separate_and_exclude_evaluations() {
        let (mut timing, mut breakdown) = (Timing::new(None, false), Breakdown::default());
        let now = Instant::now();
        let ago = |ms| now.checked_sub(std::time::Duration::from_millis(ms)).expect("the machine started before that");
        for _ in 0..2 {
            breakdown.begin(&timing);
            for (instruction, ms) in [
                (Instruction::Load { micro_batch: 0 }, 1_000),
                (Instruction::Forward { layer: 0, micro_batch: 0 }, 20_000),
                (Instruction::Gather { segments: vec![0] }, 300_000),
                (Instruction::Backward { layer: 0, micro_batch: 0 }, 4_000_000),
                (Instruction::Update { segment: 0 }, 50_000_000),
            ] {
                timing.record(&instruction, Some(0), ago(ms));
            }
            breakdown.end(&timing);
            timing.record(&Instruction::Forward { layer: 0, micro_batch: 0 }, None, ago(900_000));
        }
        let rounded: Vec<(&str, f64)> =
            breakdown.scalars().map(|one| (Metric::last_part(one.metric.tag), (one.value / 1e3).round())).collect();
        assert_eq!(rounded[0], ("elapsed_time_ms_forward", 20.0));
        assert_eq!(rounded[1], ("elapsed_time_ms_backward", 4_000.0));
        assert_eq!(rounded[4], ("elapsed_time_ms_step", 50_000.0));
        assert_eq!(rounded[6], ("elapsed_time_ms_gather", 300.0));
        let line = breakdown.line();
        assert!(line.starts_with("time (ms) | fwd: 200") && line.contains(" | gather: 3000"), "{line}");
        assert!(!line.contains("disk"), "{line}");
        assert!(breakdown.line().starts_with("time (ms) | fwd: 0.00"), "a line begins anew");
    }
}
