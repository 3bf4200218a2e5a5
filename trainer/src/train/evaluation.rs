//! Evaluation, and stopping early on it.

use std::fmt;

use serde_json::{Value, json};
use zero_config::EarlyStopping;

use super::corpus::Corpus;
use crate::data::Dataset;
use zero_engine::Engine;
use zero_engine::Error;

/// The mean loss over `training.eval_batches` micro-batches of every replica; a collective.
pub(super) fn evaluate(engine: &mut Engine, corpus: &Corpus, eval: &dyn Dataset) -> Result<f32, Error> {
    let rows = engine.config().train_micro_batch_size_per_gpu;
    let batches = engine.config().training.eval_batches.max(1);
    let (replica, replicas) = (engine.replica(), engine.replicas());
    let position = |batch: usize| ((batch * replicas + replica) * rows) as u64;
    let losses = engine.eval_with(batches, |batch| corpus.evaluation_batch(eval, position(batch), rows))?;
    let total: f64 = losses.into_iter().map(f64::from).sum();
    Ok((total / batches as f64) as f32)
}

/// `training.early_stopping` and what it has seen.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct EarlyStop {
    options: Option<EarlyStopping>,
    best: f32,
    without_improvement: usize,
}

impl EarlyStop {
    pub(super) fn new(options: Option<EarlyStopping>) -> Self {
        Self { options, best: f32::INFINITY, without_improvement: 0 }
    }

    /// Whether training should stop, after another evaluation.
    pub(super) fn is_over(&mut self, loss: f32) -> bool {
        let Some(options) = &self.options else { return false };
        if f64::from(loss) < f64::from(self.best) - options.min_delta {
            self.best = loss;
            self.without_improvement = 0;
        } else {
            self.without_improvement += 1;
        }
        self.without_improvement >= options.patience
    }

    /// For a checkpoint.
    pub(super) fn state(&self) -> Value {
        let best = self.best.is_finite().then_some(self.best);
        json!({ "early_stopping": { "best": best, "without_improvement": self.without_improvement } })
    }

    /// From a checkpoint.
    pub(super) fn restore(&mut self, state: &Value) {
        let state = &state["early_stopping"];
        self.best = state["best"].as_f64().map_or(f32::INFINITY, |best| best as f32);
        self.without_improvement = state["without_improvement"].as_u64().unwrap_or(0) as usize;
    }
}

impl fmt::Display for EarlyStop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no evaluation loss below {:.4} in the last {} evaluations", self.best, self.without_improvement)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stops_after_patience_and_survives_a_checkpoint() {
        let options = Some(EarlyStopping { patience: 2, min_delta: 0.1 });
        let mut early = EarlyStop::new(options.clone());
        assert!(!early.is_over(1.0));
        assert!(!early.is_over(0.95)); // not better by min_delta
        let mut resumed = EarlyStop::new(options);
        resumed.restore(&early.state());
        assert_eq!(early, resumed);
        assert!(!resumed.is_over(0.8));
        assert!(!resumed.is_over(0.8));
        assert!(resumed.is_over(f32::NAN));
    }
}
