//! Memory for the partial sums of a cell, and for 16-bit floats widened to f32.

use std::ops::Range;

use crate::buffers::dtype::Dtype;
use crate::collective::step::Vector;
use crate::tree;

/// Partial sums of a vector.
pub(super) struct Sums {
    /// Aligned for every element type.
    words: Vec<u64>,
    /// The byte range of each sum.
    pub(super) at: Vec<Range<usize>>,
}

impl Sums {
    /// Creates memory for sums of these lengths in bytes.
    pub(super) fn new(lengths: impl Iterator<Item = usize>) -> Sums {
        let mut end = 0;
        let next = |length: usize| {
            let start = usize::next_multiple_of(end, size_of::<u64>());
            end = start + length;
            start..end
        };
        let at = lengths.map(next).collect();
        Sums { words: vec![0; end.div_ceil(size_of::<u64>())], at }
    }

    pub(super) fn bytes(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.words)
    }
}

/// The part of a vector's sum over all cells that the ranks of one cell need.
pub(super) struct CellSum {
    /// The byte range of that part in the vector.
    region: Range<usize>,
    /// The slice of each rail, relative to the start of the region.
    pub(super) slices: Vec<Range<usize>>,
    sum: Sums,
}

impl CellSum {
    /// Creates memory for the sum of a region of a vector. The region has one slice for each rail.
    pub(super) fn new(region: Range<usize>, slices: Vec<Range<usize>>) -> CellSum {
        let sum = Sums::new([region.len()].into_iter());
        let mut whole = CellSum { region, slices: vec![], sum };
        whole.slices = slices.iter().map(|slice| whole.within(slice)).collect();
        whole
    }

    /// Converts a byte range of the vector to a byte range of the region.
    pub(super) fn within(&self, range: &Range<usize>) -> Range<usize> {
        range.start - self.region.start..range.end - self.region.start
    }

    pub(super) fn bytes(&mut self) -> &mut [u8] {
        &mut self.sum.bytes()[..self.region.len()]
    }

    pub(super) fn slice(&mut self, rail: usize) -> &mut [u8] {
        let slice = self.slices[rail].clone();
        &mut self.bytes()[slice]
    }
}

/// The values of a vector of 16-bit floats in f32; empty for a vector of another type.
pub(super) struct Wide {
    pub(super) buffer: Vec<f32>,
    pub(super) shard: Vec<f32>,
}

/// Returns whether a vector holds 16-bit floats.
pub(super) fn is_half(vector: &Vector<'_>) -> bool {
    matches!(vector.dtype, Dtype::Bf16 | Dtype::F16)
}

impl Wide {
    pub(super) fn of(vector: &Vector<'_>) -> Wide {
        if !is_half(vector) {
            return Wide { buffer: vec![], shard: vec![] };
        }
        let shard = vector.shard.as_ref().map_or(0, |shard| shard.len() / vector.dtype.size());
        Wide { buffer: tree::widened(vector.dtype, vector.buffer), shard: vec![0.0; shard] }
    }

    /// Returns the vector in f32, or unchanged if it does not hold 16-bit floats.
    pub(super) fn vector<'a>(&'a mut self, narrow: &'a mut Vector<'_>) -> Vector<'a> {
        let is_half = is_half(narrow);
        let Vector { dtype, buffer, shard, ranges, .. } = narrow;
        if !is_half {
            return Vector { shard: shard.as_deref_mut(), ..Vector::new(*dtype, buffer, ranges.clone()) };
        }
        let scale = |at: usize| at / dtype.size() * Dtype::F32.size();
        let ranges = ranges.iter().map(|range| scale(range.start)..scale(range.end)).collect();
        let shard = shard.as_ref().map(|_| bytemuck::cast_slice_mut(&mut self.shard));
        Vector { shard, ..Vector::new(Dtype::F32, bytemuck::cast_slice_mut(&mut self.buffer), ranges) }
    }
}
