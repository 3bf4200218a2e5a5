//! The gradient that an operation's first input has already, on offer to its backward.
//!
//! In a fused block the gradients of a tensor that was used twice are added: of the residual stream, the one that goes past a norm and the one
//! that comes through it. A backward that writes the second one can add the first in passing: it takes what is on offer, and gives the sum.

use candle_core::{Tensor, TensorId};
use std::cell::RefCell;

thread_local! {
    static OFFER: RefCell<Option<(TensorId, Tensor)>> = const { RefCell::new(None) };
}

/// Runs a backward while the gradient that `x` has, if it has one, is on offer; gives that back if nobody took it.
pub(crate) fn offer<R>(x: &Tensor, gradient: Option<Tensor>, backward: impl FnOnce() -> R) -> (R, Option<Tensor>) {
    let outer = OFFER.replace(gradient.map(|gradient| (x.id(), gradient)));
    let result = backward();
    let left = OFFER.replace(outer);
    (result, left.map(|(_, gradient)| gradient))
}

/// The gradient that `x` has already, for whoever returns the sum of it and what is x's otherwise; None where x's is not wanted.
#[cfg(feature = "cuda")]
pub(crate) fn take(x: &Tensor) -> Option<Tensor> {
    if !x.track_op() {
        return None;
    }
    OFFER.with_borrow_mut(|offer| offer.take_if(|(of, _)| *of == x.id())).map(|(_, gradient)| gradient)
}
