//! An optimizer that is not part of this crate.

use std::fmt::Debug;
use std::sync::Arc;

use crate::rules::rule::clipped;
use crate::stored::Stored;
use crate::{LengthError, Step};

/// An optimizer that the caller implements. It updates ranges of elements, or whole matrices.
///
/// The engine shards, offloads, saves and restores its states like the states of other optimizers, and counts their
/// bytes in memory plans. It scales and clips gradients before [`CustomOptimizer::update`] receives them.
///
/// ```
/// use zero_optim::{CustomOptimizer, CustomStep, Update};
///
/// /// Adamax (Kingma & Ba 2015, algorithm 2), as `torch.optim.Adamax`.
/// #[derive(Debug)]
/// struct Adamax {
///     betas: (f32, f32),
///     eps: f32,
/// }
///
/// impl CustomOptimizer for Adamax {
///     fn states(&self) -> &'static [&'static str] {
///         &["exp_avg", "exp_inf"]
///     }
///
///     fn update(&self, step: &CustomStep, Update { params, grads, states, .. }: Update<'_>) {
///         let [exp_avg, exp_inf] = states else { unreachable!("there are two states") };
///         let (beta1, beta2) = self.betas;
///         let rate = (step.lr / (1.0 - f64::from(beta1).powi(step.step as i32))) as f32;
///         for (i, (param, grad)) in params.iter_mut().zip(grads).enumerate() {
///             let grad = grad + step.weight_decay as f32 * *param;
///             exp_avg[i] += (1.0 - beta1) * (grad - exp_avg[i]);
///             exp_inf[i] = (beta2 * exp_inf[i]).max(grad.abs() + self.eps);
///             *param -= rate * exp_avg[i] / exp_inf[i];
///         }
///     }
/// }
/// ```
pub trait CustomOptimizer: Debug + Send + Sync {
    /// Names of the states. Each state starts as zeros. It has an f32 value for each element of a parameter, unless
    /// [`CustomOptimizer::matrix`] returns other sizes. Checkpoints use the names.
    fn states(&self) -> &'static [&'static str];

    /// Returns the states of the parameter `name` of shape `[rows, columns]` if it must be updated as a whole matrix,
    /// or `None` if its elements are independent of each other. One rank holds the whole matrix. Must return the same
    /// value on each call.
    fn matrix(&self, name: &str, shape: [usize; 2]) -> Option<MatrixStates> {
        let _ = (name, shape);
        None
    }

    /// Takes one step on a range of elements, or on a whole matrix.
    ///
    /// The update of an element may only depend on the element, its gradient and its states: ranges may be split
    /// anywhere, and are updated on several threads, in any order. One call updates a whole matrix.
    fn update(&self, step: &CustomStep, update: Update<'_>);
}

impl<T: CustomOptimizer + ?Sized> CustomOptimizer for Arc<T> {
    fn states(&self) -> &'static [&'static str] {
        (**self).states()
    }

    fn matrix(&self, name: &str, shape: [usize; 2]) -> Option<MatrixStates> {
        (**self).matrix(name, shape)
    }

    fn update(&self, step: &CustomStep, update: Update<'_>) {
        (**self).update(step, update);
    }
}

/// The states of a matrix that the optimizer updates as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MatrixStates {
    /// The number of values of each state. A matrix may use only the first few of the optimizer's states.
    pub values: Vec<usize>,
    /// Peak bytes of the buffers that one update allocates, for memory plans.
    pub buffer_bytes: usize,
    /// Multiply-adds of an update, which the engine uses to balance matrices over the ranks.
    pub multiply_adds: u128,
}

/// The inputs of an update that all its elements share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CustomStep {
    /// Number of this optimizer step, counted from 1.
    pub step: u64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Weight decay; 0 for a parameter without weight decay, such as a bias.
    pub weight_decay: f64,
}

