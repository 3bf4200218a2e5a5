//! Steps that go wrong: gradients that are not finite, and norms far above those before them.

use std::collections::VecDeque;

use serde_json::{Value, json};
use zero_config::{Config, Nonfinite, OnSpike, Spikes};

use super::progress::Progress;
use zero_engine::Error;
use zero_engine::{Engine, Step};

/// What `training` says of such steps, and what was seen.
pub(super) struct Divergence {
    nonfinite: Nonfinite,
    max_skipped: u64,
    spikes: Option<Spikes>,
    /// With `fp16`, gradients overflow now and then, and the loss scale follows.
    rescales: bool,
    /// Finite norms of the last steps, those of spikes among them: a norm that stays high is none after half a window.
    norms: VecDeque<f64>,
    skipped_in_a_row: u64,
}

impl Divergence {
    pub(super) fn new(config: &Config) -> Self {
        let training = &config.training;
        Self {
            nonfinite: training.nonfinite,
            max_skipped: training.max_skipped_steps as u64,
            spikes: training.spikes.clone(),
            rescales: config.fp16.enabled && config.fp16.is_dynamic(),
            norms: VecDeque::new(),
            skipped_in_a_row: 0,
        }
    }

    /// What is a spike now; infinity if nothing is.
    fn limit(&self) -> f64 {
        match &self.spikes {
            Some(spikes) if self.norms.len() >= spikes.window => spikes.factor * self.median(),
            _ => f64::INFINITY,
        }
    }

