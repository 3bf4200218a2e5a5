//! The layout of a rank's swap files: the position of each segment's parts.

use std::ops::Range;

use zero_pipeline::{Coordinates, Item, SegmentId, Stages, Tier, Tiers};
use zero_tier::align;

use crate::layout::Layout;
use crate::options::Widths;
use crate::segment::Segment;
use crate::states::Column;

/// Position of a segment in the swap files. Offsets are in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileLayout {
    pub(crate) tiers: Tiers,
    /// Number of elements of this rank's part.
    pub(crate) elements: usize,
    /// Number of elements per tile; the last tile may have fewer. A matrix that is updated as a whole is one tile.
    pub(crate) tile: usize,
    /// Number of bytes per element of the working dtype.
    pub(crate) width: usize,
    /// How each optimizer state is stored; the master, if there is one, is last.
    pub(crate) columns: Vec<Column>,
    /// Offset in the parameters' file.
    parameters_at: u64,
    /// Offset of the tiles in the optimizer's file. The gradients follow at `gradients_at`.
    state_at: u64,
    gradients_at: u64,
    /// Offset of the copy of the weights, which is kept while averages replace the weights. It follows the gradients.
    pub(crate) kept_at: u64,
    /// Whether the file has room for the copy at `kept_at`.
    pub(crate) has_kept: bool,
    /// Offsets at which the next segment begins: (in the optimizer's file, in the parameters' file).
    ends: (u64, u64),
}

/// Sizes of the swap files in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DiskBytes {
    /// The file with optimizer state, masters and gradients.
    pub optimizer: u64,
    /// The file with parameters.
    pub parameters: u64,
}

impl DiskBytes {
    pub(crate) fn of(places: &[Option<FileLayout>]) -> Self {
        let (optimizer, parameters) = places.iter().flatten().last().map_or((0, 0), |place| place.ends);
        Self { optimizer, parameters }
    }
}

/// For each file, whether it transfers ordinary vectors, which need bounce buffers, in addition to aligned buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DiskVectors {
    /// Gradients, in the optimizer's file.
    pub(crate) gradients: bool,
    /// Parameters, in the parameters' file.
    pub(crate) parameters: bool,
}

impl DiskVectors {
    pub(crate) fn of(places: &[Option<FileLayout>]) -> Self {
        let any = |of: fn(&Tiers) -> Tier| places.iter().flatten().any(|place| of(&place.tiers) == Tier::Nvme);
        Self { gradients: any(|tiers| tiers.gradients), parameters: any(|tiers| tiers.parameters) }
    }
}

/// Returns the sizes of the swap files of the rank at `at`.
#[must_use]
pub fn disk_bytes(layout: &Layout, stages: &Stages, at: Coordinates, widths: &Widths) -> DiskBytes {
    DiskBytes::of(&places(layout, stages, at, widths))
}

/// Returns the bytes of each buffer used to transfer an item on the rank at `at`. A tile has one buffer each for its
/// states, gradients and parameters, if they are offloaded.
#[must_use]
pub fn disk_buffers(layout: &Layout, stages: &Stages, at: Coordinates, widths: &Widths, item: Item) -> Vec<u64> {
    let (Item::Parameters { segment } | Item::Gradients { segment } | Item::Tile { segment, .. }) = item else {
        return vec![];
    };
    let Some(place) = place(layout, stages, at, widths, segment, (0, 0)) else { return vec![] };
    let bytes = |elements: usize, width: usize| align((elements * width) as u64);
    let sizes: Vec<u64> = match item {
        Item::Parameters { .. } => place.parts().map(|part| bytes(part.len(), place.width)).collect(),
        Item::Gradients { .. } => vec![bytes(place.elements, 4)],
        Item::Tile { index, .. } => {
            let (tiers, elements) = (place.tiers, place.range(index).len());
            let of = |tier: Tier, bytes: u64| (tier == Tier::Nvme).then_some(bytes);
            let parts = [
                of(tiers.optimizer, place.record(index)),
                of(tiers.gradients, bytes(elements, 4)),
                of(tiers.parameters, bytes(elements, widths.parameter)),
            ];
            parts.into_iter().flatten().collect()
        }
        Item::Activations { .. } => vec![],
    };
    sizes.into_iter().filter(|&bytes| bytes > 0).collect()
}

/// Returns the layout of all segments of the rank at `at`.
pub(crate) fn places(layout: &Layout, stages: &Stages, at: Coordinates, widths: &Widths) -> Vec<Option<FileLayout>> {
    let mut next = (0, 0);
    let of_segment = |id| {
        let place = place(layout, stages, at, widths, id, next);
        next = place.as_ref().map_or(next, |place| place.ends);
        place
    };
    (0..layout.segments().len()).map(of_segment).collect()
}

