//! Collectives of a group on several hosts: over shared memory within a host, and over the network with one copy per
//! host.
//!
//! The group is divided into [`cells`]. A vector is divided into as many slices as the smallest cell has ranks. The
//! ranks with the same index in their cells form a *rail*, which moves one slice between the cells. An all_reduce has
//! three phases: every cell reduces, each rank its slice; every rail reduces its slice over the cells; every cell
//! gathers the slices. The traffic between hosts is that of flat collectives with one rank per cell. The result is
//! bit-identical to the flat tree because a cell is a node of that tree. 16-bit floats are summed in f32 throughout and
//! rounded once.
//!
//! In an all_to_all, the parts between ranks of one cell stay in its shared memory, and each other part travels directly
//! over a connection between its two ranks. Every byte between hosts then crosses the network once and is copied
//! nowhere else. Rails would need fewer connections, but every part would pass through a third rank, which would need
//! memory for it.

mod cells;

use std::ops::Range;

use crate::buffer::Dtype;
use crate::health::Failure;
use crate::parts::Parts;
use crate::signature::Signature;
use crate::step::{Carried, Collective, Deadline, Reduction, Step, consecutive, even_counts};
use crate::tree;

pub use cells::cells;

/// One rank's end of a group on several hosts.
pub(crate) struct Hierarchy {
    /// The cells as ranges of group ranks; at least two.
    pub(crate) cells: Vec<Range<usize>>,
    /// This rank in the group.
    pub(crate) rank: usize,
    /// The collectives of this rank's cell.
    pub(crate) cell: Box<dyn Collective>,
    /// The collectives of this rank's rail; `None` if some cell has no rank with this index.
    pub(crate) rail: Option<Box<dyn Collective>>,
    /// The connections to the ranks of other cells, for the parts of an all_to_all.
    pub(crate) direct: Box<dyn Collective>,
}

/// Returns the number of rails: the size of the smallest cell.
pub(crate) fn rails(cells: &[Range<usize>]) -> usize {
    cells.iter().map(ExactSizeIterator::len).min().unwrap_or(0)
}

impl Collective for Hierarchy {
    fn run(&mut self, mut step: Step<'_>) -> Result<Carried, Failure> {
        step.place_source(self.rank);
        match step.reduce {
            Some(Reduction { dtype: Dtype::Bf16 | Dtype::F16, .. }) => self.widened(step),
            Some(_) if step.gather => self.all_reduce(step),
            Some(_) => self.reduce_scatter(step),
            None if step.gather => self.gather(step),
            None => self.barrier(&Task::of(&step)),
        }
    }

    /// Exchanges the parts between ranks of one cell in the cell, and the others directly.
    fn exchange(&mut self, parts: Parts<'_>) -> Result<Carried, Failure> {
        let Parts { signature, input, output, mut pairs, deadline } = parts;
        // A rank in another collective uses cells and rails only, so the ranks must first meet there.
        self.barrier(&Task { signature: signature.of_all(), reduce: None, deadline })?;
        let cell = self.cells[self.own()].clone();
        let of_cell = pairs[cell].iter_mut().map(Option::take).collect();
        let output = &mut *output;
        let mut carried = self.cell.exchange(Parts { signature, input, output, pairs: of_cell, deadline })?;
        carried += self.direct.exchange(Parts { signature, input, output, pairs, deadline })?;
        Ok(carried)
    }
}

/// What the steps of a collective have in common.
struct Task {
    signature: Signature,
    reduce: Option<Reduction>,
    deadline: Deadline,
}

impl Task {
    fn of(step: &Step<'_>) -> Task {
        Task { signature: step.signature, reduce: step.reduce, deadline: step.deadline }
    }

