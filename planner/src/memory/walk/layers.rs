//! The memory of layers: leaves, outputs, tensors saved for backwards, and gradients between layers.

use zero_partition::Category;
use zero_pipeline::LayerId;

use super::{Values, Walk};

impl Walk<'_> {
    /// Returns the outputs of the previous layer, computed here or received.
    pub(super) fn incoming(&mut self, layer: LayerId, micro_batch: usize) -> Option<&mut Values> {
        self.values.get_mut(&(layer.checked_sub(1)?, micro_batch))
    }

    pub(super) fn let_go(&mut self, layer: LayerId, micro_batch: usize, change: impl FnOnce(&mut Values)) {
        let Some(values) = self.values.get_mut(&(layer, micro_batch)) else { return };
        let was = values.saved || values.flows || values.kept;
        change(values);
        if was && !(values.saved || values.flows || values.kept) {
            let bytes = values.bytes;
            self.values.remove(&(layer, micro_batch));
            self.meter.free(Category::Activations, bytes);
        }
    }

    /// Walks through a forward. `again` marks a recomputation from kept inputs, after which these inputs are no longer
    /// kept.
    pub(super) fn forward(&mut self, layer: LayerId, micro_batch: usize, again: bool) {
        let Some(table) = self.work.table else { return };
        let is_last = layer == table.layers.len();
        if !self.trains || layer < self.first_trained {
            let (peak, outputs) = match is_last {
                true => (table.evaluation_loss, 0),
                false => {
                    let (of_step, of_evaluation) = (&table.layers[layer], &table.evaluation[layer]);
                    let peak = if self.trains { of_step.forward_peak } else { of_evaluation.peak };
                    (peak, of_step.outputs.iter().map(|form| form.bytes()).sum())
                }
            };
            self.meter.flash(Category::Activations, peak);
            self.meter.add(Category::Activations, outputs);
            if layer > 0 {
                self.let_go(layer - 1, micro_batch, |values| values.flows = false);
            }
            self.values.insert((layer, micro_batch), Values { bytes: outputs, flows: true, ..Values::default() });
            return;
        }
        if is_last {
            return;
        }
        let memory = &table.layers[layer];
        let outputs = memory.outputs.iter().map(|form| form.bytes()).sum();
        if layer > 0 {
            // The outputs of the previous layer are this layer's leaves, which stay until this layer's backward.
            self.let_go(layer - 1, micro_batch, |values| {
                (values.flows, values.saved) = (false, true);
                values.kept &= !again;
            });
        }
        self.meter.flash(Category::Activations, memory.forward_peak);
        self.meter.add(Category::Activations, memory.kept + outputs);
        self.saved.insert((layer, micro_batch), memory.kept);
        let values = Values { bytes: outputs, flows: true, ..Values::default() };
        self.values.insert((layer, micro_batch), values);
    }

    pub(super) fn backward(&mut self, layer: LayerId, micro_batch: usize, puts_off: bool) {
        let Some(table) = self.work.table else { return };
        let upstream = self.upstream.remove(&micro_batch).unwrap_or(0);
        if layer == table.layers.len() {
            self.meter.flash(Category::Activations, table.loss.peak);
            if layer > 0 {
                self.let_go(layer - 1, micro_batch, |values| values.flows = false);
            }
            self.flow_back(layer, micro_batch, upstream, table.loss.input_gradients);
            return;
        }
        let memory = &table.layers[layer];
        self.let_go(layer, micro_batch, |values| values.flows = false);
        self.meter.flash(Category::Activations, if puts_off { memory.deferred_peak } else { memory.backward_peak });
        let saved = self.saved.remove(&(layer, micro_batch)).unwrap_or(0);
        self.meter.free(Category::Activations, saved);
        if layer > 0 {
            self.let_go(layer - 1, micro_batch, |values| values.saved = false);
        }
        if puts_off {
            self.meter.add(Category::Activations, memory.deferred);
            self.put_off.insert((layer, micro_batch), memory.deferred);
        }
        self.flow_back(layer, micro_batch, upstream, memory.input_gradients);
    }

    /// Replaces the gradients of a layer's outputs by the gradients of its inputs, or by nothing if no earlier layer
    /// has a backward.
    fn flow_back(&mut self, layer: LayerId, micro_batch: usize, before: u64, after: u64) {
        let after = if layer > self.first_trained { after } else { 0 };
        self.meter.free(Category::Activations, before);
        self.meter.add(Category::Activations, after);
        self.upstream.insert(micro_batch, after);
    }
}
