//! A training step as a program. The program is pure data; this crate uses no tensors, no I/O and no candle.
//!
//! For one global batch, each rank runs a list of [`Instruction`]s. A [`schedule`] writes the compute and the messages
//! between pipeline stages. The passes of the crate `zero-partition` then rewrite the program. [`validate()`] checks
//! the programs of all ranks together before anything runs. The executor is one exhaustive `match` over the same
//! instructions. [`Instruction::effects`] is a table of what each instruction does.
//!
//! [`split`] chooses where to cut a model into stages. [`simulate()`] predicts the timing of a step. [`grid`] and
//! [`trace`] display a simulated or measured [`Timeline`].

mod alive;
mod effects;
pub mod grid;
mod ids;
mod instruction;
mod mesh;
mod message;
pub mod schedule;
mod shape;
pub mod simulate;
pub mod split;
mod stages;
mod tier;
mod timeline;
pub mod trace;
mod validate;
mod world;

pub use alive::alive;
pub use effects::{Action, Computation, Effects, Operand, Transfer};
pub use ids::{LayerId, SegmentId};
pub use instruction::{Instruction, Program};
pub use mesh::{Coordinates, Degrees, Mesh, MeshError};
pub use message::{Channel, Content, Kind, Message, StageId};
pub use schedule::Schedule;
pub use shape::{Exchanges, LayerShape, ModelShape, Placement, Placements, SegmentShape, ZeroStage};
pub use simulate::{Costs, simulate};
pub use stages::{Stages, StagesError};
pub use tier::{Item, Tier, Tiers};
pub use timeline::{Event, Lane, Timeline};
pub use validate::{Violation, validate};
pub use world::World;