    fn gather<'a>(&self, buffer: &'a mut [u8], ranges: Vec<Range<usize>>) -> Step<'a> {
        let Task { signature, deadline, .. } = *self;
        Step { signature, reduce: None, buffer, source: None, shard: None, ranges, gather: true, deadline }
    }

    fn reduce<'a>(&self, buffer: &'a mut [u8], ranges: Vec<Range<usize>>) -> Step<'a> {
        Step { reduce: self.reduce, gather: false, ..self.gather(buffer, ranges) }
    }

    fn reduce_into<'a>(&self, buffer: &'a mut [u8], ranges: Vec<Range<usize>>, shard: &'a mut [u8]) -> Step<'a> {
        Step { shard: Some(shard), ..self.reduce(buffer, ranges) }
    }

    fn all_reduce<'a>(&self, buffer: &'a mut [u8], ranges: Vec<Range<usize>>) -> Step<'a> {
        Step { reduce: self.reduce, ..self.gather(buffer, ranges) }
    }

    /// Returns the size of an element in bytes; 1 without a reduction.
    fn unit(&self) -> usize {
        self.reduce.map_or(1, |reduce| reduce.dtype.size())
    }
}

impl Hierarchy {
    fn barrier(&mut self, task: &Task) -> Result<Carried, Failure> {
        let nothing = |ranks: usize| vec![0..0; ranks];
        let (ranks, cells) = (self.cells[self.own()].len(), self.cells.len());
        self.cell.run(task.gather(&mut [], nothing(ranks)))?;
        if let Some(rail) = &mut self.rail {
            rail.run(task.gather(&mut [], nothing(cells)))?;
        }
        self.cell.run(task.gather(&mut [], nothing(ranks)))?;
        Ok(Carried::streamed(0))
    }

    fn all_reduce(&mut self, step: Step<'_>) -> Result<Carried, Failure> {
        let (task, buffer) = (Task::of(&step), step.buffer);
        let slices = cut(&(0..buffer.len()), rails(&self.cells), task.unit());
        let in_cell = self.one_each(&slices);
        let mut carried = Carried::streamed(0);
        carried += self.cell.run(task.reduce(buffer, in_cell.clone()))?;
        let (place, cells) = (self.place(), self.cells.len());
        if let Some(rail) = &mut self.rail {
            let slice = &mut buffer[slices[place].clone()];
            let parts = cut(&(0..slice.len()), cells, task.unit());
            carried += rail.run(task.all_reduce(slice, parts))?;
        }
        carried += self.cell.run(task.gather(buffer, in_cell))?;
        Ok(carried)
    }

