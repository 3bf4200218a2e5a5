//! Where a parameter's gradient goes.

use super::output::{stored, tensor};
use crate::sink::{self, Slot};
use candle_core::{Result, Tensor};

/// Hands the gradient of `parameter` to the sink, or returns it as a tensor when no sink wants it.
///
/// `fill` gets a buffer of the parameter's size and overwrites all of it, with the elements in row-major order; what
/// the buffer holds before is arbitrary. A parameter that is not trained gets nothing and `fill` is not called.
pub(crate) fn deliver(op: &'static str, parameter: &Tensor, fill: impl FnOnce(&mut [f32])) -> Result<Option<Tensor>> {
    if !parameter.track_op() {
        return Ok(None);
    }
    let mut fill = Some(fill);
    let mut run = |out: &mut [f32]| {
        if let Some(fill) = fill.take() {
            fill(out);
        }
    };
    let taken = sink::write(parameter, |slot| match slot {
        Slot::First(out) => run(out),
        Slot::Another(out) => {
            // The whole gradient first, then one addition: the order in which a tied parameter's uses are added
            // does not reach into the sums.
            let mut gradient = vec![0.0; out.len()];
            run(&mut gradient);
            for (total, g) in out.iter_mut().zip(&gradient) {
                *total += g;
            }
        }
    });
    if taken {
        return Ok(None);
    }
    let mut gradient = vec![0.0; parameter.elem_count()];
    run(&mut gradient);
    Ok(Some(tensor(stored(op, gradient, parameter.dtype())?, parameter.shape())))
}
