//! Parameters that no backward reads.

use std::cell::Cell;

use crate::flag::Flag;

thread_local! {
    static FORWARD_ONLY: Cell<bool> = const { Cell::new(false) };
}

/// Runs `ask`, which asks a `VarBuilder` for parameters that the layer's backward does not read, only its forward, such as a table
/// whose rows are looked up. They are not gathered for the backward. If it reads one all the same, that is an error.
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

/// Whether what asks for a parameter now reads it in its forward alone: it runs inside of [`forward_only`].
#[must_use]
pub fn asks_forward_only() -> bool {
    FORWARD_ONLY.get()
}
