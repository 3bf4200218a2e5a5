//! Operations that are counted instead of computed.

use super::{Held, META, Operands, another, free, is_deferring, passing, tensor, with};
use crate::graph::op::Taped;
use crate::meta::footprint::{Costs, DeferredCosts, Exchange, Finish, Footprint, bytes};
use crate::sink::deferred;
use candle_core::{Result, Tensor, bail};
use std::sync::{Arc, Mutex, PoisonError};

/// Counts the forward of an operation. Returns its output and its entry for the tape.
pub(crate) fn forward(op: &impl Footprint, inputs: &[&Tensor]) -> Result<(Tensor, Traced)> {
    let costs = op.footprint(inputs)?;
    let output = bytes(costs.shape.elem_count(), costs.dtype);
    with(|heap| heap.exchanged = heap.exchanged + costs.exchanged[0]);
    passing(output + costs.saved + costs.forward);
    let saved = Held::new(costs.saved);
    let output = tensor(&costs.shape, costs.dtype)?;
    Ok((output, Traced { costs, saved, remade: Arc::default(), overlaps: op.exchange().is_some() }))
}

/// Returns the tape entry of an operation that has a backward but no forward.
pub(crate) fn unmade(op: &impl Footprint, inputs: &[&Tensor]) -> Result<Traced> {
    Ok(Traced { costs: op.footprint(inputs)?, saved: Held::new(0), remade: Arc::default(), overlaps: false })
}

/// A counted operation on the tape.
pub(crate) struct Traced {
    costs: Costs,
    /// The block that the operation keeps for its backward.
    saved: Held,
    /// The block of the output's values, once they are restored.
    remade: Arc<Mutex<Option<Held>>>,
    /// Whether the exchange that restores the values overlaps with other operations.
    overlaps: bool,
}

impl Taped for Traced {
    fn gradients(&self, inputs: &[&Tensor], _: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>> {
        self.backward(inputs, dy)
    }

    fn remake(&self, _: &Tensor, output: &Tensor) -> Result<()> {
        let bytes = bytes(self.costs.shape.elem_count(), self.costs.dtype);
        with(|heap| heap.exchanged = heap.exchanged + self.costs.exchanged[0]);
        passing(bytes + self.costs.forward);
        let held = Held::new(bytes);
        with(|heap| heap.of.insert(output.id(), held.0));
        // Deferred gradients will read the values, so the values are kept for them.
        match is_deferring() {
            true => drop(with(|heap| heap.deferred.as_mut().map(|list| list.push(Operands::others(held))))),
            false => *self.remade.lock().unwrap_or_else(PoisonError::into_inner) = Some(held),
        }
        Ok(())
    }

    fn exchange(&self) -> Option<&dyn Exchange> {
        self.overlaps.then_some(self)
    }
}

impl Exchange for Traced {
    fn start(&self, x: &Tensor, output: &Tensor) -> Result<Finish> {
        with(|heap| heap.exchanged = heap.exchanged + self.costs.exchanged[0]);
        // The exchange sends a copy of the input.
        let sent = Held::new(bytes(x.elem_count(), x.dtype()));
        let received = Held::new(bytes(output.elem_count(), output.dtype()));
        let (output, remade, copied) = (output.clone(), Arc::clone(&self.remade), self.costs.forward);
        Ok(Box::new(move || {
            drop(sent);
            passing(copied);
            with(|heap| heap.of.insert(output.id(), received.0));
            *remade.lock().unwrap_or_else(PoisonError::into_inner) = Some(received);
            Ok(())
        }))
    }

    fn backward_while(&self, x: &Tensor, dy: &Tensor, compute: &mut dyn FnMut() -> Result<()>) -> Result<Tensor> {
        let Some(dx) = self.backward(&[x], dy)?.swap_remove(0) else { bail!("{META}: no gradient is wanted") };
        let _packed = Held::new(self.costs.backward);
        compute()?;
        Ok(dx)
    }
}

impl Traced {
    /// Counts the memory of the backward pass, and returns the gradients of the inputs.
    fn backward(&self, inputs: &[&Tensor], dy: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let wanted = |i: usize| self.costs.gradients[i] && inputs[i].track_op();
        let size = |i: usize| if wanted(i) { bytes(inputs[i].elem_count(), inputs[i].dtype()) } else { 0 };
        let gradients: u64 = (0..inputs.len()).map(size).sum();
        with(|heap| heap.exchanged = heap.exchanged + self.costs.exchanged[1]);
        if self.costs.hands_over {
            free(self.saved.0);
        }
        let operands = |costs: DeferredCosts, others: u64| Operands {
            _tensors: [costs.keeps_input.then(|| inputs[0].clone()), costs.keeps_gradient.then(|| dy.clone())],
            _others: Held::new(others),
        };
        match self.costs.deferred {
            Some(costs) if is_deferring() => {
                passing(gradients + costs.backward);
                let kept = operands(costs, costs.operands + costs.made);
                with(|heap| heap.deferred.as_mut().map(|list| list.push(kept)));
            }
            Some(costs) if costs.keeps_input && deferred::waits_for_exchange() => {
                passing(gradients + self.costs.backward);
                let (kept, weight) = (operands(costs, costs.operands), inputs[1].clone());
                deferred::wait_for_exchange(move || {
                    let _kept = kept;
                    passing(another(&weight));
                    Ok(())
                });
            }
            _ => passing(gradients + self.costs.backward),
        }
        let gradient = |i: usize| wanted(i).then(|| tensor(inputs[i].shape(), inputs[i].dtype())).transpose();
        (0..inputs.len()).map(gradient).collect()
    }
}
