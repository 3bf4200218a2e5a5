//! Offers an existing gradient of an operation's first input to the operation's backward.
//!
//! In a fused block, the gradients of a tensor that is used twice are added. In the residual stream, one gradient
//! bypasses a norm and the other comes through the norm. On a GPU, the norm's backward adds the two in the same pass:
//! it takes the gradient that bypassed the norm, if it is offered, and returns the sum.

use crate::flag::Replaced;
use candle_core::{Tensor, TensorId};
use std::cell::RefCell;

thread_local! {
    static OFFER: RefCell<Option<(TensorId, Tensor)>> = const { RefCell::new(None) };
}

/// Runs a backward while offering it the existing gradient of `x`, if any. Returns the existing gradient if the
/// backward did not take it.
pub(crate) fn offer<R>(x: &Tensor, gradient: Option<Tensor>, backward: impl FnOnce() -> R) -> (R, Option<Tensor>) {
    let (left, result) = Replaced::during(&OFFER, gradient.map(|gradient| (x.id(), gradient)), backward);
    (result, left.map(|(_, gradient)| gradient))
}

/// Takes the existing gradient of `x`, for a backward that adds its own gradient and returns the sum. Returns `None` if
/// no gradient is offered for `x`.
#[cfg(feature = "cuda")]
pub(crate) fn take(x: &Tensor) -> Option<Tensor> {
    if !x.track_op() {
        return None;
    }
    OFFER.with_borrow_mut(|offer| offer.take_if(|(of, _)| *of == x.id())).map(|(_, gradient)| gradient)
}
