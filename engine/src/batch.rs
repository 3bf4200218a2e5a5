//! Batches of samples, and the assignment of micro-batches to ranks.

use candle_core::Tensor;
use zero_model::Activations;

use crate::error::Error;

/// Samples: inputs of the first layer and targets of the loss. Dimension 0 of every tensor is the sample.
#[derive(Debug, Clone)]
pub struct Batch {
    /// Inputs of the first layer.
    pub inputs: Activations,
    /// Targets of the loss.
    pub targets: Tensor,
}

impl Batch {
    /// Creates a batch.
    #[must_use]
    pub fn new(inputs: impl Into<Activations>, targets: Tensor) -> Self {
        Self { inputs: inputs.into(), targets }
    }

    /// Returns the number of samples.
    ///
    /// # Errors
    /// Fails if a tensor has no dimensions or the tensors differ in their number of samples.
    pub fn rows(&self) -> Result<usize, Error> {
        let rows = self.targets.dim(0)?;
        for tensor in self.inputs.tensors() {
            if tensor.dim(0)? != rows {
                return Err(Error::Batch(format!("{} inputs for {rows} targets", tensor.dim(0)?)));
            }
        }
        Ok(rows)
    }

    /// Returns samples `start..start + count`.
    ///
    /// # Errors
    /// Fails if the batch has fewer samples.
    pub fn narrow(&self, start: usize, count: usize) -> Result<Self, Error> {
        let part = |tensor: &Tensor| tensor.narrow(0, start, count)?.contiguous();
        let inputs = self.inputs.tensors().iter().map(part).collect::<candle_core::Result<Vec<_>>>()?;
        Ok(Self { inputs: Activations::new(inputs), targets: part(&self.targets)? })
    }
}

/// How the micro-batches of the global batch are assigned to the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MicrobatchOrder {
    /// Micro-batch `m` of rank `r` has the global index `m · ranks + r`.
    InTurn,
    /// Micro-batch `m` of rank `r` has the global index `r · micro_batches + m`: each rank has consecutive
    /// micro-batches, which it sums before the reduction.
    Contiguous,
}

impl MicrobatchOrder {
    /// Returns the global index of a rank's micro-batch.
    pub(crate) fn global(self, rank: usize, ranks: usize, micro_batch: usize, micro_batches: usize) -> usize {
        match self {
            Self::InTurn => micro_batch * ranks + rank,
            Self::Contiguous => rank * micro_batches + micro_batch,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_micro_batch_is_assigned_once() {
        for deal in [MicrobatchOrder::InTurn, MicrobatchOrder::Contiguous] {
            for (ranks, micro_batches) in [(1, 8), (2, 4), (3, 3), (8, 1)] {
                let mut seen: Vec<usize> = (0..ranks)
                    .flat_map(|r| (0..micro_batches).map(move |m| deal.global(r, ranks, m, micro_batches)))
                    .collect();
                seen.sort_unstable();
                assert_eq!(seen, (0..ranks * micro_batches).collect::<Vec<_>>());
            }
        }
    }
}
