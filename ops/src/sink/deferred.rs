//! Weight gradients that a backward postpones, because a schedule defers them or so that they overlap with an exchange.

use super::{Contribution, Make, has, is_deferring, keep, make, schedule_defers, tiles, write};
use crate::flag::Replaced;
use candle_core::{Result, Tensor};
use std::cell::RefCell;

/// Computes a gradient that was deferred.
pub(crate) type Compute = Box<dyn FnOnce() -> Result<()>>;

thread_local! {
    static UNTIL_EXCHANGE: RefCell<Option<Vec<Compute>>> = const { RefCell::new(None) };
}

/// Runs the backward of an operation. Returns its result, and the computations of weight gradients that can run during
/// an exchange.
pub(crate) fn until_exchange<T>(backward: impl FnOnce() -> T) -> (T, Vec<Compute>) {
    let (waiting, result) = Replaced::during(&UNTIL_EXCHANGE, Some(vec![]), backward);
    (result, waiting.unwrap_or_default())
}

/// Returns whether the running backward postpones gradients of weights until an exchange.
pub(crate) fn waits_for_exchange() -> bool {
    UNTIL_EXCHANGE.with_borrow(Option::is_some)
}

/// Adds a computation that will run during the exchange.
pub(crate) fn wait_for_exchange(compute: impl FnOnce() -> Result<()> + 'static) {
    UNTIL_EXCHANGE.with_borrow_mut(|all| {
        if let Some(all) = all {
            all.push(Box::new(compute));
        }
    });
}

/// Returns whether the running backward defers this parameter's gradient. If so, pass the computation to [`defer`]
/// instead of running it.
#[must_use]
pub fn defers(parameter: &Tensor) -> bool {
    schedule_defers(parameter) || (waits_for_exchange() && !tiles::running() && has(parameter))
}

/// Defers a contribution to `parameter`'s gradient. `compute` overwrites a buffer of the parameter's size.
pub fn defer(parameter: &Tensor, compute: impl FnOnce(&mut [f32]) -> Result<()> + Send + 'static) {
    let compute: Make = Box::new(compute);
    if is_deferring() {
        return keep(parameter, Contribution::Unmade(compute));
    }
    let parameter = parameter.clone();
    wait_for_exchange(move || {
        let mut made = Ok(());
        write(&parameter, |slot| made = make(compute, slot));
        made
    });
}
