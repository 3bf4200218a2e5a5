//! How far back a position attends.

#[cfg(feature = "cuda")]
use crate::gpu::attention::OnGpus;
use crate::graph::operand::indices_of;
use candle_core::{Result, Tensor, bail};
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

/// What a position of causal attention sees of the positions before it. By default all of them.
///
/// Make one for all layers of a model, or of a batch that has documents of its own: its clones share what is found out for a batch, and a
/// GPU gets that once.
#[derive(Clone, Debug, Default)]
pub struct AttentionSpan {
    window: Option<usize>,
    documents: Option<Tensor>,
    /// For the batch and time that were last asked for.
    found: Arc<Mutex<Option<Arc<Firsts>>>>,
}

/// The first position that each position of `[batch, time]` sees. Within a row it never goes back.
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
    /// Only the last `window` positions, its own included: sliding-window attention, as Mistral's.
    #[must_use]
    pub fn window(self, window: usize) -> Self {
        Self { window: Some(window), documents: self.documents, found: Arc::default() }
    }

    /// Only positions of the same document, where several are packed into a row. `documents` is `[batch, time]` of u32, i64
    /// or u8; a document begins wherever the number changes.
    #[must_use]
    pub fn documents(self, documents: Tensor) -> Self {
        Self { window: self.window, documents: Some(documents), found: Arc::default() }
    }

    /// Of a batch of these sizes.
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
            // No GPU gets them.
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
                bail!("{op}: documents of {:?} do not fit {batch} rows of {time} positions", documents.shape());
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
                bail!("{op}: a window of 0 positions sees nothing");
            }
            for (at, first) in firsts.iter_mut().enumerate() {
                *first = (*first).max((at % time + 1).saturating_sub(window));
            }
        }
        Ok(firsts)
    }
}
