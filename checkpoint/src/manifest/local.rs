//! The replicates of a run with local steps in the manifest, and the tensors that only such a run saves.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{ParameterEntry, is_zero, tensor_name};

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

/// Checks that the replicates' tensors of a parameter cover each of its elements once.
pub(super) fn check(
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
