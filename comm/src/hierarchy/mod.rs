//! Collectives of a group on several hosts. They use shared memory within a host, and send data over the network once
//! per cell. Usually, each host is one cell.
//!
//! The group is divided into [`cells`]. A vector is divided into as many slices as the smallest cell has ranks. The
//! ranks with the same index in their cells form a *rail*, which moves one slice between the cells. An all_reduce has
//! three phases. First, each rank of a cell reduces its slice over the cell. Then every rail reduces its slice over the
//! cells. Finally, every cell gathers the slices. The traffic between hosts is as large as if each cell were a single
//! rank. The result is bit-identical to a sum over the tree of all ranks, because each cell is a node of that tree.
//! 16-bit floats are summed in f32 throughout and rounded once.
//!
//! In an all_to_all, the parts between ranks of one cell stay in its shared memory. Each other part travels over the
//! connection between its two ranks. A byte for another host therefore crosses the network once, without intermediate
//! copies. If parts travelled over rails only, fewer connections would be needed, but every part would pass through a
//! third rank, which would need memory for it.
//!
//! Rails use the same connections as the parts of an all_to_all. If the ranks of one cell call an all_to_all and those
//! of another cell a different collective, the ranks of a rail therefore receive each other's headers and report both
//! calls.

mod cells;
mod sums;

use std::ops::Range;

use crate::buffers::ranges::{consecutive, even_counts};
use crate::collective::carried::Carried;
use crate::collective::deadline::Deadline;
use crate::collective::parts::Parts;
use crate::collective::reduction::ReduceOp;
use crate::collective::signature::Signature;
use crate::collective::step::{Collective, Membership, Step, Vector};
use crate::health::Failure;
use crate::stream::{Exchange, Subgroup};
use crate::tree;

pub use cells::cells;
pub(crate) use cells::position;
use sums::{CellSum, Sums, Wide, is_half};

/// One rank's end of a group on several hosts.
pub(crate) struct Hierarchy {
    /// The cells as ranges of group ranks; at least two.
    cells: Vec<Range<usize>>,
    /// The collectives of this rank's cell.
    cell: Box<dyn Collective>,
    /// The connections to the ranks of other cells.
    across: Exchange,
    /// This rank's rail; `None` if some cell has no rank with this index.
    rail: Option<Subgroup>,
}

/// Returns the number of rails: the size of the smallest cell.
fn rails(cells: &[Range<usize>]) -> usize {
    cells.iter().map(ExactSizeIterator::len).min().unwrap_or(0)
}

/// Returns the rail of a rank of the group. Each of its members contributes the sum of a cell.
fn rail(of: &Membership, cells: &[Range<usize>]) -> Option<Subgroup> {
    let (own, place) = position(cells, of.rank);
    let rail = || {
        let ranks: Vec<usize> = cells.iter().map(|cell| cell.start + place).collect();
        let members = ranks.iter().map(|&rank| of.members[rank]).collect();
        let weights = cells.iter().map(ExactSizeIterator::len).collect();
        Subgroup { membership: Membership { weights, ..Membership::new(of.group, own, members) }, ranks }
    };
    (place < rails(cells)).then(rail)
}

impl Collective for Hierarchy {
    fn run(&mut self, mut step: Step<'_>) -> Result<Carried, Failure> {
        step.vectors.iter_mut().for_each(|vector| vector.place_source(self.rank()));
        match step.reduce {
            Some(_) if step.vectors.iter().any(is_half) => self.widened(step),
            Some(_) if step.gather => self.all_reduce(step),
            Some(_) => self.reduce_scatter(step),
            None if step.gather => self.gather(step),
            None => self.barrier(&Task::of(&step)),
        }
    }

    /// Exchanges the parts between ranks of this cell within the cell, and then the others.
    fn exchange(&mut self, parts: Parts<'_>) -> Result<Carried, Failure> {
        let Parts { signature, input, output, mut pairs, deadline } = parts;
        let cell = self.cells[self.position().0].clone();
        let of_cell = pairs[cell].iter_mut().map(Option::take).collect();
        let output = &mut *output;
        let mut carried = self.cell.exchange(Parts { signature, input, output, pairs: of_cell, deadline })?;
        carried += self.across.exchange(Parts { signature, input, output, pairs, deadline: deadline.renewed() })?;
        Ok(carried)
    }
}

/// The data that all steps of a collective share.
struct Task {
    signature: Signature,
    reduce: Option<ReduceOp>,
    deadline: Deadline,
}

impl Task {
    fn of(step: &Step<'_>) -> Task {
        Task { signature: step.signature, reduce: step.reduce, deadline: step.deadline }
    }

    fn gather<'a>(&self, vectors: Vec<Vector<'a>>) -> Step<'a> {
        let Task { signature, deadline, .. } = *self;
        Step { signature, reduce: None, vectors, gather: true, deadline: deadline.renewed() }
    }

    fn reduce<'a>(&self, vectors: Vec<Vector<'a>>) -> Step<'a> {
        Step { reduce: self.reduce, gather: false, ..self.gather(vectors) }
    }

    fn all_reduce<'a>(&self, vectors: Vec<Vector<'a>>) -> Step<'a> {
        Step { reduce: self.reduce, ..self.gather(vectors) }
    }
}

