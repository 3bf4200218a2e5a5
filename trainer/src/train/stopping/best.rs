//! The best evaluation of a run, whose checkpoint is kept (`training.keep_best`).

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use zero_checkpoint::MANIFEST;
use zero_comm::Communicator;
use zero_config::KeepBest;

use super::objective::Objective;
use crate::train::evaluation::Evaluation;
use crate::train::first_rank::on_first_rank;
use crate::train::metrics::Metric;
use zero_engine::Error;

/// The best evaluation of a run so far, and its checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct BestCheckpoint {
    /// The step of the evaluation.
    pub step: u64,
    /// The value of `training.keep_best.metric`.
    pub value: f64,
    /// The checkpoint's folder.
    pub folder: PathBuf,
}

/// An evaluation that was better than all earlier evaluations with a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Found {
    step: u64,
    cost: f64,
}

/// The search for the best evaluation. It does nothing without `training.keep_best`.
#[derive(Debug)]
pub(crate) struct Best {
    objective: Option<Objective>,
    /// The best evaluation that has a checkpoint.
    saved: Option<Found>,
    /// A better evaluation, whose checkpoint is not written yet.
    unsaved: Option<Found>,
    /// The folder of the checkpoints.
    root: PathBuf,
}

impl Best {
    /// Creates the search for a run in the folder `out`.
    pub(crate) fn new(options: Option<&KeepBest>, out: &Path) -> Self {
        let objective = options.map(|KeepBest { metric, mode }| Objective::new(metric, *mode));
        Self { objective, saved: None, unsaved: None, root: out.join("checkpoints") }
    }

    /// Checks that the evaluations of the run have the metric of `training.keep_best`.
    pub(crate) fn check<'a>(&self, metrics: &[Metric], sets: impl IntoIterator<Item = &'a str>) -> Result<(), Error> {
        self.objective.as_ref().map_or(Ok(()), |it| it.check("training.keep_best.metric", metrics, sets))
    }

    /// Takes an evaluation and returns whether it is better than the best evaluation that has a checkpoint. An
    /// evaluation whose value is not finite is never better.
    pub(crate) fn improves(&mut self, evaluation: &Evaluation) -> bool {
        let Some(objective) = &self.objective else { return false };
        let cost = objective.cost(evaluation);
        let is_better = cost.is_finite() && self.saved.is_none_or(|saved| cost < saved.cost);
        if is_better {
            self.unsaved = Some(Found { step: evaluation.step, cost });
        }
        is_better
    }

    /// Returns whether the checkpoint of the best evaluation is not written yet.
    pub(crate) fn is_unsaved(&self) -> bool {
        self.unsaved.is_some()
    }

    /// Returns the step whose checkpoint is kept.
    pub(crate) fn step(&self) -> Option<u64> {
        self.unsaved.or(self.saved).map(|found| found.step)
    }

    /// Takes the result of a save and returns whether the saved checkpoint is now the best checkpoint. If the
    /// checkpoint of a better evaluation could not be written, the previous best checkpoint stays the best.
    pub(crate) fn ended(&mut self, step: u64, is_saved: bool) -> bool {
        let Some(found) = self.unsaved.take_if(|found| found.step == step) else { return false };
        if is_saved {
            self.saved = Some(found);
        }
        is_saved
    }

    /// Returns the state for a checkpoint.
    pub(crate) fn state(&self) -> Value {
        let found = self.unsaved.or(self.saved);
        found.map_or(Value::Null, |Found { step, cost }| json!({ "step": step, "cost": cost }))
    }

    /// Restores the state from a checkpoint if the best checkpoint is still on disk, and links the best checkpoint. A
    /// collective.
    pub(crate) fn restore(&mut self, state: &Value, comm: &dyn Communicator) -> Result<(), Error> {
        if self.objective.is_none() {
            return Ok(());
        }
        let step = state["step"].as_u64();
        let is_there = |step: &u64| self.root.join(zero_checkpoint::name(*step)).join(MANIFEST).is_file();
        let step = on_first_rank(comm, || {
            let step = step.filter(is_there);
            let path = self.root.join(LINK);
            let linked = step.map_or_else(|| remove(&path), |step| self.link(step));
            linked.map_err(Error::io(&path))?;
            Ok(step)
        })?;
        self.saved = step.zip(state["cost"].as_f64()).map(|(step, cost)| Found { step, cost });
        Ok(())
    }

    /// Points the link to the checkpoint of a step. A rename replaces the link, so that it always points to a
    /// checkpoint.
    pub(crate) fn link(&self, step: u64) -> io::Result<()> {
        let temporary = self.root.join(".best");
        remove(&temporary)?;
        symlink(zero_checkpoint::name(step), &temporary)?;
        fs::rename(temporary, self.root.join(LINK))
    }

    /// Returns the best checkpoint, if any.
    pub(crate) fn checkpoint(&self) -> Option<BestCheckpoint> {
        let (objective, Found { step, cost }) = self.objective.as_ref().zip(self.saved)?;
        Some(BestCheckpoint { step, value: objective.value(cost), folder: self.root.join(zero_checkpoint::name(step)) })
    }

    /// Returns a line about the best checkpoint, if any.
    pub(crate) fn line(&self) -> Option<String> {
        let BestCheckpoint { step, value, .. } = self.checkpoint()?;
        let name = self.objective.as_ref().map_or("", Objective::name);
        Some(format!("best        {}  ({name} {value:.4} after step {step})", self.root.join(LINK).display()))
    }
}

/// Name of the link to the best checkpoint, beside the checkpoints.
const LINK: &str = "best";

/// Removes a file or a link, if it exists.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        ended => ended,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zero_config::StopMode;

    fn of(step: u64, loss: f32) -> Evaluation {
        Evaluation { step, loss, metrics: vec![], by_dataset: vec![], samples: 1 }
    }

    #[test]
    fn a_better_evaluation_counts_once_its_checkpoint_is_written() {
        let mut best = Best::new(Some(&KeepBest { metric: "loss".into(), mode: StopMode::Min }), Path::new("run"));
        assert!(best.improves(&of(1, 2.0)) && best.ended(1, true));
        assert!(!best.improves(&of(2, f32::NAN)) && !best.improves(&of(3, 2.0)));
        assert!(best.improves(&of(4, 1.0)) && best.step() == Some(4));
        // The checkpoint of step 4 could not be written.
        assert!(!best.ended(4, false) && best.step() == Some(1));
        assert!(best.improves(&of(5, 1.5)));
        // The result of the save of step 4 does not affect the evaluation of step 5.
        assert!(!best.ended(4, true) && best.is_unsaved());
        assert!(best.ended(5, true) && !best.is_unsaved());
        assert_eq!(best.state(), json!({"step": 5, "cost": 1.5}));
        assert!(!Best::new(None, Path::new("run")).improves(&of(1, 0.0)));
    }
}
