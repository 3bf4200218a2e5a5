//! Linear layers whose inputs are split among the ranks of a tensor group.

use super::{cutting, exchanges};
use crate::linear::Projection;
use crate::sequence::SequenceGroup;
use candle_core::{Result, Tensor, bail};
use candle_nn::Module;

/// A linear layer whose inputs are split among the ranks of a tensor group. Each rank computes the sums over its
/// inputs, and the ranks add up their results. [`Linear::row_parallel`](crate::Linear) and
/// [`Conv1D::row_parallel`](crate::Conv1D) create it.
#[derive(Clone, Debug)]
pub struct RowParallel<L> {
    map: L,
    /// The bias, if the map is split; it is added after the sum over the ranks.
    bias: Option<Tensor>,
    is_cut: bool,
}

impl<L> RowParallel<L> {
    pub(crate) fn new(map: Projection, wrap: fn(Projection) -> L) -> Self {
        match cutting() {
            None => Self { map: wrap(map), bias: None, is_cut: false },
            Some(_) => {
                let (map, bias) = map.without_bias();
                Self { map: wrap(map), bias, is_cut: true }
            }
        }
    }

    /// Returns this rank's map. Pass its outputs to [`RowParallel::sum`].
    pub fn map(&self) -> &L {
        &self.map
    }

    /// Sums `[batch, time, outputs]` over the ranks, adds the bias and returns this rank's slice. Returns `y` itself if
    /// the map is not split.
    ///
    /// # Errors
    /// Fails outside of [`whole_sequences`](crate::whole_sequences) and [`whole_rows`](crate::whole_rows), and if a rank
    /// is lost.
    pub fn sum(&self, y: &Tensor) -> Result<Tensor> {
        if !self.is_cut {
            return Ok(y.clone());
        }
        let Some((group, along)) = SequenceGroup::of_gathered() else {
            bail!("a linear layer with split inputs must run inside `whole_sequences` or `whole_rows`");
        };
        exchanges::sum(y, self.bias.as_ref(), &group, along)
    }
}

impl<L: Module> Module for RowParallel<L> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.sum(&self.map.forward(x)?)
    }
}
