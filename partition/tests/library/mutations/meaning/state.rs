//! The state of a program that is executed symbolically: segments, tiles and micro-batches.

use std::collections::BTreeSet;

/// One backward's contribution: (micro-batch, layer, versions of the parameters that forward and backward read).
type Contribution = (usize, usize, Vec<u32>);
/// A sum over micro-batches, in order; each summand lists its contributions in order.
pub(super) type Sum = Vec<Vec<Contribution>>;

/// The full parameters of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Values {
    Absent,
    /// Every element has this version.
    Version(u32),
    /// This rank's part has the new version; the other parts have the old one.
    Mixed,
}

pub(super) struct Segment {
    pub(super) full: Values,
    /// Version of the shard, if parameters are sharded.
    pub(super) shard: u32,
    /// Version of the secondary shard; `u32::MAX` before it is filled.
    pub(super) secondary: u32,
    /// Results of gathers in flight, from shards and from secondary shards.
    pub(super) gathering: Option<u32>,
    pub(super) gathering_secondary: Option<u32>,
    pub(super) open: Vec<Contribution>,
    pub(super) accumulator: Sum,
    pub(super) reduced: Sum,
    pub(super) update: Option<Sum>,
    /// Offloaded state: the parameter shard that was read, the gradients, and the versions of the tiles.
    pub(super) fetched: Option<u32>,
    pub(super) gradients_on_disk: Option<Sum>,
    pub(super) reading_gradients: Option<Sum>,
    pub(super) tiles_on_disk: Vec<u32>,
    pub(super) tiles: Vec<Option<Tile>>,
    /// The gradients used by the update of each tile.
    pub(super) tile_updates: Vec<Sum>,
    /// The gradients with which each tile on the disk was measured; `None` if it was not measured.
    pub(super) measured: Vec<Option<Sum>>,
}

pub(super) struct Tile {
    /// The tile is in transfer and must not be accessed.
    pub(super) moving: bool,
    /// The gradients with which the tile was measured; `None` if it was not measured.
    pub(super) measured: Option<Sum>,
    pub(super) version: u32,
    pub(super) gradients: Sum,
}

impl Segment {
    /// Returns the common version of all tiles on the disk, if they agree.
    pub(super) fn stored(&self) -> Option<u32> {
        let first = self.tiles_on_disk.first().copied()?;
        self.tiles_on_disk.iter().all(|version| *version == first).then_some(first)
    }
}

#[derive(Default)]
pub(super) struct MicroBatch {
    pub(super) loaded: bool,
    /// Layers that have run, with the versions that they read.
    pub(super) forward: Vec<Vec<u32>>,
    /// The layer whose inputs are available.
    pub(super) flow: Option<usize>,
    /// Layers whose inputs are kept, and layers with saved activations.
    pub(super) kept: BTreeSet<usize>,
    /// Kept inputs that are being written, and kept inputs on the disk.
    pub(super) leaving: BTreeSet<usize>,
    pub(super) on_disk: BTreeSet<usize>,
    pub(super) saved: BTreeSet<usize>,
    /// Number of layers whose backward has not finished.
    pub(super) waiting: usize,
}

/// Returns the version of each segment that a layer reads; `None` if one of them is incomplete.
pub(super) fn read(segments: &[Segment], wanted: &[usize]) -> Option<Vec<u32>> {
    let version = |&s: &usize| match segments[s].full {
        Values::Version(version) => Some(version),
        Values::Absent | Values::Mixed => None,
    };
    wanted.iter().map(version).collect()
}
