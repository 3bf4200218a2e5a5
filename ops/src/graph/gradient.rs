//! Delivers the gradients of parameters.

use crate::graph::output::{stored, tensor};
use crate::sink::{self, Slot};
use candle_core::{Result, Tensor};

/// Passes the gradient of `parameter` to the sink, or returns it as a tensor if no sink wants it.
///
/// `fill` receives a buffer of the parameter's size with arbitrary content and overwrites all of it, in row-major
/// order. `fill` is not called for a frozen parameter.
pub(crate) fn deliver(op: &'static str, parameter: &Tensor, fill: impl FnOnce(&mut [f32])) -> Result<Option<Tensor>> {
    deliver_tile(op, parameter, |out, tile| {
        assert!(matches!(tile, Tile::First), "{op}: this gradient cannot be computed in tiles");
        fill(out);
    })
}

/// Does the same as [`deliver`], for a computation that can fail.
pub(crate) fn try_deliver(
    op: &'static str,
    parameter: &Tensor,
    fill: impl FnOnce(&mut [f32]) -> Result<()>,
) -> Result<Option<Tensor>> {
    let mut result = Ok(());
    let delivered = deliver(op, parameter, |out| result = fill(out))?;
    result.map(|()| delivered)
}

/// The position of a tile of rows in a backward.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Tile {
    /// The first tile, or all rows.
    First,
    /// A further tile, which continues from the sum of the previous ones.
    Further,
}

/// Does the same as [`deliver`], for a gradient that is a sum over rows. For a further tile, `fill` continues from the
/// content of the buffer.
pub(crate) fn deliver_tile(
    op: &'static str,
    parameter: &Tensor,
    fill: impl FnOnce(&mut [f32], Tile),
) -> Result<Option<Tensor>> {
    if !parameter.track_op() {
        return Ok(None);
    }
    let mut fill = Some(fill);
    let mut run = |out: &mut [f32], tile| {
        if let Some(fill) = fill.take() {
            fill(out, tile);
        }
    };
    let taken = sink::write(parameter, |slot| match slot {
        Slot::First(out) => run(out, Tile::First),
        Slot::Further(out) => run(out, Tile::Further),
        Slot::Another(out) => {
            // Computes the whole gradient first and then adds it, so that the sum over the uses of a tied parameter
            // does not depend on their order.
            let mut gradient = vec![0.0; out.len()];
            run(&mut gradient, Tile::First);
            for (total, g) in out.iter_mut().zip(&gradient) {
                *total += g;
            }
        }
    });
    if taken {
        return Ok(None);
    }
    let mut gradient = vec![0.0; parameter.elem_count()];
    run(&mut gradient, Tile::First);
    Ok(Some(tensor(stored(op, gradient, parameter.dtype())?, parameter.shape())))
}
