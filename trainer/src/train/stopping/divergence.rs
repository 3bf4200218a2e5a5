//! Detects diverging training: gradients that are not finite, and gradient norms far above the norms of earlier steps.

use std::collections::VecDeque;

use serde_json::{Value, json};
use zero_config::{Config, Nonfinite, OnSpike, Spikes};

use crate::train::output::progress::Progress;
use zero_engine::Error;
use zero_engine::{Engine, Step};

/// The options in `training` for diverging steps, and the history that they need.
pub(crate) struct Divergence {
    nonfinite: Nonfinite,
    max_skipped: u64,
    spikes: Option<Spikes>,
    /// Whether `fp16` scales the loss dynamically. Overflows are then expected and only lower the loss scale.
    rescales: bool,
    /// Finite norms of the latest steps, including spikes. A norm that stays high for half a window therefore no longer
    /// counts as a spike.
    norms: VecDeque<f64>,
    skipped_in_a_row: u64,
}

impl Divergence {
    pub(crate) fn new(config: &Config) -> Self {
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

    /// Returns the norm above which the next step is a spike. Returns infinity if there is no limit.
    fn limit(&self) -> f64 {
        match &self.spikes {
            Some(spikes) if self.norms.len() >= spikes.window => spikes.factor * self.median(),
            _ => f64::INFINITY,
        }
    }

    /// Returns the median. For an even number of norms, returns the smaller of the two middle norms.
    fn median(&self) -> f64 {
        let mut sorted: Vec<f64> = self.norms.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len().saturating_sub(1) / 2).copied().unwrap_or(f64::INFINITY)
    }

    /// Prepares a step: sets the norm above which the engine skips the update.
    pub(crate) fn prepare(&self, engine: &mut Engine) {
        let skips = self.spikes.as_ref().is_some_and(|spikes| spikes.action != OnSpike::Warn);
        engine.skip_beyond(if skips { self.limit() } else { f64::INFINITY });
    }

    /// Judges a step after it has run: reports divergence, and returns an error if the run must end. All ranks return
    /// the same result.
    pub(crate) fn judge(&mut self, step: &Step, progress: &Progress) -> Result<(), Error> {
        let Step { step: number, loss, grad_norm: norm, skipped, .. } = *step;
        if self.rescales && skipped && loss.is_finite() && !norm.is_finite() {
            return Ok(());
        }
        let limit = self.limit();
        let is_finite = norm.is_finite() && loss.is_finite();
        let done = if skipped { ", so the update was skipped" } else { "" };
        let reason = if !is_finite {
            Some(format!("step {number}: loss {loss}, gradient norm {norm}"))
        } else if norm > limit {
            Some(format!(
                "step {number}: gradient norm {norm:.3e} is too far above the median of the previous steps, {:.3e}",
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
            return Err(Error::Diverged { reason: format!("{reason}; the run is configured to stop in this case") });
        }
        if self.skipped_in_a_row >= self.max_skipped {
            let reason = format!("{reason}; {} consecutive steps were skipped or not finite", self.skipped_in_a_row);
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

    /// Returns the state for a checkpoint.
    pub(crate) fn state(&self) -> Value {
        json!({ "norms": self.norms, "skipped_in_a_row": self.skipped_in_a_row })
    }

    /// Restores the state from a checkpoint.
    pub(crate) fn restore(&mut self, state: &Value) {
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

    /// Judges steps with these norms. Returns for each step whether the engine would skip its update.
    fn outcome(divergence: &mut Divergence, norms: &[f64]) -> Result<Vec<bool>, String> {
        let progress = Progress::new(Output::Quiet, 1, 0, norms.len() as u64);
        let mut skipped = vec![];
        for (index, &norm) in norms.iter().enumerate() {
            let skips = divergence.spikes.as_ref().is_some_and(|spikes| spikes.action != OnSpike::Warn);
            let is_skipped = !norm.is_finite() || skips && norm > divergence.limit();
            let step = Step {
                samples: 1,
                step: index as u64 + 1,
                loss: 1.0,
                z_loss: None,
                noise: None,
                lr: 0.1,
                grad_norm: norm,
                loss_scale: None,
                skipped: is_skipped,
                averaged: false,
                duration: Duration::ZERO,
                sent_bytes: 0,
            };
            divergence.judge(&step, &progress).map_err(|e| e.to_string())?;
            skipped.push(is_skipped);
        }
        Ok(skipped)
    }

    #[test]
    fn too_many_nonfinite_steps_in_a_row_end_the_run() {
        let nan = f64::NAN;
        let mut usual = divergence("");
        assert_eq!(outcome(&mut usual, &[1.0, nan, 1.0]).unwrap(), [false, true, false]);
        let error = outcome(&mut usual, &[nan; 20]).unwrap_err();
        assert!(
            error.contains("step 20: ") && error.contains("20 consecutive steps were skipped or not finite"),
            "{error}"
        );
        outcome(&mut divergence("max_skipped_steps: 3"), &[nan, nan, 1.0, nan, nan]).unwrap();
        outcome(&mut divergence("max_skipped_steps: 3"), &[nan, f64::INFINITY, nan]).unwrap_err();
        let error = outcome(&mut divergence("nonfinite: stop"), &[1.0, nan]).unwrap_err();
        assert!(error.starts_with("training diverged: step 2: loss 1, gradient norm NaN"), "{error}");
    }

    /// Overflows that lower the loss scale cause no warning and are not counted, unless the loss itself is not finite.
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
            samples: 1,
            step: number,
            loss: f32::NAN,
            z_loss: None,
            noise: None,
            lr: 0.1,
            grad_norm: f64::NAN,
            loss_scale: Some(1024.0),
            skipped: true,
            averaged: false,
            duration: Duration::ZERO,
            sent_bytes: 0,
        };
        let progress = Progress::new(Output::Quiet, 1, 0, 2);
        diverges.judge(&step(1), &progress).unwrap();
        assert_eq!(diverges.judge(&step(2), &progress).unwrap_err().exit_status(), 5);
    }

    #[test]
    fn a_norm_far_above_the_median_is_a_spike() {
        let norms = [1.0, 2.0, 3.0, 21.0, 19.0, 2.0];
        let spikes = "spikes: {window: 3, factor: 10}";
        let mut skipping = divergence(spikes);
        assert_eq!(outcome(&mut skipping, &norms).unwrap(), [false, false, false, true, false, false]);
        // Training that is resumed from a checkpoint behaves the same.
        let mut resumed = divergence(spikes);
        resumed.restore(&skipping.state());
        assert_eq!(resumed.norms, skipping.norms);
        let text = |action: &str| format!("spikes: {{window: 3, factor: 10, action: {action}}}");
        assert_eq!(outcome(&mut divergence(&text("warn")), &norms).unwrap(), [false; 6]);
        let error = outcome(&mut divergence(&text("stop")), &norms).unwrap_err();
        assert!(
            error.contains("step 4: gradient norm 2.100e1 is too far above the median of the previous steps, 2.000e0"),
            "{error}"
        );
        // A norm that stays high becomes the median after half a window.
        let stays = [[1.0; 3], [50.0; 3]].concat();
        assert_eq!(outcome(&mut divergence(spikes), &stays).unwrap(), [false, false, false, true, true, false]);
    }
}
