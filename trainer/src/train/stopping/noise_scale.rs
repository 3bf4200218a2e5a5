//! `training.gradient_noise_scale`: averages the estimates over the steps.

use serde_json::{Value, json};

use zero_engine::GradientNoise;

/// Averages of signal and noise. Recent steps have more weight.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct NoiseScale {
    smoothing: f64,
    signal: f64,
    noise: f64,
    /// Sum of the weights of all steps so far. It begins at 0 and grows to 1.
    weight: f64,
}

impl NoiseScale {
    /// Creates an average without estimates. `smoothing` is the share of the average that remains after each step.
    pub(crate) fn new(smoothing: f64) -> Self {
        Self { smoothing, ..Self::default() }
    }

    /// Adds the estimates of a step.
    pub(crate) fn add(&mut self, of_step: GradientNoise) {
        let new = 1.0 - self.smoothing;
        self.signal += new * (of_step.signal - self.signal);
        self.noise += new * (of_step.noise - self.noise);
        self.weight += new * (1.0 - self.weight);
    }

    /// Returns tr Σ / |G|² in samples. Returns `None` before the first estimate, and while an estimate is not positive
    /// because of noise.
    pub(crate) fn samples(&self) -> Option<f64> {
        (self.weight > 0.0 && self.signal > 0.0 && self.noise > 0.0).then(|| self.noise / self.signal)
    }

    /// Returns the state for a checkpoint.
    pub(crate) fn state(&self) -> Value {
        json!({ "signal": self.signal, "noise": self.noise, "weight": self.weight })
    }

    /// Restores the state from a checkpoint.
    pub(crate) fn restore(&mut self, state: &Value) {
        let of = |key: &str| state[key].as_f64().unwrap_or(0.0);
        (self.signal, self.noise, self.weight) = (of("signal"), of("noise"), of("weight"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages_are_weighted_and_survive_a_checkpoint() {
        let mut scale = NoiseScale::new(0.5);
        assert_eq!(scale.samples(), None);
        scale.add(GradientNoise { signal: 2.0, noise: 6.0 });
        assert_eq!(scale.samples(), Some(3.0));
        scale.add(GradientNoise { signal: -4.0, noise: 6.0 });
        // The newer step has twice the weight of the older step.
        assert_eq!(scale.samples(), None);
        scale.add(GradientNoise { signal: 4.0, noise: 6.0 });
        let mut restored = NoiseScale::new(0.5);
        restored.restore(&scale.state());
        assert_eq!(restored.samples(), scale.samples());
        assert_eq!(
            scale.samples(),
            Some((0.125 * 6.0 + 0.25 * 6.0 + 0.5 * 6.0) / (0.125 * 2.0 - 0.25 * 4.0 + 0.5 * 4.0))
        );
    }
}
