//! Outputs whose values a fused block frees at the end of its forward and restores in its backward, by computing them
//! or by receiving them from other ranks.
//!
//! Exchanges with other ranks overlap with compute. While an exchange brings back the values, the backward computes the
//! gradient of a linear layer's input, which does not need them. The gradients of the weights do need them. They are
//! computed during the following exchange, which carries the gradient of the values.

use crate::graph::fused_block::{Operation, Record};
use crate::graph::op::Taped;
use crate::graph::storage::take;
use crate::meta;
use crate::meta::footprint::Finish;
use crate::sink;
use crate::sink::deferred::Compute;
use candle_core::{Result, Tensor, TensorId};
use std::collections::HashMap;
use std::sync::Arc;

/// The outputs of a tape that must be restored before they are read.
#[derive(Default)]
pub(super) struct Remakes {
    of: HashMap<TensorId, (Arc<dyn Taped>, Tensor, Tensor)>,
    /// Maps each view to the output whose values it shares.
    views: HashMap<TensorId, TensorId>,
    /// For each output, the work that waits for an exchange.
    waiting: HashMap<TensorId, Waiting>,
}

#[derive(Default)]
struct Waiting {
    /// Waits for the exchange that restores the output.
    finish: Option<Finish>,
    /// Computes gradients of weights during the exchange of the output's gradient.
    gradients: Vec<Compute>,
}

impl Remakes {
    pub(super) fn of(records: &[Record]) -> Self {
        let mut all = Self::default();
        for Record { operation, output, .. } in records {
            match operation {
                Operation::Remade(op, x) => {
                    all.of.insert(output.id(), (Arc::clone(op), x.clone(), output.clone()));
                    if op.exchange().is_some() && !is_deferring() {
                        all.waiting.insert(output.id(), Waiting::default());
                    }
                }
                Operation::View(x) => {
                    all.views.insert(output.id(), all.source(x));
                }
                _ => {}
            }
        }
        all
    }

    /// Returns the output whose values `tensor` shares, or `tensor` itself.
    fn source(&self, tensor: &Tensor) -> TensorId {
        self.views.get(&tensor.id()).copied().unwrap_or(tensor.id())
    }

    /// Restores the freed values of `inputs`.
    pub(super) fn make(&mut self, inputs: &[Tensor]) -> Result<()> {
        for input in inputs {
            let source = self.source(input);
            if let Some((op, x, output)) = self.of.remove(&source) {
                op.remake(&x, &output)?;
            } else if let Some(finish) = self.waiting.get_mut(&source).and_then(|waiting| waiting.finish.take()) {
                finish()?;
            }
        }
        Ok(())
    }

    /// Starts the exchange that restores the values of `input`, unless it has been started. Returns the tensor that
    /// owns the values, or `None` if no exchange can overlap with other operations.
    pub(super) fn start(&mut self, input: &Tensor) -> Result<Option<TensorId>> {
        let source = self.source(input);
        let Some(waiting) = self.waiting.get_mut(&source) else { return Ok(None) };
        if let Some((op, x, output)) = self.of.remove(&source) {
            waiting.finish = op.exchange().map(|exchange| exchange.start(&x, &output)).transpose()?;
        }
        Ok(Some(source))
    }

    /// Keeps these computations. They will run during the exchange that carries the gradient of `source`.
    pub(super) fn wait(&mut self, source: TensorId, gradients: Vec<Compute>) {
        self.waiting.entry(source).or_default().gradients.extend(gradients);
    }

    /// Runs the backward of an operation whose output was restored, and frees the output.
    pub(super) fn backward(&mut self, op: &dyn Taped, [x, output, dy]: [&Tensor; 3]) -> Result<Option<Tensor>> {
        let Waiting { finish, gradients } = self.waiting.remove(&output.id()).unwrap_or_default();
        if let Some(finish) = finish {
            finish()?;
        }
        let Some(exchange) = op.exchange().filter(|_| !gradients.is_empty()) else {
            free(output)?;
            return Ok(op.gradients(&[x], output, dy)?.swap_remove(0));
        };
        let mut gradients = gradients.into_iter();
        let dx = exchange.backward_while(x, dy, &mut || gradients.try_for_each(|compute| compute()))?;
        free(output)?;
        Ok(Some(dx))
    }
}

/// Returns whether the gradients of parameters are deferred beyond the backward.
fn is_deferring() -> bool {
    sink::is_deferring() || meta::is_deferring()
}

/// Frees the values of an output that was restored, unless the gradients of parameters are deferred: their computation
/// may still read the values.
fn free(output: &Tensor) -> Result<()> {
    if is_deferring() {
        return Ok(());
    }
    meta::let_go(output);
    take(output).map(drop)
}
