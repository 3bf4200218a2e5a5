//! Gradients of parameters that are made a tile of rows at a time.
//!
//! The gradient of a weight is a sum over rows. Each tile goes on from what the tiles before it left in the parameter's place, so
//! the sum has the order, and the bits, of one over all rows. A contribution that has to be whole before it is added to another
//! one, or that is kept for later, or that has no place at all, grows in room of its own.

use std::cell::RefCell;

use super::{CURRENT, Part, Slot, defers, keep, write};
use candle_core::{Result, Tensor, TensorId};

thread_local! {
    static CLAIMS: RefCell<Option<Vec<Claim>>> = const { RefCell::new(None) };
}

/// Where the tiles' contributions to a parameter's gradient go.
struct Claim {
    parameter: TensorId,
    /// If it cannot be the parameter's place.
    room: Option<Vec<f32>>,
    /// How many tiles are in it.
    tiles: usize,
}

/// Runs a backward that goes over its rows in tiles, each of which writes the gradients of `parameters`. They are all trained, and
/// come in the order in which a backward over all rows would write them; one that is used twice comes twice.
///
/// Gives what `backward` gives and, for each parameter, the gradient that no sink wants.
pub(crate) fn in_tiles<T>(
    parameters: &[&Tensor],
    backward: impl FnOnce() -> Result<T>,
) -> Result<(T, Vec<Option<Vec<f32>>>)> {
    let claims = parameters.iter().map(|parameter| Claim::new(parameter)).collect();
    let outer = CLAIMS.replace(Some(claims));
    let result = backward();
    let claims = CLAIMS.replace(outer).unwrap_or_default();
    let finished = claims.into_iter().zip(parameters).map(|(claim, parameter)| claim.finish(parameter));
    Ok((result?, finished.collect()))
}

/// Whether such a backward is running.
pub(super) fn running() -> bool {
    CLAIMS.with_borrow(Option::is_some)
}

/// [`write`] of the next tile's part.
pub(super) fn write_tile(parameter: &Tensor, write: impl FnOnce(Slot<'_>)) -> bool {
    CLAIMS.with_borrow_mut(|claims| {
        let all = claims.iter_mut().flatten().filter(|claim| claim.parameter == parameter.id());
        // Of several uses of one parameter, each tile writes the first one first.
        let Some(claim) = all.min_by_key(|claim| claim.tiles) else { return false };
        let first = claim.tiles == 0;
        claim.tiles += 1;
        if let Some(room) = &mut claim.room {
            write(slot(first, room));
            return true;
        }
        CURRENT.with_borrow_mut(|current| {
            let Some(place) = current.as_mut().and_then(|gradients| gradients.place(parameter.id())) else {
                return false;
            };
            write(slot(first, place));
            true
        })
    })
}

fn slot(first: bool, out: &mut [f32]) -> Slot<'_> {
    if first { Slot::First(out) } else { Slot::Further(out) }
}

impl Claim {
    fn new(parameter: &Tensor) -> Self {
        let id = parameter.id();
        let has_place = !defers(parameter)
            && CURRENT.with_borrow_mut(|current| {
                matches!(current.as_mut().and_then(|gradients| gradients.slot(id)), Some(Slot::First(_)))
            });
        let room = (!has_place).then(|| vec![0.0; parameter.elem_count()]);
        Self { parameter: id, room, tiles: 0 }
    }

    /// The gradient, if nobody has taken it.
    fn finish(self, parameter: &Tensor) -> Option<Vec<f32>> {
        let room = self.room?;
        if defers(parameter) {
            keep(parameter, Part::Made(room));
            return None;
        }
        (!write(parameter, |slot| slot.put(&room))).then_some(room)
    }
}
