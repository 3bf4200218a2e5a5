//! Local steps: replicates that train independently, and the outer steps that average them (`training.local_steps`,
//! DiLoCo).

use std::thread;
use std::time::{Duration, Instant};

use super::Engine;
use crate::comm_options::timeout;
use crate::error::Error;

const KEY: &str = "training.local_steps";

/// Interval at which a replicate that reaches an outer step early checks whether the other replicates have reached it.
/// It is short compared with an outer step on a slow link.
const LOOK: Duration = Duration::from_millis(2);

impl Engine {
    /// Runs an outer step now: averages replicates that have trained independently since the last outer step, so that
    /// all of them continue from the outer optimizer's result. Does nothing if the replicates are equal, as is always
    /// the case without `training.local_steps`. Collective.
    ///
    /// Training runs an outer step automatically after every `training.local_steps.steps` steps. If a run ends between
    /// two outer steps, call this before its last evaluation and checkpoint.
    ///
    /// # Errors
    /// Fails if a rank is lost, or if a replicate is late by more than `launcher.timeout_seconds` per local step. The
    /// engine is not usable after an error.
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

    /// Waits until all replicates have taken their local steps. A replicate may be late by one communication timeout
    /// for each of these steps, because replicates that do not train independently would wait for each other in every
    /// step.
    fn meet_replicates(&mut self) -> Result<(), Error> {
        let Some(same_shard) = self.zero.groups().apart() else { return Ok(()) };
        let patience = timeout(&self.config).mul_f64((self.step - self.averaged) as f64);
        let (started, met) = (Instant::now(), same_shard.barrier());
        // Poll instead of waiting: the deadline of an operation only runs while a thread waits for it. The operation
        // ends early if a rank is lost.
        while !met.is_done() && started.elapsed() < patience {
            thread::sleep(LOOK);
        }
        met.wait()?;
        self.timing.record_meeting(started);
        Ok(())
    }

    /// Returns whether an outer step runs after step `step`.
    pub(super) fn averages_after(&self, step: u64) -> bool {
        self.config.training.local_steps.is_some_and(|local| step.is_multiple_of(local.steps as u64))
    }

    /// Returns whether all replicates have the same parameters. This is always true unless they train independently.
    #[must_use]
    pub fn replicates_are_equal(&self) -> bool {
        self.averaging.is_none() || self.averaged == self.step
    }

    /// Fails if replicates are not equal; `what` names the operation that needs equal replicates.
    pub(crate) fn has_equal_replicates(&self, what: &str) -> Result<(), Error> {
        if self.replicates_are_equal() {
            return Ok(());
        }
        let message = format!(
            "{what} needs identical replicates, but the replicates have trained separately since step {}",
            self.averaged
        );
        Err(Error::setting(KEY, message, "call `Engine::outer_step` first"))
    }
}
