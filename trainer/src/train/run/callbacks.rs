//! The program's functions that are called after steps and evaluations.

use std::time::Duration;

use zero_comm::Buffer;
use zero_engine::{Error, Step};

use super::{Run, Together};
use crate::train::evaluation::Evaluation;
use crate::train::task::StepInfo;

impl Run<'_> {
    /// Calls the program's functions for a step, on rank 0. Returns on every rank whether one of them ends the run.
    /// While replicates train independently, the run ends only after they have exchanged their parameters.
    pub(super) fn call_back(
        &mut self,
        step: &Step,
        steps: u64,
        together: &Together,
        evaluation: Option<&Evaluation>,
    ) -> Result<bool, Error> {
        let comm = self.engine.communicator();
        if comm.rank() == 0 {
            let info = StepInfo::new(step, steps, self.engine.samples(), Duration::from_micros(together.micros));
            for on_step in &mut self.task.on_step {
                self.ends |= on_step(&info);
            }
            if let Some(evaluation) = evaluation {
                for on_evaluation in &mut self.task.on_evaluation {
                    self.ends |= on_evaluation(evaluation);
                }
            }
        }
        let has_callbacks = !self.task.on_step.is_empty() || !self.task.on_evaluation.is_empty();
        if !has_callbacks || comm.size() == 1 || !self.engine.replicates_are_equal() {
            return Ok(self.ends && self.engine.replicates_are_equal());
        }
        let ends = comm.broadcast(Buffer::I64(vec![i64::from(self.ends)]), 0).wait()?.into_i64()?;
        Ok(ends == [1])
    }
}