    fn reduce_scatter(&mut self, step: Step<'_>) -> Result<Carried, Failure> {
        let task = Task::of(&step);
        let Step { buffer, shard, ranges, .. } = step;
        let shard = shard.unwrap_or_default();
        let (own, place, rails) = (self.own(), self.place(), rails(&self.cells));
        // If all cells have the same size, each rank's slice of a cell is exactly the range of the rank with the same
        // index.
        let even = self.cells.iter().all(|cell| cell.len() == rails);
        let slices = |cell: &Range<usize>| match even {
            true => ranges[cell.clone()].to_vec(),
            false => cut(&region(&ranges, cell), rails, task.unit()),
        };
        // The sums that this rank's cell computes for this rank's rail: one slice per cell.
        let mut end = 0;
        let mut sums_at = Vec::new();
        for cell in &self.cells {
            let length = slices(cell).get(place).map_or(0, ExactSizeIterator::len);
            let start = usize::next_multiple_of(end, size_of::<u64>());
            end = start + length;
            sums_at.push(start..end);
        }
        let mut sums = vec![0u64; end.div_ceil(size_of::<u64>())];
        let sums: &mut [u8] = bytemuck::cast_slice_mut(&mut sums);
        let mut carried = Carried::streamed(0);
        for (cell, sum) in self.cells.iter().zip(&sums_at) {
            let in_cell = one_each(&slices(cell), self.cells[own].len());
            carried += self.cell.run(task.reduce_into(buffer, in_cell, &mut sums[sum.clone()]))?;
        }
        if even {
            if let Some(rail) = &mut self.rail {
                carried += rail.run(task.reduce_into(sums, sums_at, shard))?;
            }
            return Ok(carried);
        }
        let region = region(&ranges, &self.cells[own]);
        let from_start = |range: &Range<usize>| range.start - region.start..range.end - region.start;
        let slices: Vec<Range<usize>> = slices(&self.cells[own]).iter().map(from_start).collect();
        let mut result = vec![0u64; region.len().div_ceil(size_of::<u64>())];
        let result: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut result)[..region.len()];
        if let Some(rail) = &mut self.rail {
            carried += rail.run(task.reduce_into(sums, sums_at, &mut result[slices[place].clone()]))?;
        }
        carried += self.cell.run(task.gather(result, self.one_each(&slices)))?;
        shard.copy_from_slice(&result[from_start(&ranges[self.rank])]);
        Ok(carried)
    }

    /// Runs an all_gather or a broadcast, in which one rank owns the whole vector.
    fn gather(&mut self, step: Step<'_>) -> Result<Carried, Failure> {
        let task = Task::of(&step);
        let Step { buffer, ranges, .. } = step;
        let (own, place, rails) = (self.own(), self.place(), rails(&self.cells));
        let slices: Vec<Vec<Range<usize>>> =
            self.cells.iter().map(|cell| cut(&region(&ranges, cell), rails, task.unit())).collect();
        let mut carried = Carried::streamed(0);
        if !region(&ranges, &self.cells[own]).is_empty() {
            carried += self.cell.run(task.gather(buffer, ranges[self.cells[own].clone()].to_vec()))?;
        }
        if let Some(rail) = &mut self.rail {
            let of_rail = slices.iter().map(|slices| slices[place].clone()).collect();
            carried += rail.run(task.gather(buffer, of_rail))?;
        }
        for (cell, slices) in slices.iter().enumerate() {
            if cell != own && !region(&ranges, &self.cells[cell]).is_empty() {
                carried += self.cell.run(task.gather(buffer, self.one_each(slices)))?;
            }
        }
        Ok(carried)
    }

    /// Runs a reduction of 16-bit floats as one of f32, because partial sums must not be rounded.
    fn widened(&mut self, step: Step<'_>) -> Result<Carried, Failure> {
        let Some(Reduction { op, dtype }) = step.reduce else { return self.run(step) };
        let mut wide = tree::widened(dtype, step.buffer);
        let mut wide_shard = step.shard.as_ref().map(|shard| vec![0f32; shard.len() / dtype.size()]);
        let scale = |at: usize| at / dtype.size() * Dtype::F32.size();
        let carried = self.run(Step {
            signature: step.signature,
            reduce: Some(Reduction { op, dtype: Dtype::F32 }),
            buffer: bytemuck::cast_slice_mut(&mut wide),
            source: None,
            shard: wide_shard.as_mut().map(|shard| bytemuck::cast_slice_mut(shard)),
            ranges: step.ranges.iter().map(|range| scale(range.start)..scale(range.end)).collect(),
            gather: step.gather,
            deadline: step.deadline,
        })?;
        match (step.shard, wide_shard) {
            (Some(shard), Some(wide)) => tree::narrow(dtype, &wide, shard),
            _ => tree::narrow(dtype, &wide, step.buffer),
        }
        Ok(carried)
    }

    /// Returns the index of this rank's cell.
    fn own(&self) -> usize {
        self.cells.partition_point(|cell| cell.end <= self.rank)
    }

    /// Returns this rank's index in its cell.
    fn place(&self) -> usize {
        self.rank - self.cells[self.own()].start
    }

    fn one_each(&self, slices: &[Range<usize>]) -> Vec<Range<usize>> {
        one_each(slices, self.cells[self.own()].len())
    }
}

/// Returns the slices by rank of a cell: one per rail, empty for the remaining ranks.
fn one_each(slices: &[Range<usize>], ranks: usize) -> Vec<Range<usize>> {
    let slice = |rank| slices.get(rank).cloned().unwrap_or(0..0);
    (0..ranks).map(slice).collect()
}

/// Returns the region that covers the consecutive ranges of a cell's ranks.
fn region(ranges: &[Range<usize>], cell: &Range<usize>) -> Range<usize> {
    ranges[cell.start].start..ranges[cell.end - 1].end
}

/// Divides a range into parts of whole elements whose lengths differ by at most one element.
fn cut(range: &Range<usize>, parts: usize, unit: usize) -> Vec<Range<usize>> {
    let parts = consecutive(even_counts(range.len() / unit, parts), unit);
    parts.into_iter().map(|part| part.start + range.start..part.end + range.start).collect()
}
