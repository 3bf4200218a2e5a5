//! The part of a checkpoint that only a run with local steps has. Each replicate of such a run trains independently and
//! has optimizer states of its own. The outer momentum is divided among the replicates. All replicates have equal
//! parameters when a checkpoint is saved.

use std::collections::BTreeMap;
use std::ops::Range;

use zero_comm::{Buffer, Communicator};
use zero_partition::{Kind, OuterShare, Range as Elements, ShardedState};
use zero_pipeline::{Coordinates, Placement};

use crate::error::CheckpointError;
use crate::layout::{ShardTensor, stored_elements};
use crate::manifest::{LocalPiece, LocalSteps, MOMENTUM, ParameterEntry};

/// Describes the replicates; `None` without local steps. Collective.
pub(crate) fn of(zero: &ShardedState, comm: &dyn Communicator) -> Result<Option<LocalSteps>, CheckpointError> {
    let Some(outer) = zero.outer() else { return Ok(None) };
    let own = Buffer::I64(vec![zero.updates() as i64]);
    let all = comm.all_gather(own, Buffer::I64(vec![0; comm.size()]), &vec![1; comm.size()]);
    let all = all.wait()?.output.into_i64()?;
    let first = |replicate| zero.groups().rank_of(Coordinates::first(0), replicate, 0);
    let updates = (0..outer.share.replicates).map(|replicate| all[first(replicate)] as u64).collect();
    Ok(Some(LocalSteps { updates, momentum: outer.momentum > 0.0 }))
}

/// Adds the replicates' tensors to the entries of all trainable parameters, with empty checksums. Each added piece
/// holds one optimizer state of one replicate, or a part of the outer momentum. If several ranks have the same share of
/// the momentum, one of them saves it.
pub(crate) fn add(zero: &ShardedState, entries: &mut BTreeMap<String, ParameterEntry>) {
    let Some(outer) = zero.outer() else { return };
    let (groups, model) = (zero.groups(), zero.model());
    let all: Vec<String> = zero.state_names().into_iter().map(String::from).collect();
    for (id, segment) in zero.layout().segments().iter().enumerate().filter(|(_, segment)| segment.is_trainable) {
        let first = Coordinates::first(zero.stages().owner(id));
        let mut push = |state: &str, of: (usize, Coordinates, usize, usize), range: Elements| {
            let (replicate, at, shard_of, slice) = of;
            let shard = groups.rank_of(at, shard_of, slice);
            let parameter = &model.parameters()[range.parameter];
            let (Some(end), Some(entry)) = (stored_elements(parameter, slice), entries.get_mut(parameter.name()))
            else {
                return;
            };
            let Elements { parameter, elements } = range;
            let elements = elements.start.min(end)..elements.end.min(end);
            let piece = |Range { start, end }| LocalPiece {
                state: state.into(),
                replicate,
                shard,
                slice,
                start,
                end,
                crc32: 0,
            };
            let portions = Elements { parameter, elements }.portions();
            entry.local.extend(portions.map(|portion| piece(portion.elements)));
        };
        let slices = groups.tensor().map_or(1, |group| group.size());
        let places = |slice| (0..zero.layout().ranks()).map(move |shard| (slice, shard));
        for replicate in 1..outer.share.replicates {
            for (slice, shard) in (0..slices).flat_map(places) {
                for (parameter, elements, _) in segment.overlaps(segment.shard(shard)) {
                    for state in states_of(zero, &all, parameter) {
                        let of = (replicate, Coordinates { shard, ..first }, replicate, slice);
                        push(&state, of, Elements { parameter, elements: elements.clone() });
                    }
                }
            }
        }
        let holders = match segment.placements.optimizer {
            _ if outer.momentum == 0.0 => 0,
            Placement::Replicated => 1,
            Placement::Sharded => zero.layout().ranks(),
        };
        for (slice, shard) in (0..slices).flat_map(|slice| (0..holders).map(move |shard| (slice, shard))) {
            let own = if holders == 1 { 0..segment.elements() } else { segment.shard(shard) };
            for replicate in 0..outer.share.replicates {
                let share = OuterShare { replicate, ..outer.share }.of(own.len());
                let held = own.start + share.start..own.start + share.end;
                for (parameter, elements, _) in segment.overlaps(held) {
                    let of = (0, Coordinates { shard, ..first }, replicate, slice);
                    push(MOMENTUM, of, Elements { parameter, elements });
                }
            }
        }
    }
}

/// Returns the names of the optimizer states of a parameter.
fn states_of(zero: &ShardedState, all: &[String], parameter: usize) -> Vec<String> {
    let own = zero.state_names_of(&zero.model().parameters()[parameter]);
    all.iter().filter(|name| own.contains(&name.as_str())).cloned().collect()
}

/// Describes the tensor that stores `piece`, for the list of a shard's tensors.
pub(crate) fn tensor(
    piece: &LocalPiece,
    (name, parameter): (&str, usize),
    entry: &ParameterEntry,
    all: &[String],
) -> ShardTensor {
    let state = all.iter().position(|state| *state == piece.state);
    ShardTensor {
        name: piece.tensor_name(name),
        kind: state.map_or(Kind::OuterMomentum, Kind::State),
        dtype: entry.dtype(),
        range: Elements { parameter, elements: piece.stored(entry, all) },
    }
}
