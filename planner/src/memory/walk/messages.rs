//! The memory of messages between pipeline stages.

use zero_partition::Category;
use zero_pipeline::{Content, Message, Placement};

use super::{Values, Walk};

impl Walk<'_> {
    pub(super) fn message(&self, message: &Message) -> u64 {
        match message.content {
            Content::Activations { layer, .. } => self.work.table.map_or(0, |table| table.inputs[layer]),
            Content::Gradients { layer, .. } => self.work.table.map_or(0, |table| match table.layers.get(layer) {
                Some(memory) => memory.input_gradients,
                None => table.loss.input_gradients,
            }),
            Content::TiedGradient { segment, .. } => self.elements(segment) * 4,
            Content::TiedParameters { segment } => {
                self.part(segment, self.segment(segment).placements.parameters) * self.work.width
            }
        }
    }

    /// Frees the memory of messages that have certainly arrived. A message that may still be in flight counts, so that
    /// the plan does not depend on timing.
    pub(super) fn gone(&mut self) {
        while let Some(&(place, message)) = self.leaving.first()
            && place < self.place
        {
            self.leaving.pop_first();
            let bytes = self.sending.insert(message, 0).unwrap_or(0);
            match message.content {
                Content::TiedGradient { .. } => self.give(Category::Staging, bytes / 4),
                _ => self.meter.free(Category::Communication, bytes),
            }
        }
    }

    pub(super) fn send(&mut self, message: Message) {
        self.gone();
        let bytes = self.message(&message);
        match message.content {
            Content::Activations { layer, micro_batch } => {
                self.meter.add(Category::Communication, bytes);
                if let Some(before) = layer.checked_sub(1) {
                    self.let_go(before, micro_batch, |values| values.flows = false);
                }
            }
            Content::Gradients { micro_batch, .. } => {
                self.meter.add(Category::Communication, bytes);
                let upstream = self.upstream.remove(&micro_batch).unwrap_or(0);
                self.meter.free(Category::Activations, upstream);
            }
            // The buffer of the gradient stays in staging while it is sent.
            Content::TiedGradient { segment, .. } => self.open[segment] = false,
            Content::TiedParameters { segment } => match self.segment(segment).placements.parameters {
                // The message is a copy of the shard, and the buffer of this copy later returns to the pool.
                Placement::Sharded => self.meter.add(Category::Staging, bytes),
                Placement::Replicated => self.blank(bytes / self.work.width),
            },
        }
        self.sending.insert(message, bytes);
        if let (Some(&place), false) =
            (self.arrivals.get(&message), matches!(message.content, Content::TiedParameters { .. }))
        {
            self.leaving.insert((place, message));
        }
    }

    pub(super) fn sent(&mut self, message: Message) {
        let bytes = self.sending.remove(&message).unwrap_or(0);
        if let Some(&place) = self.arrivals.get(&message) {
            self.leaving.remove(&(place, message));
        }
        match message.content {
            Content::Activations { .. } | Content::Gradients { .. } => self.meter.free(Category::Communication, bytes),
            Content::TiedGradient { .. } => self.give(Category::Staging, bytes / 4),
            Content::TiedParameters { .. } => self.reuse(bytes / self.work.width),
        }
    }

    pub(super) fn received(&mut self, message: Message) {
        let bytes = self.message(&message);
        match message.content {
            Content::Activations { layer, micro_batch } => {
                self.meter.free(Category::Communication, if micro_batch == 0 { 0 } else { bytes });
                self.meter.add(Category::Activations, bytes);
                if let Some(before) = layer.checked_sub(1) {
                    let values = Values { bytes, flows: true, ..Values::default() };
                    self.values.insert((before, micro_batch), values);
                }
            }
            Content::Gradients { micro_batch, .. } => {
                self.meter.free(Category::Communication, if micro_batch == 0 { 0 } else { bytes });
                self.meter.add(Category::Activations, bytes);
                self.upstream.insert(micro_batch, bytes);
            }
            Content::TiedGradient { segment, .. } => self.open[segment] = true,
            Content::TiedParameters { .. } => self.reuse(bytes / self.work.width),
        }
    }
}
