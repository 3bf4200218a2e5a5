//! Local steps: replicates that train alone, and the outer steps that average them (`training.local_steps`, DiLoCo).

use std::thread;
use std::time::{Duration, Instant};

use super::Engine;
use crate::comm_options::timeout;
use crate::error::Error;

const KEY: &str = "training.local_steps";

/// Interval at which an early replicate looks for the others; short compared with an outer step on a slow link.
const LOOK: Duration = Duration::from_millis(2);

impl Engine {
    /// Runs an outer step now: averages replicates that have trained alone since the last one, and lets all of them go on from
    /// the outer optimizer's result. Does nothing if they are equal, as they are without `training.local_steps`. Collective.
    ///
    /// Training runs it by itself after each `training.local_steps.steps` steps. Call it where a run ends between two of these,
    /// before its last evaluation and checkpoint.
    ///
    /// # Errors
    /// Fails if a rank is lost, or if a replicate is late by more than `launcher.timeout_seconds` per local step. The engine is not
    /// usable after an error.
    pub fn outer_step(&mut self) -> Result<(), Error> {
        if self.replicates_are_equal() {
            return Ok(());
        }
        self.meet_replicates().inspect_err(|error| self.comm.abort(&error.to_string()))?;
        let Some(program) = self.averaging.take() else { return Ok(()) };
        let load = &mut |_| Err(Error::Batch("an outer step loads no batch".into()));
        let outcome = self.run_without_training(&program, None, load, None);
        self.averaging = Some(program);
        outcome.inspect_err(|error| self.comm.abort(&error.to_string()))?;
        self.averaged = self.step;
        Ok(())
    }

    /// Waits until all replicates have taken their local steps. One of them may be later by the time that ranks may wait for each
    /// other, in each of these steps: replicates that do not train alone wait in each step.
    fn meet_replicates(&mut self) -> Result<(), Error> {
        let Some(same_shard) = self.zero.groups().apart() else { return Ok(()) };
        let patience = timeout(&self.config).mul_f64((self.step - self.averaged) as f64);
        let (started, met) = (Instant::now(), same_shard.barrier());
        // The deadline of an operation runs while a thread waits for it. The operation ends early if a rank is lost.
        while !met.is_done() && started.elapsed() < patience {
            thread::sleep(LOOK);
        }
        met.wait()?;
        self.timing.record_meeting(started);
        Ok(())
    }

    /// Returns whether an outer step follows the step of this number.
    pub(super) fn averages_after(&self, step: u64) -> bool {
        self.config.training.local_steps.is_some_and(|local| step.is_multiple_of(local.steps as u64))
    }

    /// Returns whether all replicates have the same parameters: always, unless they train alone.
    #[must_use]
    pub fn replicates_are_equal(&self) -> bool {
        self.averaging.is_none() || self.averaged == self.step
    }

    /// Refuses what needs equal replicates.
    pub(crate) fn has_equal_replicates(&self, what: &str) -> Result<(), Error> {
        if self.replicates_are_equal() {
            return Ok(());
        }
        let message =
            format!("{what} needs equal replicates, and the last outer step was after step {}", self.averaged);
        Err(Error::setting(KEY, message, "call `Engine::outer_step` first"))
    }
}
