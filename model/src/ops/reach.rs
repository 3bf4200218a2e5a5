//! How far back a position attends.

use super::operand::indices_of;
use candle_core::{Result, Tensor, bail};

/// What a position of causal attention sees of the positions before it. By default all of them.
#[derive(Clone, Debug, Default)]
pub struct Reach {
    window: Option<usize>,
    documents: Option<Tensor>,
}

impl Reach {
    /// Only the last `window` positions, its own included: sliding-window attention, as Mistral's.
    #[must_use]
    pub fn window(self, window: usize) -> Self {
        Self { window: Some(window), ..self }
    }

    /// Only positions of the same document, where several are packed into a row. `documents` is `[batch, time]` of u32, i64
    /// or u8; a document begins wherever the number changes.
    #[must_use]
    pub fn documents(self, documents: Tensor) -> Self {
        Self { documents: Some(documents), ..self }
    }

    /// The first position that each position of `[batch, time]` sees. Within a row it never goes back.
    pub(crate) fn firsts(&self, op: &'static str, batch: usize, time: usize) -> Result<Vec<usize>> {
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
