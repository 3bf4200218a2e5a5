//! The training engine. Turns a configuration into the program of each rank. [`Engine`] executes the program and
//! trains, evaluates and saves checkpoints.
//!
//! Most programs use `zero_train`, which re-exports the items that they need in addition to its trainer. The public
//! modules serve the crates that build on this one, for plans, runs and reports.

#![forbid(unsafe_code)]

mod batch;
pub mod checkpoint;
pub mod comm_options;
pub mod configured_model;
pub mod costs;
pub mod device;
mod engine;
mod error;
mod executor;
pub mod files;
pub mod format;
mod loss_weights;
mod mup;
mod noise;
mod offload;
pub mod parameter_groups;
pub mod printed;
#[cfg(test)]
#[path = "../tests/python/mod.rs"]
mod python;
mod recomputation;
pub mod settings;
pub mod stage_plan;
pub mod timing;

pub use batch::Batch;
pub use checkpoint::export::{Weights, export, merge};
pub use checkpoint::import::import;
pub use checkpoint::saving::Ended;
pub use checkpoint::stored::{StoredModel, StoredTokenizer, fill_layers};
pub use comm_options::{comm_options, timeout};
pub use configured_model::from_config as configured_layers;
pub use device::{gpu_bytes, gpus};
pub use engine::evaluation::MeanLoss;
pub use engine::{Engine, Step};
pub use error::{At, DataError, Error};
pub use executor::Observed;
pub use format::{bytes, counted};
pub use noise::GradientNoise;
pub use timing::gpu_timeline::GpuSpan;
pub use timing::{Span, TimeCategory, Timing};
pub use zero_checkpoint::{ExportDtype, Exported};
pub use zero_config::Config;
pub use zero_cuda::{Subject, Track};
pub use zero_model::{Activations, Head, Layer, Layers, Pass, Signature, forward_only, ops, zoo};
pub use zero_optim::ExactSum;
pub use zero_partition::Kind;

pub use zero_comm as comm;
/// Types of custom optimizers and learning-rate schedules, for [`Layers::optimizer`] and [`Layers::lr_lambda`].
pub mod optimizer {
    pub use zero_model::layers::LrLambda;
    pub use zero_optim::{CustomOptimizer, CustomStep, MatrixStates, Update};
}
/// The configuration and the types of its fields.
pub use zero_config as config;
/// Groups over NCCL; empty without the feature `cuda`.
pub use zero_nccl as nccl;
pub use zero_pipeline as pipeline;
