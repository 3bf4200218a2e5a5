//! The context that operations read during a pass.

use std::cell::Cell;

thread_local! {
    static CURRENT: Cell<Option<Pass>> = const { Cell::new(None) };
}

/// The context of a forward or backward pass, as a layer sees it: everything that dropout's masks depend on.
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
        struct Reset(Option<Pass>);
        impl Drop for Reset {
            fn drop(&mut self) {
                CURRENT.set(self.0);
            }
        }
        let _reset = Reset(CURRENT.replace(Some(*self)));
        run()
    }

    /// Returns the pass that runs on this thread.
    #[must_use]
    pub fn current() -> Option<Self> {
        CURRENT.get()
    }
}