/// Returns the vectors with new ranges over the same buffers.
fn with_ranges<'a>(
    vectors: &'a mut [Vector<'_>],
    ranges: impl Fn(usize, &[Range<usize>]) -> Vec<Range<usize>>,
) -> Vec<Vector<'a>> {
    let with_ranges = |(index, vector): (usize, &'a mut Vector<'_>)| {
        let ranges = ranges(index, &vector.ranges);
        Vector::new(vector.dtype, vector.buffer, ranges)
    };
    vectors.iter_mut().enumerate().map(with_ranges).collect()
}

impl Hierarchy {
    /// Joins the collectives of a cell and the connections to the other cells of the group.
    pub(crate) fn new(cells: Vec<Range<usize>>, cell: Box<dyn Collective>, across: Exchange) -> Hierarchy {
        let rail = rail(&across.membership, &cells);
        Hierarchy { cells, cell, across, rail }
    }

    fn barrier(&mut self, task: &Task) -> Result<Carried, Failure> {
        self.cell.run(task.gather(vec![]))?;
        if let Some(rail) = &self.rail {
            self.across.run_among(rail, task.gather(vec![]))?;
        }
        self.cell.run(task.gather(vec![]))?;
        Ok(Carried::streamed(0))
    }

    fn all_reduce(&mut self, step: Step<'_>) -> Result<Carried, Failure> {
        let (task, mut vectors) = (Task::of(&step), step.vectors);
        let ((own, place), cells, rails) = (self.position(), self.cells.len(), rails(&self.cells));
        let slices = |vector: &Vector<'_>| cut(&(0..vector.buffer.len()), rails, vector.dtype.size());
        let slices: Vec<Vec<Range<usize>>> = vectors.iter().map(slices).collect();
        let ranks = self.cells[own].len();
        let in_cell = |index: usize, _: &[Range<usize>]| one_each(&slices[index], ranks);
        let mut carried = Carried::streamed(0);
        carried += self.cell.run(task.reduce(with_ranges(&mut vectors, in_cell)))?;
        if let Some(rail) = &self.rail {
            let of_rail = vectors.iter_mut().zip(&slices).map(|(vector, slices)| {
                let slice = &mut vector.buffer[slices[place].clone()];
                let parts = cut(&(0..slice.len()), cells, vector.dtype.size());
                Vector::new(vector.dtype, slice, parts)
            });
            carried += self.across.run_among(rail, task.all_reduce(of_rail.collect()))?;
        }
        carried += self.cell.run(task.gather(with_ranges(&mut vectors, in_cell)))?;
        Ok(carried)
    }

