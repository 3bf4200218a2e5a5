//! Gradients of parameters that are computed one tile of rows at a time.
//!
//! The gradient of a weight is a sum over rows. Each tile continues from the sum that the previous tiles left in the
//! parameter's place, so the result is bit-identical to one sum over all rows. A contribution accumulates in a separate
//! buffer if it is added to an earlier contribution, is deferred, or has no place.

use std::cell::RefCell;

use super::{CURRENT, Contribution, Slot, keep, schedule_defers, write};
use crate::flag::Replaced;
use candle_core::{Result, Tensor, TensorId};

thread_local! {
    static CLAIMS: RefCell<Option<Vec<Claim>>> = const { RefCell::new(None) };
}

/// The destination of the tiles' contributions to a parameter's gradient.
struct Claim {
    parameter: TensorId,
    /// The separate buffer, if the tiles cannot accumulate in the parameter's place.
    room: Option<Vec<f32>>,
    /// Number of tiles that the sum contains so far.
    tiles: usize,
}

/// Runs a backward that processes its rows in tiles, each of which writes the gradients of `parameters`. All these
/// parameters are trained. They are listed in the order in which a backward over all rows would write their gradients.
/// A parameter that is used twice is listed twice.
///
/// Returns the result of `backward` and, for each parameter, its gradient if no sink takes it.
pub(crate) fn in_tiles<T>(
    parameters: &[&Tensor],
    backward: impl FnOnce() -> Result<T>,
) -> Result<(T, Vec<Option<Vec<f32>>>)> {
    let claims = parameters.iter().map(|parameter| Claim::new(parameter)).collect();
    let (claims, result) = Replaced::during(&CLAIMS, Some(claims), backward);
    let finished = claims.into_iter().flatten().zip(parameters).map(|(claim, parameter)| claim.finish(parameter));
    Ok((result?, finished.collect()))
}

/// Returns whether a backward in tiles is running.
pub(super) fn running() -> bool {
    CLAIMS.with_borrow(Option::is_some)
}

/// Does the same as [`write`], for the next tile's contribution.
pub(super) fn write_tile(parameter: &Tensor, write: impl FnOnce(Slot<'_>)) -> bool {
    CLAIMS.with_borrow_mut(|claims| {
        let all = claims.iter_mut().flatten().filter(|claim| claim.parameter == parameter.id());
        // If a parameter is used more than once, each tile writes its contributions in the order of the uses.
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
        let has_place = !schedule_defers(parameter)
            && CURRENT.with_borrow_mut(|current| {
                matches!(current.as_mut().and_then(|gradients| gradients.slot(id)), Some(Slot::First(_)))
            });
        let room = (!has_place).then(|| vec![0.0; parameter.elem_count()]);
        Self { parameter: id, room, tiles: 0 }
    }

    /// Returns the gradient if no sink has taken it.
    fn finish(self, parameter: &Tensor) -> Option<Vec<f32>> {
        let room = self.room?;
        if schedule_defers(parameter) {
            keep(parameter, Contribution::Made(room));
            return None;
        }
        (!write(parameter, |slot| slot.put(&room))).then_some(room)
    }
}
