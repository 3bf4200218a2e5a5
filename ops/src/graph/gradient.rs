//! Where a parameter's gradient goes.

use crate::graph::output::{stored, tensor};
use crate::sink::{self, Slot};
use candle_core::{Result, Tensor};

/// Hands the gradient of `parameter` to the sink, or returns it as a tensor when no sink wants it.
///
/// `fill` gets a buffer of the parameter's size and overwrites all of it, with the elements in row-major order; what
/// the buffer holds before is arbitrary. A parameter that is not trained gets nothing and `fill` is not called.
pub(crate) fn deliver(op: &'static str, parameter: &Tensor, fill: impl FnOnce(&mut [f32])) -> Result<Option<Tensor>> {
    deliver_tile(op, parameter, |out, tile| {
        assert!(matches!(tile, Tile::First), "{op}: the gradient of a parameter that is not made in tiles");
        fill(out);
    })
}

/// Which of the tiles of its rows a backward is at.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Tile {
    /// The first, or all rows.
    First,
    /// One that goes on from what the tiles before it left.
    Further,
}

/// [`deliver`] of a gradient that is a sum over rows: `fill` goes on from what the buffer holds where the tile is a further one.
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
            // The whole gradient first, then one addition: the order in which a tied parameter's uses are added
            // does not reach into the sums.
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
