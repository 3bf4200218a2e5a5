//! A training step as a program. Pure data: no tensor, no I/O, no candle.
//!
//! One global batch is, for each rank, a list of [`Instruction`]s. A [`schedule`] writes the compute, passes
//! rewrite it (they live with the ZeRO layout that they serve), and [`validate`] checks the programs of all
//! ranks together before anything runs. The executor is one exhaustive `match` over the same instructions.

mod instruction;
pub mod schedule;
mod shape;
mod validate;

pub use instruction::{Instruction, LayerId, Program, SegmentId};
pub use shape::{LayerShape, ModelShape, Placement, Placements, SegmentShape, ZeroStage};
pub use validate::{Violation, validate};
