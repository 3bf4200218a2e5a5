//! The part of a checkpoint that only a run with local steps has. Each replicate of such a run trains independently and
//! has optimizer states of its own. The outer momentum is divided among the replicates. All replicates have equal
//! parameters when a checkpoint is saved.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use zero_comm::{Buffer, Communicator};
use zero_partition::{Kind, OuterShare, Range as Elements, ShardedState};
use zero_pipeline::{Coordinates, Placement};

use crate::error::CheckpointError;
use crate::layout::{ShardTensor, stored_elements};
use crate::manifest::{ParameterEntry, is_zero, tensor_name};

/// Name of the outer optimizer's momentum.
pub(crate) const MOMENTUM: &str = "outer_momentum";

/// The replicates of a run with local steps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LocalSteps {
    /// Optimizer steps that each replicate has taken, excluding those that it skipped.
    pub updates: Vec<u64>,
    /// Whether the outer optimizer has a momentum.
    pub momentum: bool,
}

/// A tensor of a replicate, saved in addition to the tensors of the parameter's `pieces`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LocalPiece {
    /// Name of the optimizer state, or `outer_momentum`.
    pub state: String,
    /// The replicate, from 1 on; 0 for `outer_momentum`, which belongs to all replicates. The states of replicate 0 are
    /// in the parameter's `pieces`.
    pub replicate: usize,
    /// Index into `shards`.
    pub shard: usize,
    /// Index of the slice, if the parameter was cut. The key is left out for slice 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub slice: usize,
    /// First element.
    pub start: usize,
    /// One past the last element.
    pub end: usize,
    /// CRC-32 (IEEE) of the tensor's bytes. The tensor is named `name@start/state.replicate`, or
    /// `name@start/outer_momentum`.
    pub crc32: u32,
}

impl LocalPiece {
    /// Returns the tensor's name, which begins with the name `parameter`.
    pub(crate) fn tensor_name(&self, parameter: &str) -> String {
        let name = tensor_name(parameter, self.start, Some(&self.state));
        if self.replicate == 0 { name } else { format!("{name}.{}", self.replicate) }
    }

    /// Returns the range of values that the tensor holds.
    pub(crate) fn stored(&self, entry: &ParameterEntry, all: &[String]) -> Range<usize> {
        let index = entry.own_states(all).iter().position(|state| *state == self.state);
        match index {
            Some(_) => entry.stored(index, self.start..self.end),
            None => self.start..self.end,
        }
    }
}

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

/// Checks that the replicates' tensors of a parameter cover each of its elements once.
pub(crate) fn check(
    (name, entry): (&str, &ParameterEntry),
    of_run: Option<&LocalSteps>,
    (states, slices, shards): (&[String], &[usize], usize),
) -> Result<(), String> {
    let of_replicate = |replicate| entry.own_states(states).iter().map(move |state| (state.as_str(), replicate));
    let trained = of_run.filter(|_| !entry.frozen);
    let mut expected: Vec<(&str, usize)> =
        trained.into_iter().flat_map(|run| (1..run.updates.len()).flat_map(of_replicate)).collect();
    if trained.is_some_and(|run| run.momentum) {
        expected.push((MOMENTUM, 0));
    }
    let mut found = 0;
    for (state, replicate) in expected {
        let mut covered = vec![0; slices.len()];
        for piece in entry.local.iter().filter(|piece| piece.state == state && piece.replicate == replicate) {
            let next = covered.get_mut(piece.slice).filter(|next| piece.start == **next);
            let Some(next) = next.filter(|_| piece.end > piece.start && piece.shard < shards) else {
                return Err(format!(
                    "`{state}` of `{name}` in replicate {replicate} has a gap or an overlap at element {}",
                    piece.start
                ));
            };
            (*next, found) = (piece.end, found + 1);
        }
        if covered != slices {
            let [covered, elements] = [&covered[..], slices].map(|all| all.iter().sum::<usize>());
            return Err(format!(
                "`{state}` of `{name}` in replicate {replicate} covers {covered} of {elements} elements"
            ));
        }
    }
    match found == entry.local.len() {
        true => Ok(()),
        false => Err(format!("`{name}` has states of replicates that the run does not have")),
    }
}
