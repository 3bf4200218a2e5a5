//! Outputs whose values a fused block frees at the end of its forward, and makes again in its backward.

use crate::graph::fused_block::{Operation, Record};
use crate::graph::storage::{swap, take};
use crate::meta;
use crate::meta::footprint::Footprint;
use crate::sink;
use candle_core::{CustomOp1, Result, Storage, Tensor, TensorId};
use std::collections::HashMap;
use std::sync::Arc;

/// An operation that can run again.
pub(crate) trait Remake: CustomOp1 + Send + Sync {
    /// Makes the values of `output` again, which the operation made from `x`.
    fn remake(&self, x: &Tensor, output: &Tensor) -> Result<()>;
}

impl<C: CustomOp1 + Footprint + Send + Sync> Remake for C {
    fn remake(&self, x: &Tensor, output: &Tensor) -> Result<()> {
        swap(output, Storage::Cpu(self.make(x)?)).map(drop)
    }
}

/// The outputs of a tape that are to be made again before they are read.
#[derive(Default)]
pub(super) struct Remakes {
    of: HashMap<TensorId, (Arc<dyn Remake>, Tensor, Tensor)>,
    /// The outputs of which others are views.
    views: HashMap<TensorId, TensorId>,
}

impl Remakes {
    pub(super) fn of(records: &[Record]) -> Self {
        let mut all = Self::default();
        for Record { operation, output, .. } in records {
            match operation {
                Operation::Remade(op, x) => {
                    all.of.insert(output.id(), (Arc::clone(op), x.clone(), output.clone()));
                }
                Operation::View(x) => {
                    let source = all.views.get(&x.id()).copied().unwrap_or(x.id());
                    all.views.insert(output.id(), source);
                }
                _ => {}
            }
        }
        all
    }

    /// Makes the values of those of `inputs` again that need it.
    pub(super) fn make(&mut self, inputs: &[Tensor]) -> Result<()> {
        for input in inputs {
            let source = self.views.get(&input.id()).copied().unwrap_or(input.id());
            if let Some((op, x, output)) = self.of.remove(&source) {
                op.remake(&x, &output)?;
            }
        }
        Ok(())
    }
}

/// Frees the values of an output that was made again, before the backward of its operation, unless the gradients of parameters are
/// deferred, which may still read them.
pub(super) fn free(output: &Tensor) -> Result<()> {
    if sink::is_deferring() || meta::is_deferring() {
        return Ok(());
    }
    meta::let_go(output);
    take(output).map(drop)
}