/// Returns the layout of a segment that begins at the offsets `next` (in the optimizer's file, in the parameters'
/// file). Returns `None` if no part of the segment is offloaded on this rank.
fn place(
    layout: &Layout,
    stages: &Stages,
    at: Coordinates,
    widths: &Widths,
    id: SegmentId,
    next: (u64, u64),
) -> Option<FileLayout> {
    let segment = &layout.segments()[id];
    if segment.tiers == Tiers::default() || !stages.holds(at.stage, id) {
        return None;
    }
    let elements = segment.held(segment.placements.optimizer, at.shard).len();
    let mut tiers = segment.tiers;
    if stages.owner(id) != at.stage {
        // Another stage updates the segment, so only parameters are stored here.
        tiers = Tiers { parameters: tiers.parameters, ..Tiers::default() };
    }
    let stored = segment.width(widths.parameter);
    let mut place = FileLayout {
        tiers,
        elements,
        // Tiles fill whole pages even if elements are single bytes.
        tile: layout.tile_of(segment) * if stored == 1 { 4 } else { 1 },
        width: stored,
        columns: columns(segment, widths),
        parameters_at: next.1,
        state_at: next.0,
        gradients_at: 0,
        kept_at: 0,
        has_kept: widths.kept > 0,
        ends: next,
    };
    let state = match tiers.optimizer {
        Tier::Memory => 0,
        Tier::Nvme => (0..place.tiles()).map(|index| place.record(index)).sum(),
    };
    place.gradients_at = place.state_at + state;
    let bytes = |tier, width: usize| if tier == Tier::Nvme { align((elements * width) as u64) } else { 0 };
    place.kept_at = place.gradients_at + bytes(tiers.gradients, 4);
    place.ends =
        (place.kept_at + bytes(tiers.optimizer, widths.kept), place.parameters_at + bytes(tiers.parameters, stored));
    Some(place)
}

/// Returns how each optimizer state of a tile is stored; the master, if there is one, is last.
pub(super) fn columns(segment: &Segment, widths: &Widths) -> Vec<Column> {
    let master = (widths.master > 0).then_some(Column::F32);
    segment.columns(widths).into_iter().chain(master).collect()
}

/// Returns the size in bytes of one column of a tile with `elements` elements, rounded up to whole pages.
pub(super) fn stride(column: &Column, elements: usize) -> usize {
    align(column.bytes(elements) as u64) as usize
}

impl FileLayout {
    /// Returns the number of tiles of this rank. Ranks with larger parts may have more tiles.
    pub(crate) fn tiles(&self) -> usize {
        self.elements.div_ceil(self.tile)
    }

    /// Returns the range of a tile within this rank's part; empty if this rank has fewer tiles.
    pub(crate) fn range(&self, index: usize) -> Range<usize> {
        let start = (index * self.tile).min(self.elements);
        start..(start + self.tile).min(self.elements)
    }

    /// Splits this rank's part into ranges of at most 16 MiB, in whole pages except for the last.
    pub(crate) fn parts(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (elements, size) = (self.elements, (16 << 20) / self.width);
        (0..elements).step_by(size).map(move |start| start..(start + size).min(elements))
    }

    /// Returns the bytes of all states of a tile, and of its master if there is one.
    pub(crate) fn record(&self, index: usize) -> u64 {
        self.before(self.columns.len(), self.range(index).len())
    }

    pub(crate) fn state_at(&self, index: usize) -> u64 {
        // All earlier tiles are full.
        self.state_at + index as u64 * self.before(self.columns.len(), self.tile)
    }

    /// Returns the offset and the size in bytes of a state of a tile.
    pub(crate) fn column_at(&self, index: usize, kind: usize) -> (u64, usize) {
        let elements = self.range(index).len();
        (self.state_at(index) + self.before(kind, elements), stride(&self.columns[kind], elements))
    }

    /// Returns the bytes of the first `count` columns of a tile of `elements` elements.
    fn before(&self, count: usize, elements: usize) -> u64 {
        self.columns[..count].iter().map(|column| stride(column, elements) as u64).sum()
    }

    pub(crate) fn gradients_at(&self, index: usize) -> u64 {
        self.gradients_at + (self.range(index).start * 4) as u64
    }

    pub(crate) fn parameters_at(&self, index: usize) -> u64 {
        self.parameters_at + (self.range(index).start * self.width) as u64
    }
}
