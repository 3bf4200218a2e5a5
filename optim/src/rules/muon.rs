//! Muon (Jordan et al., 2024): orthogonalizes the momentum of matrices. Another optimizer updates all other parameters.
//!
//! ```text
//! m ← m + (1−μ)(g − m)        u ← m, or g + μ(m − g) with Nesterov's look-ahead
//! θ ← θ(1 − lr·λ) − lr·√max(1, rows/columns) · orthogonalized(u)
//! ```
//! The formulas and their order come from `torch.optim.Muon`; DeepSpeed uses the same. This file has the elementwise
//! parts of the step. Between the two parts, the caller orthogonalizes the matrix, which it holds as a whole.

use crate::rules::rule::clipped;
use crate::{LengthError, Step, expect_length};

/// Hyperparameters of Muon; the defaults are DeepSpeed's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Muon {
    /// μ, the decay rate of the momentum, in [0, 1).
    pub momentum: f64,
    /// Whether the update looks ahead along the momentum.
    pub nesterov: bool,
    /// λ, the weight decay of matrices.
    pub weight_decay: f64,
    /// Number of Newton–Schulz iterations.
    pub ns_steps: usize,
}

impl Default for Muon {
    fn default() -> Self {
        Self { momentum: 0.95, nesterov: true, weight_decay: 0.0, ns_steps: 5 }
    }
}

impl Muon {
    /// Adds the gradients of a matrix to its momentum `exp_avg`, and returns the matrix to orthogonalize.
    ///
    /// # Errors
    /// Fails if the slices differ in length.
    pub fn direction(&self, step: &Step, grads: &[f32], exp_avg: &mut [f32]) -> Result<Vec<f32>, LengthError> {
        expect_length("exp_avg", grads.len(), exp_avg.len())?;
        let (scale, new) = (step.grad_scale, (1.0 - self.momentum) as f32);
        let mut direction = vec![0.0; grads.len()];
        for ((direction, &grad), m) in direction.iter_mut().zip(grads).zip(exp_avg) {
            let grad = clipped(grad, step.grad_limit) * scale;
            *m += new * (grad - *m);
            *direction = if self.nesterov { *m - new * (*m - grad) } else { *m };
        }
        Ok(direction)
    }

    /// Updates a matrix of `rows` × `columns` along the orthogonalized `direction`.
    ///
    /// # Errors
    /// Fails if the slices differ in length.
    pub fn apply(
        &self,
        step: &Step,
        [rows, columns]: [usize; 2],
        params: &mut [f32],
        direction: &[f32],
    ) -> Result<(), LengthError> {
        expect_length("direction", params.len(), direction.len())?;
        let decay = if step.decay { self.weight_decay } else { 0.0 };
        let kept = (1.0 - step.lr * decay) as f32;
        let rate = (step.lr * (rows as f64 / columns as f64).max(1.0).sqrt()) as f32;
        for (param, direction) in params.iter_mut().zip(direction) {
            *param = *param * kept - rate * direction;
        }
        Ok(())
    }
}