    /// The lower one of an even number.
    fn median(&self) -> f64 {
        let mut sorted: Vec<f64> = self.norms.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len().saturating_sub(1) / 2).copied().unwrap_or(f64::INFINITY)
    }

    /// Before a step: tells the engine which norm makes no update.
    pub(super) fn prepare(&self, engine: &mut Engine) {
        let skips = self.spikes.as_ref().is_some_and(|spikes| spikes.action != OnSpike::Warn);
        engine.skip_beyond(if skips { self.limit() } else { f64::INFINITY });
    }

    /// After a step: says what is wrong with it, and ends the run where it is to. The same on all ranks.
    pub(super) fn judge(&mut self, step: &Step, progress: &Progress) -> Result<(), Error> {
        let Step { step: number, loss, grad_norm: norm, skipped, .. } = *step;
        if self.rescales && skipped && loss.is_finite() && !norm.is_finite() {
            return Ok(());
        }
        let limit = self.limit();
        let is_finite = norm.is_finite() && loss.is_finite();
        let done = if skipped { ", and nothing was updated" } else { "" };
        let reason = if !is_finite {
            Some(format!("in step {number} the loss is {loss} and the gradient norm {norm}"))
        } else if norm > limit {
            Some(format!(
                "in step {number} the gradient norm is {norm:.3e}, the median of those before it {:.3e}",
                self.median()
            ))
        } else {
            None
        };
        self.note(norm);
        self.skipped_in_a_row = if skipped || !is_finite { self.skipped_in_a_row + 1 } else { 0 };
        let Some(reason) = reason else { return Ok(()) };
        progress.warn(&format!("{reason}{done}"));
        let stops = match is_finite {
            false => self.nonfinite == Nonfinite::Stop,
            true => self.spikes.as_ref().is_some_and(|spikes| spikes.action == OnSpike::Stop),
        };
        if stops {
            return Err(Error::Diverged { reason: format!("{reason}; the configuration says to stop then") });
        }
        if self.skipped_in_a_row >= self.max_skipped {
            let reason = format!("{reason}, the last of {} such steps in a row", self.skipped_in_a_row);
            return Err(Error::Diverged { reason });
        }
        Ok(())
    }

    fn note(&mut self, norm: f64) {
        let Some(spikes) = &self.spikes else { return };
        if norm.is_finite() {
            self.norms.push_back(norm);
            if self.norms.len() > spikes.window {
                self.norms.pop_front();
            }
        }
    }

    /// For a checkpoint.
    pub(super) fn state(&self) -> Value {
        json!({ "norms": self.norms, "skipped_in_a_row": self.skipped_in_a_row })
    }

    /// From a checkpoint.
    pub(super) fn restore(&mut self, state: &Value) {
        self.norms = state["norms"].as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
        self.skipped_in_a_row = state["skipped_in_a_row"].as_u64().unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::train::Output;

    fn divergence(training: &str) -> Divergence {
        let text = format!("train_batch_size: 1\ntraining: {{{training}}}");
        Divergence::new(&Config::parse("ds.yaml", text).unwrap())
    }

    /// What is made of steps with these norms, whose update the engine leaves out as it was told.
    fn outcome(divergence: &mut Divergence, norms: &[f64]) -> Result<Vec<bool>, String> {
        let progress = Progress::new(Output::Quiet, None, 1, 0, norms.len() as u64);
        let mut skipped = vec![];
        for (index, &norm) in norms.iter().enumerate() {
            let skips = divergence.spikes.as_ref().is_some_and(|spikes| spikes.action != OnSpike::Warn);
            let is_skipped = !norm.is_finite() || skips && norm > divergence.limit();
            let step = Step {
                step: index as u64 + 1,
                loss: 1.0,
                lr: 0.1,
                grad_norm: norm,
                loss_scale: None,
                skipped: is_skipped,
                duration: Duration::ZERO,
                sent_bytes: 0,
            };
            divergence.judge(&step, &progress).map_err(|e| e.to_string())?;
            skipped.push(is_skipped);
        }
        Ok(skipped)
    }

    #[test]
    fn steps_that_are_not_finite_end_the_run_when_there_are_too_many() {
        let nan = f64::NAN;
        let mut usual = divergence("");
        assert_eq!(outcome(&mut usual, &[1.0, nan, 1.0]).unwrap(), [false, true, false]);
        let error = outcome(&mut usual, &[nan; 20]).unwrap_err();
        assert!(error.contains("in step 20 ") && error.contains("the last of 20 such steps in a row"), "{error}");
        outcome(&mut divergence("max_skipped_steps: 3"), &[nan, nan, 1.0, nan, nan]).unwrap();
        outcome(&mut divergence("max_skipped_steps: 3"), &[nan, f64::INFINITY, nan]).unwrap_err();
        let error = outcome(&mut divergence("nonfinite: stop"), &[1.0, nan]).unwrap_err();
        assert!(error.starts_with("training diverged: in step 2 the loss is 1 and the gradient norm NaN"), "{error}");
    }

    /// What the loss scale is for is neither a warning nor counted, unless the loss itself is not finite.
    #[test]
    fn overflows_under_a_loss_scale_do_not_end_the_run() {
        let dynamic = |training: &str| Divergence { rescales: true, ..divergence(training) };
        let infinite = [f64::INFINITY; 30];
        assert_eq!(outcome(&mut dynamic("nonfinite: stop, max_skipped_steps: 2"), &infinite).unwrap(), [true; 30]);
        assert!(!divergence("").rescales);
        let of = |fp16: &str| {
            let text = format!("train_batch_size: 1\nfp16: {fp16}");
            Divergence::new(&Config::parse("ds.yaml", text).unwrap()).rescales
        };
        assert!(of("{enabled: true}") && !of("{enabled: false}") && !of("{enabled: true, loss_scale: 128}"));
        let mut diverges = dynamic("max_skipped_steps: 2");
        let step = |number: u64| Step {
            step: number,
            loss: f32::NAN,
            lr: 0.1,
            grad_norm: f64::NAN,
            loss_scale: Some(1024.0),
            skipped: true,
            duration: Duration::ZERO,
            sent_bytes: 0,
        };
        let progress = Progress::new(Output::Quiet, None, 1, 0, 2);
        diverges.judge(&step(1), &progress).unwrap();
        assert_eq!(diverges.judge(&step(2), &progress).unwrap_err().exit_status(), 5);
    }

    #[test]
    fn a_norm_far_above_the_median_is_a_spike() {
        let norms = [1.0, 2.0, 3.0, 21.0, 19.0, 2.0];
        let spikes = "spikes: {window: 3, factor: 10}";
        let mut skipping = divergence(spikes);
        assert_eq!(outcome(&mut skipping, &norms).unwrap(), [false, false, false, true, false, false]);
        // The state of a checkpoint goes on the same.
        let mut resumed = divergence(spikes);
        resumed.restore(&skipping.state());
        assert_eq!(resumed.norms, skipping.norms);
        let text = |action: &str| format!("spikes: {{window: 3, factor: 10, action: {action}}}");
        assert_eq!(outcome(&mut divergence(&text("warn")), &norms).unwrap(), [false; 6]);
        let error = outcome(&mut divergence(&text("stop")), &norms).unwrap_err();
        assert!(
            error.contains("in step 4 the gradient norm is 2.100e1, the median of those before it 2.000e0"),
            "{error}"
        );
        // A norm that stays high is the new median after half a window.
        let stays = [[1.0; 3], [50.0; 3]].concat();
        assert_eq!(outcome(&mut divergence(spikes), &stays).unwrap(), [false, false, false, true, true, false]);
    }
}
