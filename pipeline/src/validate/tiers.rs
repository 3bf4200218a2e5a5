//! Tracks whether each offloaded item is on the disk, in flight or in memory. Each item cycles through these states in
//! this order.

use std::collections::{BTreeMap, BTreeSet};

use super::check::{Check, ensure};
use crate::ids::SegmentId;
use crate::shape::ModelShape;
use crate::tier::{Item, Tier};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ItemState {
    Disk,
    Fetching,
    Memory,
    Offloading,
}

/// State of the items of one rank. An item that does not exist yet has no state.
pub(super) struct Items<'a> {
    shape: &'a ModelShape,
    places: BTreeMap<Item, ItemState>,
    /// Tiles measured in this step.
    measured: BTreeSet<Item>,
    /// Number of tiles that must be measured before an update.
    to_measure: usize,
    /// Tiles updated in this step.
    updated: BTreeSet<Item>,
}

impl<'a> Items<'a> {
    /// Creates the state between steps: optimizer state and parameters are on the disk, and there are no gradients.
    pub(super) fn new(shape: &'a ModelShape, holds: impl Fn(SegmentId) -> (bool, bool)) -> Self {
        let mut places = BTreeMap::new();
        for (segment, of) in shape.segments.iter().enumerate() {
            let (held, owned) = holds(segment);
            if held && of.tiers.parameters == Tier::Nvme {
                places.insert(Item::Parameters { segment }, ItemState::Disk);
            }
            if owned {
                places.extend((0..of.tiers.tiles).map(|index| (Item::Tile { segment, index }, ItemState::Disk)));
            }
        }
        let two_passes =
            |item: &&Item| matches!(item, Item::Tile { segment, .. } if shape.segments[*segment].tiers.two_passes);
        let to_measure = places.keys().filter(two_passes).count();
        Self { shape, places, measured: BTreeSet::new(), to_measure, updated: BTreeSet::new() }
    }

    fn turn(&mut self, item: Item, from: ItemState, to: ItemState) -> Check {
        match self.places.get_mut(&item) {
            Some(place) if *place == from => {
                *place = to;
                Ok(())
            }
            Some(place) => Err(format!("this needs {item} {}, not {}", words(from), words(*place))),
            None => Err(format!("this rank has no {item} to move")),
        }
    }

    /// Starts a fetch. `is_reduced` tells whether a segment's gradients are complete.
    pub(super) fn fetch(&mut self, item: Item, is_reduced: impl Fn(SegmentId) -> bool) -> Check {
        match item {
            Item::Parameters { segment } => {
                let is_new = |tile: &Item| matches!(tile, Item::Tile { segment: s, .. } if *s == segment);
                let mut tiles = self.updated.iter().filter(|tile| is_new(tile));
                ensure(tiles.all(|tile| self.places.get(tile) == Some(&ItemState::Disk)), || {
                    "the parameters on the disk are stale: an updated tile was not written back".into()
                })?;
            }
            Item::Tile { segment, .. } if self.of(segment).gradients == Tier::Nvme => {
                let there = self.places.get(&Item::Gradients { segment }) == Some(&ItemState::Disk);
                ensure(there && is_reduced(segment), || "its gradients are not on the disk".into())?;
            }
            _ => {}
        }
        self.turn(item, ItemState::Disk, ItemState::Fetching)
    }

    pub(super) fn await_fetch(&mut self, item: Item) -> Check {
        self.turn(item, ItemState::Fetching, ItemState::Memory)
    }

    pub(super) fn offload(&mut self, item: Item) -> Check {
        let changes = !matches!(item, Item::Parameters { .. });
        ensure(changes, || "parameters are written with the tiles that update them, not separately".into())?;
        let is_changed = self.updated.contains(&item) || self.measured.contains(&item);
        let wanted = !matches!(item, Item::Tile { .. }) || is_changed;
        ensure(wanted, || "the tile has not been updated".into())?;
        self.turn(item, ItemState::Memory, ItemState::Offloading)
    }

