//! The span of earlier positions that a position attends to.

#[cfg(feature = "cuda")]
use crate::gpu::attention::OnGpus;
use crate::graph::operand::indices_of;
use candle_core::{Result, Tensor, bail};
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

/// The earlier positions that a position sees in causal attention. The default is all of them.
///
/// Create one span for all layers of a model, or of a batch if its documents differ from other batches'. Clones share
/// the first positions that are computed for a batch, which are also copied to a GPU only once.
#[derive(Clone, Debug, Default)]
pub struct AttentionSpan {
    window: Option<usize>,
    documents: Option<Tensor>,
    /// The result for the batch and time of the last request.
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
        Self { window: Some(window), documents: self.documents, found: Arc::default() }
    }

    /// Limits the span to positions of the same document, if several are packed into a row. `documents` is `[batch,
    /// time]` of u32, i64 or u8; a document begins wherever the number changes.
    #[must_use]
    pub fn documents(self, documents: Tensor) -> Self {
        Self { window: self.window, documents: Some(documents), found: Arc::default() }
    }

    /// Returns the first positions for a batch of these sizes.
    pub(crate) fn firsts(&self, op: &'static str, batch: usize, time: usize) -> Result<Arc<Firsts>> {
        let make = || {
            let positions = self.positions(op, batch, time)?;
            let firsts = Firsts {
                sizes: [batch, time],
                positions,
                #[cfg(feature = "cuda")]
                on_gpus: OnGpus::default(),
            };
            Ok(Arc::new(firsts))
        };
        if self.window.is_none() && self.documents.is_none() {
            // No GPU reads them.
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
        if let Some(documents) = &self.documents {
            if documents.dims() != [batch, time] {
                bail!("{op}: documents of shape {:?} do not match {batch} rows of {time} positions", documents.shape());
            }
            let documents = indices_of(op, documents, usize::MAX)?;
            for (firsts, documents) in firsts.chunks_exact_mut(time.max(1)).zip(documents.chunks_exact(time.max(1))) {
                for at in 1..time {
                    firsts[at] = if documents[at] == documents[at - 1] { firsts[at - 1] } else { at };
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
