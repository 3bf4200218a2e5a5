//! The parts of a model: layers, and a last layer that computes the loss.

use candle_core::{Result, Tensor};
use candle_nn::Module;
use zero_ops::Pass;

use crate::activations::Activations;

/// Maps activations to activations. Every `candle_nn::Module` is a layer.
pub trait Layer: Send + Sync {
    /// Runs the layer. The name differs from `forward` so that both traits can be in scope.
    ///
    /// # Errors
    /// Fails if shapes or dtypes do not match.
    fn run(&self, x: &Activations, pass: &Pass) -> Result<Activations>;

    /// Returns whether most of the work for the layer's weight gradients can be deferred, as the operations of
    /// `zero-ops` do. A zero-bubble pipeline then splits the layer's backward pass. The backward pass of a plain candle
    /// module runs as a whole.
    fn splits(&self) -> bool {
        false
    }

    /// Returns whether the layer contains attention or [`sum_of_slices`](zero_ops::sum_of_slices) from `zero-ops`,
    /// which exchange values with other ranks if ranks share sequences. If this returns false, the layer fails when it
    /// tries to exchange values. Exchanges in a tensor group need no declaration if some of the layer's parameters are
    /// split across the group.
    fn exchanges(&self) -> bool {
        false
    }
}

impl<M: Module + Send + Sync> Layer for M {
    fn run(&self, x: &Activations, _: &Pass) -> Result<Activations> {
        Module::forward(self, x.single()?).map(Activations::from)
    }
}

/// A last layer that computes the loss without holding all of its outputs, such as a language model's head
/// ([`linear_cross_entropy`](zero_ops::linear_cross_entropy)). Its `run` returns the outputs.
pub trait Head: Layer {
    /// Computes the mean loss over the micro-batch. `gradient` is the gradient that the loss will receive in the
    /// backward. Gradients are needed only if `pass` is training.
    ///
    /// # Errors
    /// Fails if shapes or dtypes do not match.
    fn loss(&self, x: &Activations, targets: &Tensor, pass: &Pass, gradient: f32) -> Result<Tensor>;

    /// Returns whether [`Head::loss_with_z_loss`] is implemented.
    fn has_z_loss(&self) -> bool {
        false
    }

    /// Computes the loss plus `z_loss` times the mean of ln²Z over the targets of the loss, where Z is the normalizer
    /// of the softmax. Also returns the part that `z_loss` adds, which needs no gradient, or `None` in a dry run that
    /// measures memory. Called in training only.
    ///
    /// # Errors
    /// As [`Head::loss`]; also fails if the head has no z-loss.
    fn loss_with_z_loss(
        &self,
        x: &Activations,
        targets: &Tensor,
        pass: &Pass,
        gradient: f32,
        z_loss: f32,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let _ = (x, targets, pass, gradient, z_loss);
        candle_core::bail!("the head has no z-loss")
    }

    /// Returns the weight of a micro-batch's loss in the mean over the global batch, such as its number of targets.
    /// `None`, the default, means that all micro-batches weigh the same. Either all micro-batches have a weight, or
    /// none has one.
    ///
    /// # Errors
    /// Fails if the targets cannot be read.
    fn weight(&self, targets: &Tensor) -> Result<Option<u64>> {
        let _ = targets;
        Ok(None)
    }

    /// Returns whether each position of the outputs, `[batch, time, …]`, depends only on the same position of the
    /// input. Decoding then computes only the outputs at the last positions.
    fn is_by_position(&self) -> bool {
        false
    }
}
