//! The head of a language model.

use crate::activations::Activations;
use crate::layer::{Head, Layer};
use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;
use zero_ops::Pass;
use zero_ops::graph::fused_block;
use zero_ops::{VocabParallel, count_targets};

/// Computes the logits x·Wᵀ, or the loss by
/// [`linear_cross_entropy`](zero_ops::linear_cross_entropy) without storing all logits. With i64 targets the
/// loss of a global batch is the mean over its targets that are not [`IGNORE_INDEX`](zero_ops::IGNORE_INDEX).
#[derive(Clone, Debug)]
pub struct LanguageHead {
    head: VocabParallel,
}

impl LanguageHead {
    /// Creates a head. The parameter `weight` has shape `[vocabulary, width]` and is initialized from a normal
    /// distribution with standard deviation `std`.
    ///
    /// # Errors
    /// Returns errors of the builder.
    pub fn new(width: usize, vocabulary: usize, std: f64, vb: VarBuilder) -> Result<Self> {
        Ok(Self { head: VocabParallel::new(width, vocabulary, std, &vb)? })
    }
}

impl Layer for LanguageHead {
    fn run(&self, x: &Activations, _: &Pass) -> Result<Activations> {
        Ok(self.head.logits(x.single()?)?.into())
    }
}

impl Head for LanguageHead {
    fn loss(&self, x: &Activations, targets: &Tensor, pass: &Pass, gradient: f32) -> Result<Tensor> {
        let x = x.single()?;
        match pass.training {
            true => fused_block(x, |x| Ok(self.head.cross_entropy(x, targets, (gradient, 0.0))?.0)),
            false => Ok(self.head.detached().cross_entropy(&x.detach(), targets, (gradient, 0.0))?.0),
        }
    }

    fn has_z_loss(&self) -> bool {
        true
    }

    fn loss_with_z_loss(
        &self,
        x: &Activations,
        targets: &Tensor,
        _: &Pass,
        gradient: f32,
        z_loss: f32,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let mut part = None;
        let loss = fused_block(x.single()?, |x| {
            let (loss, z) = self.head.cross_entropy(x, targets, (gradient, z_loss))?;
            part = z;
            Ok(loss)
        })?;
        Ok((loss, part))
    }

    fn weight(&self, targets: &Tensor) -> Result<Option<u64>> {
        targets_that_count(targets)
    }

    fn is_by_position(&self) -> bool {
        true
    }
}

/// Returns the number of i64 targets that are not ignored. `None` for other dtypes, where no target can be ignored.
pub(super) fn targets_that_count(targets: &Tensor) -> Result<Option<u64>> {
    (targets.dtype() == DType::I64).then(|| count_targets(targets)).transpose()
}
