//! Layers, removable parameters and a model zoo for candle.
//!
//! A model is a list of named [`Layers`]. Building one allocates nothing: every parameter is an
//! empty leaf of the right shape ([`Parameter`]) whose storage comes and goes while the engine
//! gathers and releases it. Gradients of parameters do not travel through candle's `GradStore` where
//! an operation of [`ops`] made them; they land in the caller's buffer ([`sink`]).

mod hand_on;
pub mod layers;
pub mod memory;
mod model;
mod module_buffer;
mod parameter;
mod recorder;
pub mod zoo;

pub use hand_on::hand_on;
pub use layers::{Activations, Head, Layer, Layers};
pub use model::{BuildError, BuiltLayer, Model};
pub use module_buffer::ModuleBuffer;
pub use parameter::{Parameter, ParameterId};
pub use zero_ops as ops;
#[cfg(feature = "cuda")]
pub use zero_ops::device;
pub use zero_ops::{Pass, backward_from, forward_only, init, random, sink};
