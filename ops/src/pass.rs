//! The context that operations read during a pass.

use crate::flag::Replaced;
use std::cell::RefCell;

thread_local! {
    static CURRENT: RefCell<Option<Pass>> = const { RefCell::new(None) };
}

/// The context of a forward or backward pass, as a layer sees it. Dropout derives its masks from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// Whether this is training rather than evaluation.
    pub training: bool,
    /// `training.seed`.
    pub seed: u64,
    /// Optimizer step, counted from 1.
    pub step: u64,
    /// Index of the first sample of this micro-batch in the whole run.
    pub sample: u64,
    /// Index of the layer in the model.
    pub layer: u32,
}

impl Pass {
    /// Calls `run`, inside which [`Pass::current`] returns this pass. Operations that receive no pass as an argument
    /// get it from there.
    pub fn within<T>(&self, run: impl FnOnce() -> T) -> T {
        let _current = Replaced::with(&CURRENT, Some(*self));
        run()
    }

    /// Returns the pass that runs on this thread.
    #[must_use]
    pub fn current() -> Option<Self> {
        CURRENT.with_borrow(|current| *current)
    }
}
