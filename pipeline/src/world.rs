//! What programs run on: a model, its stages and the ranks.

use crate::mesh::{Degrees, Mesh};
use crate::shape::ModelShape;
use crate::stages::Stages;

/// The model and mesh that programs run on.
#[derive(Debug, Clone, Copy)]
pub struct World<'a> {
    /// The model.
    pub shape: &'a ModelShape,
    /// Assignment of layers to stages.
    pub stages: &'a Stages,
    /// Arrangement of the ranks.
    pub mesh: Mesh,
    /// Number of messages that a channel buffers without a posted receive. 0 means rendezvous: a send completes only
    /// when its receive has been posted. A program that does not deadlock with a capacity of 0 runs on every transport.
    pub capacity: usize,
}

impl<'a> World<'a> {
    /// Creates a world with one pipeline stage.
    ///
    /// # Panics
    /// Panics if `ranks` is zero.
    #[must_use]
    pub fn data_parallel(shape: &'a ModelShape, stages: &'a Stages, ranks: usize) -> Self {
        Self { shape, stages, mesh: Mesh::new(ranks, Degrees::stages(1)).expect("there are ranks"), capacity: 0 }
    }
}
