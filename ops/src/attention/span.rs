//! The span of earlier positions that a position attends to.

#[cfg(feature = "cuda")]
use crate::gpu::attention::OnGpus;
use crate::graph::operand::indices_of;
use crate::meta::tracing;
use candle_core::{Result, Tensor, bail};
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

/// The earlier positions that a position sees in causal attention. By default it sees all of them.
///
/// Create one span for all layers of a model, or one for each batch if the documents differ between batches. Clones
/// share a list that holds, for each position of a batch, the first position that it sees. The list is computed once
/// and copied to a GPU once, except in ring attention, which derives lists for parts of the keys.
#[derive(Clone, Debug, Default)]
pub struct AttentionSpan {
    window: Option<usize>,
    position_ids: Option<Tensor>,
    /// The list of the last request, which is reused while the batch and time stay the same.
    found: Arc<Mutex<Option<Arc<Firsts>>>>,
}

/// The first position that each position of `[batch, time]` sees. It never decreases within a row.
#[derive(Debug)]
pub(crate) struct Firsts {
    /// Batch and time.
    sizes: [usize; 2],
    positions: Vec<usize>,
    #[cfg(feature = "cuda")]
    pub(crate) on_gpus: OnGpus,
}

impl Firsts {
    /// `sizes` are the batch and the number of positions of a sample.
    pub(crate) fn new(sizes: [usize; 2], positions: Vec<usize>) -> Self {
        Self {
            sizes,
            positions,
            #[cfg(feature = "cuda")]
            on_gpus: OnGpus::default(),
        }
    }
}

impl Deref for Firsts {
    type Target = [usize];

    fn deref(&self) -> &[usize] {
        &self.positions
    }
}

impl AttentionSpan {
    /// Limits the span to the last `window` positions, including the position itself: sliding-window attention, as in
    /// Mistral.
    #[must_use]
    pub fn window(self, window: usize) -> Self {
        Self { window: Some(window), position_ids: self.position_ids, found: Arc::default() }
    }

    /// Limits the span to positions of the same document, if several are packed into a row. `position_ids` is `[batch,
    /// time]` of u32, i64 or u8: the position of each token in its document. A document begins at each 0.
    #[must_use]
    pub fn position_ids(self, position_ids: Tensor) -> Self {
        Self { window: self.window, position_ids: Some(position_ids), found: Arc::default() }
    }

    /// Returns the window, or `None` if the span is unlimited.
    ///
    /// # Errors
    /// Fails if the span depends on documents, or the window has no position.
    pub(crate) fn window_alone(&self, op: &'static str) -> Result<Option<usize>> {
        if self.position_ids.is_some() {
            bail!("{op}: packed documents cannot be decoded");
        }
        if self.window == Some(0) {
            bail!("{op}: the window must have at least 1 position");
        }
        Ok(self.window)
    }

    /// Returns the first position that each position of `[batch, time]` sees.
    pub(crate) fn firsts(&self, op: &'static str, batch: usize, time: usize) -> Result<Arc<Firsts>> {
        let make = || Ok(Arc::new(Firsts::new([batch, time], self.positions(op, batch, time)?)));
        if self.window.is_none() && self.position_ids.is_none() {
            // If the span is unlimited, a GPU does not read the first positions, so there is no copy to share.
            return make();
        }
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(firsts) = &*found
            && firsts.sizes == [batch, time]
        {
            return Ok(Arc::clone(firsts));
        }
        let firsts = make()?;
        *found = Some(Arc::clone(&firsts));
        Ok(firsts)
    }

    fn positions(&self, op: &'static str, batch: usize, time: usize) -> Result<Vec<usize>> {
        let mut firsts = vec![0; batch * time];
        if let Some(position_ids) = &self.position_ids {
            if position_ids.dims() != [batch, time] {
                let shape = position_ids.shape();
                bail!("{op}: position_ids of shape {shape:?} do not match {batch} rows of {time} positions");
            }
            // Meta tensors have no values, and memory does not depend on them.
            let position_ids = if tracing() { vec![] } else { indices_of(op, position_ids, usize::MAX)? };
            for (row, position_ids) in position_ids.chunks_exact(time.max(1)).enumerate() {
                let mut first = 0;
                for (at, &position) in position_ids.iter().enumerate() {
                    if position == 0 {
                        first = at;
                    }
                    if position != at - first {
                        bail!(
                            "{op}: position_ids[{row}, {at}] is {position}, but its document has {} tokens before it",
                            at - first
                        );
                    }
                    firsts[row * time + at] = first;
                }
            }
        }
        if let Some(window) = self.window {
            if window == 0 {
                bail!("{op}: the window must have at least 1 position");
            }
            for (at, first) in firsts.iter_mut().enumerate() {
                *first = (*first).max((at % time + 1).saturating_sub(window));
            }
        }
        Ok(firsts)
    }
}