    fn reduce_scatter(&mut self, step: Step<'_>) -> Result<Carried, Failure> {
        let (task, mut vectors) = (Task::of(&step), step.vectors);
        let ((own, place), rails) = (self.position(), rails(&self.cells));
        // If all cells have the same size, the slices of a cell are the ranges of its ranks, so each rail directly
        // reduces the final ranges of its ranks.
        let even = self.cells.iter().all(|cell| cell.len() == rails);
        let slices = |vector: &Vector<'_>, cell: &Range<usize>| match even {
            true => vector.ranges[cell.clone()].to_vec(),
            false => cut(&region(&vector.ranges, cell), rails, vector.dtype.size()),
        };
        // Memory for the sums that this rank's cell computes for this rank's rail: one slice of each vector per cell.
        let length = |vector: &Vector<'_>, cell| slices(vector, cell).get(place).map_or(0, ExactSizeIterator::len);
        let of_vector = |vector: &Vector<'_>| Sums::new(self.cells.iter().map(|cell| length(vector, cell)));
        let mut sums: Vec<Sums> = vectors.iter().map(of_vector).collect();
        let mut carried = Carried::streamed(0);
        for (index, cell) in self.cells.iter().enumerate() {
            let in_cell = vectors.iter_mut().zip(&mut sums).map(|(vector, sums)| {
                let (ranges, at) = (one_each(&slices(vector, cell), self.cells[own].len()), sums.at[index].clone());
                let shard = Some(&mut sums.bytes()[at]);
                Vector { shard, ..Vector::new(vector.dtype, vector.buffer, ranges) }
            });
            carried += self.cell.run(task.reduce(in_cell.collect()))?;
        }
        if even {
            if let Some(rail) = &self.rail {
                let of_rail = vectors.iter_mut().zip(&mut sums).map(|(vector, sums)| {
                    let (shard, at) = (vector.shard.as_deref_mut(), sums.at.clone());
                    Vector { shard, ..Vector::new(vector.dtype, sums.bytes(), at) }
                });
                carried += self.across.run_among(rail, task.reduce(of_rail.collect()))?;
            }
            return Ok(carried);
        }
        let cell = &self.cells[own];
        let of_vector = |vector: &Vector<'_>| CellSum::new(region(&vector.ranges, cell), slices(vector, cell));
        let mut cell_sums: Vec<CellSum> = vectors.iter().map(of_vector).collect();
        if let Some(rail) = &self.rail {
            let of_rail = vectors.iter().zip(&mut sums).zip(&mut cell_sums).map(|((vector, sums), of_cell)| {
                let (shard, at) = (Some(of_cell.slice(place)), sums.at.clone());
                Vector { shard, ..Vector::new(vector.dtype, sums.bytes(), at) }
            });
            carried += self.across.run_among(rail, task.reduce(of_rail.collect()))?;
        }
        let in_cell = vectors.iter().zip(&mut cell_sums).map(|(vector, of_cell)| {
            let ranges = one_each(&of_cell.slices, cell.len());
            Vector::new(vector.dtype, of_cell.bytes(), ranges)
        });
        carried += self.cell.run(task.gather(in_cell.collect()))?;
        for (vector, mut of_cell) in vectors.into_iter().zip(cell_sums) {
            let own = of_cell.within(&vector.ranges[self.rank()]);
            vector.shard.unwrap_or_default().copy_from_slice(&of_cell.bytes()[own]);
        }
        Ok(carried)
    }

    /// Runs an all_gather, or a broadcast, which is an all_gather in which one rank owns the whole vector.
    fn gather(&mut self, step: Step<'_>) -> Result<Carried, Failure> {
        let (task, mut vectors) = (Task::of(&step), step.vectors);
        let ((own, place), rails) = (self.position(), rails(&self.cells));
        let ranks = self.cells[own].len();
        let slices = |ranges: &[Range<usize>], cell: &Range<usize>| cut(&region(ranges, cell), rails, 1);
        let is_empty = |vectors: &[Vector<'_>], cell| vectors.iter().all(|v| region(&v.ranges, cell).is_empty());
        let mut carried = Carried::streamed(0);
        if !is_empty(&vectors, &self.cells[own]) {
            let in_cell = |_, ranges: &[Range<usize>]| ranges[self.cells[own].clone()].to_vec();
            carried += self.cell.run(task.gather(with_ranges(&mut vectors, in_cell)))?;
        }
        if let Some(rail) = &self.rail {
            let cells = &self.cells;
            let of_rail =
                |_, ranges: &[Range<usize>]| cells.iter().map(|cell| slices(ranges, cell)[place].clone()).collect();
            carried += self.across.run_among(rail, task.gather(with_ranges(&mut vectors, of_rail)))?;
        }
        for (index, cell) in self.cells.iter().enumerate() {
            if index != own && !is_empty(&vectors, cell) {
                let in_cell = |_, ranges: &[Range<usize>]| one_each(&slices(ranges, cell), ranks);
                carried += self.cell.run(task.gather(with_ranges(&mut vectors, in_cell)))?;
            }
        }
        Ok(carried)
    }

    /// Runs a reduction of 16-bit floats in f32, because partial sums must not be rounded.
    fn widened(&mut self, step: Step<'_>) -> Result<Carried, Failure> {
        let mut vectors = step.vectors;
        let mut wide: Vec<Wide> = vectors.iter().map(Wide::of).collect();
        // As f32, the values take twice the bytes.
        let halves = vectors.iter().filter(|vector| is_half(vector));
        let widening = halves.map(|vector| vector.leaving(self.rank(), step.gather)).sum();
        let widened = vectors.iter_mut().zip(&mut wide).map(|(vector, wide)| wide.vector(vector)).collect();
        let carried = Carried { widening, ..self.run(Step { vectors: widened, ..step })? };
        for (vector, wide) in vectors.into_iter().zip(wide).filter(|(vector, _)| is_half(vector)) {
            match vector.shard {
                Some(shard) => tree::narrow(vector.dtype, &wide.shard, shard),
                None => tree::narrow(vector.dtype, &wide.buffer, vector.buffer),
            }
        }
        Ok(carried)
    }

    /// Returns this rank in the group.
    fn rank(&self) -> usize {
        self.across.membership.rank
    }

    /// Returns the index of this rank's cell, and this rank's index in it.
    fn position(&self) -> (usize, usize) {
        position(&self.cells, self.rank())
    }
}

/// Returns one range for each rank of a cell: the slice of the rank's rail, or an empty range if the rank has no rail.
fn one_each(slices: &[Range<usize>], ranks: usize) -> Vec<Range<usize>> {
    let slice = |rank| slices.get(rank).cloned().unwrap_or(0..0);
    (0..ranks).map(slice).collect()
}

/// Returns the region of the vector that the consecutive ranges of a cell's ranks form.
fn region(ranges: &[Range<usize>], cell: &Range<usize>) -> Range<usize> {
    ranges[cell.start].start..ranges[cell.end - 1].end
}

/// Divides a range into parts of whole elements whose lengths differ by at most one element.
fn cut(range: &Range<usize>, parts: usize, unit: usize) -> Vec<Range<usize>> {
    let parts = consecutive(even_counts(range.len() / unit, parts), unit);
    parts.into_iter().map(|part| part.start + range.start..part.end + range.start).collect()
}