    pub(super) fn await_offload(&mut self, item: Item) -> Check {
        self.turn(item, ItemState::Offloading, ItemState::Disk)
    }

    /// Consumes the shard in memory for a gather.
    pub(super) fn gather(&mut self, segment: SegmentId) -> Check {
        match self.of(segment).parameters {
            Tier::Memory => Ok(()),
            Tier::Nvme => self.turn(Item::Parameters { segment }, ItemState::Memory, ItemState::Disk),
        }
    }

    /// Records that a reduction has added a micro-batch's gradients to those of earlier micro-batches.
    pub(super) fn reduced(&mut self, segment: SegmentId, is_first: bool) -> Check {
        let item = Item::Gradients { segment };
        match (self.of(segment).gradients, is_first) {
            (Tier::Memory, _) => Ok(()),
            (Tier::Nvme, true) => {
                self.places.insert(item, ItemState::Memory);
                Ok(())
            }
            (Tier::Nvme, false) => self.turn(item, ItemState::Memory, ItemState::Memory),
        }
    }

    /// Checks that the norm can be computed: the gradients are kept in memory, or they are on the disk. In the second
    /// case, their squares were summed when they were offloaded.
    pub(super) fn norm(&self, segment: SegmentId) -> Check {
        let place = self.places.get(&Item::Gradients { segment });
        ensure(self.of(segment).gradients == Tier::Memory || place == Some(&ItemState::Disk), || {
            format!("the gradients of segment {segment} are not on the disk")
        })
    }

    /// Measures a tile.
    pub(super) fn measure(&mut self, segment: SegmentId, index: usize) -> Check {
        let item = Item::Tile { segment, index };
        ensure(self.of(segment).two_passes, || "this segment is updated in one pass".into())?;
        self.turn(item, ItemState::Memory, ItemState::Memory)?;
        ensure(self.updated.is_empty(), || "a tile has been updated already".into())?;
        ensure(self.measured.insert(item), || "measured twice".into())
    }

    /// Checks that all tiles that must be measured before an update have been measured.
    pub(super) fn are_measured(&self) -> Check {
        let left = self.to_measure - self.measured.len();
        ensure(left == 0, || format!("{left} tiles have not been measured"))
    }

    /// Updates a tile. Returns whether it was the segment's last tile.
    pub(super) fn update(&mut self, segment: SegmentId, index: usize) -> Result<bool, String> {
        let item = Item::Tile { segment, index };
        self.turn(item, ItemState::Memory, ItemState::Memory)?;
        let before = index.checked_sub(1).map(|index| Item::Tile { segment, index });
        ensure(before.is_none_or(|tile| self.updated.contains(&tile)), || {
            "the previous tile has not been updated".into()
        })?;
        ensure(self.updated.insert(item), || "updated twice".into())?;
        Ok(index + 1 == self.of(segment).tiles)
    }

    /// Starts tracking the kept inputs of a layer. The next instruction writes these inputs to the disk.
    pub(super) fn keep(&mut self, item: Item) -> Check {
        ensure(self.places.insert(item, ItemState::Memory).is_none(), || "these inputs were offloaded already".into())
    }

    /// Consumes the inputs of a layer for recomputation, if they are tracked.
    pub(super) fn use_up(&mut self, item: Item) -> Check {
        match self.places.remove(&item) {
            None | Some(ItemState::Memory) => Ok(()),
            Some(place) => Err(format!("this needs {item} in memory, not {}", words(place))),
        }
    }

    pub(super) fn finish(&self) -> Check {
        match self.places.iter().find(|(_, place)| **place != ItemState::Disk) {
            None => Ok(()),
            Some((item, place)) => {
                Err(format!("at the end of the program, {item} must be on the disk, not {}", words(*place)))
            }
        }
    }

    fn of(&self, segment: SegmentId) -> crate::tier::Tiers {
        self.shape.segments[segment].tiers
    }
}

fn words(place: ItemState) -> &'static str {
    match place {
        ItemState::Disk => "on the disk",
        ItemState::Fetching => "being read",
        ItemState::Memory => "in memory",
        ItemState::Offloading => "being written",
    }
}
