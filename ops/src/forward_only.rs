//! Parameters that only the forward reads.

use std::cell::Cell;

use crate::flag::Flag;

thread_local! {
    static FORWARD_ONLY: Cell<bool> = const { Cell::new(false) };
}

/// Runs `ask`, which requests parameters from a `VarBuilder`. Only the layer's forward may read these parameters, such
/// as a table whose rows are looked up. The engine does not gather them for the backward, so a backward that reads them
/// fails.
///
/// ```
/// # use candle_core::{Result, Tensor};
/// # use candle_nn::VarBuilder;
/// fn scores(entries: usize, vb: VarBuilder) -> Result<Tensor> {
///     zero_ops::forward_only(|| vb.get((entries, 4), "scores"))
/// }
/// ```
pub fn forward_only<T>(ask: impl FnOnce() -> T) -> T {
    let _raised = Flag::raise(&FORWARD_ONLY);
    ask()
}

/// Returns whether the calling code runs inside [`forward_only`], so that the backward will not read the parameters
/// that this code requests.
#[must_use]
pub fn asks_forward_only() -> bool {
    FORWARD_ONLY.get()
}
