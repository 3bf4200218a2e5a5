//! The gradient noise scale: how many samples a step needs before the noise of its gradient is as small as its signal
//! (McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, appendix A.1).

/// Unbiased estimates from the gradients of one step. Both are noisy, so average each over several steps before you
/// divide one by the other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GradientNoise {
    /// |G|², the squared norm of the gradient of the expected loss. A single estimate may be negative.
    pub signal: f64,
    /// tr Σ, the variance of the gradient of one sample, summed over all parameters.
    pub noise: f64,
}

impl GradientNoise {
    /// Estimates signal and noise from `squared_small`, the mean squared norm of gradients of `small` samples each, and
    /// `squared_big`, the squared norm of the mean gradient of all `big` samples.
    #[must_use]
    pub fn estimate((small, squared_small): (f64, f64), (big, squared_big): (f64, f64)) -> Self {
        Self {
            signal: (big * squared_big - small * squared_small) / (big - small),
            noise: (squared_small - squared_big) / (1.0 / small - 1.0 / big),
        }
    }
}
