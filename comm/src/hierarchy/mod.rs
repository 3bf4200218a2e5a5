//! Collectives of a group on several hosts: within a host over shared memory, between hosts once for all ranks of each.
//!
//! The group is cut into [`cells`]. A vector is cut into as many slices as the smallest cell has ranks, and the ranks with the
//! same place in their cells, a *rail*, move one slice between the cells. So an all_reduce is: every cell reduces, each rank
//! its slice; every rail reduces its slice over the cells; every cell gathers the slices. What goes between hosts is what flat
//! collectives between as many ranks as there are cells would send, and the bits are those of the flat tree, as a cell is a node
//! of it. 16-bit floats are added up in f32 on the whole way and rounded once.

mod cells;

use std::ops::Range;

use crate::buffer::Dtype;
use crate::health::Failure;
use crate::step::{Carried, Collective, Reduction, Step, even_counts};
use crate::tree;

pub(crate) use cells::cells;

/// One rank's end of a group on several hosts.
pub(crate) struct Hierarchy {
    /// The cells of the group, in ranks of the group; more than one.
    pub(crate) cells: Vec<Range<usize>>,
    /// This rank in the group.
    pub(crate) rank: usize,
    /// The ranks of this rank's cell.
    pub(crate) cell: Box<dyn Collective>,
    /// The ranks with the same place in their cells; `None` where some cell has no such place.
    pub(crate) rail: Option<Box<dyn Collective>>,
}

/// Places in a cell that every cell has.
pub(crate) fn rails(cells: &[Range<usize>]) -> usize {
    cells.iter().map(ExactSizeIterator::len).min().unwrap_or(0)
}

impl Collective for Hierarchy {
    fn run(&mut self, mut step: Step<'_>) -> Result<Carried, Failure> {
        match step.reduce {
            Some(Reduction { dtype: Dtype::Bf16 | Dtype::F16, .. }) => self.widened(step),
            Some(_) if step.gather => self.all_reduce(step),
            Some(_) => self.reduce_scatter(step),
            None if step.gather => self.gather(step),
            None => {
                let mut carried = self.in_cell(&mut step.part(&mut []), vec![])?;
                carried += self.on_rail(&mut step.part(&mut []), vec![])?;
                Ok(carried + self.in_cell(&mut step.part(&mut []), vec![])?)
            }
        }
    }
}
