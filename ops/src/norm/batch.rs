//! Batch norm, and its running statistics.

use candle_core::{DType, Result, Tensor, Var, bail};
use candle_nn::{Init, Module, VarBuilder};

use crate::pass::Pass;

/// Batch norm: normalizes each channel (the second dimension) over all other dimensions, like PyTorch's `BatchNorm1d`,
/// `BatchNorm2d` and `BatchNorm3d`. Parameters and statistics have the names of PyTorch's `state_dict`.
///
/// In a training pass, y = (x − mean)/√(variance + ε)·weight + bias with the mean and the biased variance of each
/// channel of the micro-batch. The pass also updates `running_mean` and `running_var`:
/// running ← (1 − momentum)·running + momentum·batch, with the unbiased variance of the micro-batch. In every other
/// pass, the running statistics replace the statistics of the micro-batch. Statistics are f32 for every dtype of x.
///
/// The engine gives each micro-batch of a step the same running statistics, and averages the updated statistics over
/// all micro-batches of the global batch.
#[derive(Clone, Debug)]
pub struct BatchNorm {
    weight: Tensor,
    bias: Tensor,
    running_mean: Var,
    running_var: Var,
    eps: f64,
    momentum: f64,
}

impl BatchNorm {
    /// Creates the norm with a weight of ones, a bias of zeros, running means of zeros, and running variances of ones.
    ///
    /// # Errors
    /// Fails if `momentum` is not in [0, 1] or `eps` is negative.
    pub fn new(channels: usize, eps: f64, momentum: f64, vb: VarBuilder) -> Result<Self> {
        if !(0.0..=1.0).contains(&momentum) || eps.is_nan() || eps < 0.0 {
            bail!("batch norm: expected eps ≥ 0 and a momentum in [0, 1], got {eps} and {momentum}");
        }
        let statistic =
            |name, value| Var::from_tensor(&vb.get_with_hints_dtype(channels, name, Init::Const(value), DType::F32)?);
        Ok(Self {
            weight: vb.get_with_hints(channels, "weight", Init::Const(1.0))?,
            bias: vb.get_with_hints(channels, "bias", Init::Const(0.0))?,
            running_mean: statistic("running_mean", 0.0)?,
            running_var: statistic("running_var", 1.0)?,
            eps,
            momentum,
        })
    }

    /// Returns the mean and the biased variance of each row, and updates the running statistics.
    fn batch_statistics(&self, rows: &Tensor) -> Result<(Tensor, Tensor)> {
        let count = rows.dim(1)?;
        if count < 2 {
            bail!("batch norm: a training pass needs more than one value per channel");
        }
        let mean = rows.mean_keepdim(1)?;
        let variance = rows.broadcast_sub(&mean)?.sqr()?.mean_keepdim(1)?;
        let unbiased = count as f64 / (count as f64 - 1.0);
        for (running, batch, factor) in [(&self.running_mean, &mean, 1.0), (&self.running_var, &variance, unbiased)] {
            let kept = (running.as_detached_tensor() * (1.0 - self.momentum))?;
            running.set(&(kept + (batch.detach().flatten_all()? * (self.momentum * factor))?)?)?;
        }
        Ok((mean, variance))
    }
}

impl Module for BatchNorm {
    /// Maps `[batch, channels, …]` to the same shape and dtype.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let channels = self.weight.dim(0)?;
        if x.rank() < 2 || x.dim(1)? != channels {
            bail!("batch norm: expected [batch, {channels}, …], got {:?}", x.shape());
        }
        let transposed = x.to_dtype(DType::F32)?.transpose(0, 1)?;
        let rows = transposed.flatten_from(1)?.contiguous()?;
        let (mean, variance) = match Pass::current() {
            Some(Pass { training: true, .. }) => self.batch_statistics(&rows)?,
            _ => {
                let column = |running: &Var| running.as_detached_tensor().reshape((channels, 1));
                (column(&self.running_mean)?, column(&self.running_var)?)
            }
        };
        let normalized = rows.broadcast_sub(&mean)?.broadcast_div(&(variance + self.eps)?.sqrt()?)?;
        let column = |parameter: &Tensor| parameter.to_dtype(DType::F32)?.reshape((channels, 1));
        let y = normalized.broadcast_mul(&column(&self.weight)?)?.broadcast_add(&column(&self.bias)?)?;
        y.reshape(transposed.shape())?.transpose(0, 1)?.contiguous()?.to_dtype(x.dtype())
    }
}
