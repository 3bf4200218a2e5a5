//! An exponential moving average of the weights.
//!
//! ```text
//! a ← a + (1 − d)(θ − a)
//! ```
//! The formula comes from `torch.optim.swa_utils.get_ema_multi_avg_fn`.

use zero_isa::Isa;

use crate::simd::{Kernel, LINE, run};
use crate::{LengthError, expect_length};

/// Settings of the average.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Average {
    /// d, the share of the average that a step keeps, in [0, 1).
    pub decay: f64,
    /// Number of steps before the average begins. Until then, the average equals the weights.
    pub start: u64,
}

impl Average {
    /// Name of the average among the states of an optimizer.
    pub const STATE: &str = "ema";

    /// Returns the share of the new weights in the average after optimizer step `step`, counted from 1. The first step
    /// of the average copies the weights.
    #[must_use]
    pub fn weight(&self, step: u64) -> f32 {
        if step <= self.start + 1 { 1.0 } else { (1.0 - self.decay) as f32 }
    }
}

/// Moves the average towards the weights by the share `weight`. A share of 1 copies them.
///
/// # Errors
/// Fails if the slices differ in length.
pub fn average(weight: f32, params: &[f32], averages: &mut [f32]) -> Result<(), LengthError> {
    expect_length(Average::STATE, params.len(), averages.len())?;
    if weight == 1.0 {
        averages.copy_from_slice(params);
    } else {
        run(Isa::current(), Lerp { weight, params, averages });
    }
    Ok(())
}

struct Lerp<'a> {
    weight: f32,
    params: &'a [f32],
    averages: &'a mut [f32],
}

impl Kernel for Lerp<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let (params, params_rest) = self.params.as_chunks::<LINE>();
        let (averages, averages_rest) = self.averages.as_chunks_mut::<LINE>();
        for (params, averages) in params.iter().zip(averages) {
            for k in 0..LINE {
                averages[k] = self.weight.mul_add(params[k] - averages[k], averages[k]);
            }
        }
        for (&param, average) in params_rest.iter().zip(averages_rest) {
            *average = self.weight.mul_add(param - *average, *average);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_average_begins_as_a_copy_and_is_exact_to_rounding() {
        let settings = Average { decay: 0.9, start: 2 };
        let weights =
            |step: u64| -> Vec<f32> { (0..37).map(|i| ((i * 31 + step * 17) % 23) as f32 / 7.0 - 1.5).collect() };
        let mut averages = vec![0.0; 37];
        let mut exact = vec![0.0; 37];
        for step in 1..=50 {
            average(settings.weight(step), &weights(step), &mut averages).unwrap();
            for (exact, weight) in exact.iter_mut().zip(weights(step)) {
                *exact = if step <= 3 { f64::from(weight) } else { 0.9 * *exact + 0.1 * f64::from(weight) };
            }
            if step <= 3 {
                assert_eq!(averages, weights(step));
            }
        }
        let apart = averages.iter().zip(&exact).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
        assert!(apart < 1e-6, "{apart}");
        assert!(average(0.5, &[1.0], &mut [0.0, 0.0]).is_err());
    }
}