/// The values that one call of [`CustomOptimizer::update`] reads and writes.
#[derive(Debug)]
pub struct Update<'a> {
    /// The parameters.
    pub params: &'a mut [f32],
    /// Their gradients, clipped and scaled.
    pub grads: &'a [f32],
    /// The states, in the order of [`CustomOptimizer::states`].
    pub states: &'a mut [&'a mut [f32]],
    /// `[rows, columns]` of a matrix that is updated as a whole, in row-major order.
    pub matrix: Option<[usize; 2]>,
}

/// A [`CustomOptimizer`] with the weight decay of the configuration.
#[derive(Debug, Clone)]
pub struct Custom {
    /// The optimizer.
    pub rule: Arc<dyn CustomOptimizer>,
    /// Weight decay, for the parameters to which it applies.
    pub weight_decay: f64,
}

impl PartialEq for Custom {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.rule, &other.rule) && self.weight_decay == other.weight_decay
    }
}

/// Number of elements that are copied to f32 at a time. They stay in the L1 cache.
const CHUNK: usize = 1024;

impl Custom {
    fn step(&self, step: &Step) -> CustomStep {
        let weight_decay = if step.decay { self.weight_decay } else { 0.0 };
        CustomStep { step: step.step, lr: step.lr, weight_decay }
    }

    /// Updates a range of elements. The slices have the same length.
    pub(crate) fn advance<P: Stored, S: Stored>(
        &self,
        step: &Step,
        params: &mut [P],
        grads: &[f32],
        states: &mut [&mut [S]],
    ) {
        let custom = self.step(step);
        let (mut wide, mut scaled) = ([0.0; CHUNK], [0.0; CHUNK]);
        let mut wide_states = vec![[0.0; CHUNK]; states.len()];
        for (chunk, (params, grads)) in params.chunks_mut(CHUNK).zip(grads.chunks(CHUNK)).enumerate() {
            let (length, start) = (grads.len(), chunk * CHUNK);
            let load = |from: &[P], to: &mut [f32]| from.iter().zip(to).for_each(|(from, to)| *to = from.load());
            load(params, &mut wide);
            scale(step, grads, &mut scaled);
            for (state, wide) in states.iter().zip(&mut wide_states) {
                state[start..start + length].iter().zip(wide).for_each(|(from, to)| *to = from.load());
            }
            let mut slices: Vec<&mut [f32]> = wide_states.iter_mut().map(|wide| &mut wide[..length]).collect();
            let (params_in_f32, grads) = (&mut wide[..length], &scaled[..length]);
            let update = Update { params: params_in_f32, grads, states: &mut slices, matrix: None };
            self.rule.update(&custom, update);
            params.iter_mut().zip(&wide).for_each(|(to, &from)| *to = P::rounded(from));
            for (state, wide) in states.iter_mut().zip(&wide_states) {
                state[start..start + length].iter_mut().zip(wide).for_each(|(to, &from)| *to = S::rounded(from));
            }
        }
    }

    /// Updates a whole matrix of `[rows, columns]`.
    ///
    /// # Errors
    /// Fails if the number of gradients differs from the number of parameters.
    pub fn advance_matrix(
        &self,
        step: &Step,
        shape: [usize; 2],
        params: &mut [f32],
        grads: &[f32],
        states: &mut [&mut [f32]],
    ) -> Result<(), LengthError> {
        crate::expect_length("grads", params.len(), grads.len())?;
        let mut scaled = vec![0.0; grads.len()];
        scale(step, grads, &mut scaled);
        let states: &mut [&mut [f32]] = &mut states.iter_mut().map(|state| &mut **state).collect::<Vec<_>>();
        self.rule.update(&self.step(step), Update { params, grads: &scaled, states, matrix: Some(shape) });
        Ok(())
    }
}

/// Clips and scales gradients.
fn scale(step: &Step, grads: &[f32], scaled: &mut [f32]) {
    for (scaled, &grad) in scaled.iter_mut().zip(grads) {
        *scaled = clipped(grad, step.grad_limit) * step.grad_scale;
    }
}
