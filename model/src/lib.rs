//! Layers, parameters with removable storage, and a model zoo for candle.
//!
//! A model is a list of named [`Layers`]. Building a model allocates no parameters: each [`Parameter`] is an autograd
//! leaf with a shape, and the engine fills its storage when it gathers the parameter and removes it on release.
//! Operations of [`ops`] write gradients of parameters into the caller's buffers ([`sink`]) instead of candle's
//! `GradStore`.

mod activations;
mod adapter;
mod base_shapes;
mod build_error;
mod decode;
mod hand_on;
mod layer;
pub mod layers;
pub mod memory;
mod model;
mod module_buffer;
mod parameter;
mod quantized;
mod recorder;
mod routes;
mod trainable;
mod tuning;
mod width;
pub mod zoo;

pub use activations::Activations;
pub use adapter::Adapter;
pub use base_shapes::BaseShapes;
pub use build_error::BuildError;
pub use hand_on::hand_on;
pub use layer::{Head, Layer};
pub use layers::Layers;
pub use model::{BuiltLayer, Model};
pub use module_buffer::ModuleBuffer;
pub use parameter::{Parameter, ParameterId};
pub use routes::{Route, Signature};
pub use trainable::Trainable;
pub use tuning::Tuning;
pub use width::Widths;
pub use zero_model_options::TrainedBias;
pub use zero_ops as ops;
#[cfg(feature = "cuda")]
pub use zero_ops::device;
pub use zero_ops::{Pass, backward_from, forward_only, init, random, sink};
