//! Layers, removable parameters, differentiable fused operations and a model zoo for candle.
//!
//! A model is a list of named [`Layers`]. Building one allocates nothing: every parameter is an
//! empty leaf of the right shape ([`Parameter`]) whose storage comes and goes while the engine
//! gathers and releases it. Gradients of parameters do not travel through candle's `GradStore` where
//! an operation of [`ops`] made them; they land in the caller's buffer ([`sink`]).

#[cfg(feature = "cuda")]
pub mod device;
mod flag;
pub mod init;
pub mod layers;
pub mod memory;
mod model;
pub mod ops;
mod parameter;
pub mod random;
mod recorder;
mod seed;
pub mod sink;
pub mod zoo;

pub use layers::{Activations, Head, Layer, Layers, Pass};
pub use model::{BuildError, BuiltLayer, Model};
pub use parameter::{Parameter, ParameterId};
pub use recorder::forward_only;
pub use seed::{backward_from, hand_on};
