//! ZeRO-style memory-optimized training for candle models.
//!
//! ```no_run
//! # fn model() -> zero_train::Layers { zero_train::Layers::new() }
//! # fn batches() -> Vec<zero_train::Batch> { vec![] }
//! let config = zero_train::Config::from_path("ds.yaml")?;
//! let mut engine = zero_train::Engine::new(config, model())?; // ranks from the environment, or a world of one
//! for batch in batches() {
//!     let step = engine.train_batch(&batch)?;
//!     println!("{}", step.loss);
//! }
//! engine.save_checkpoint("out")?;
//! # Ok::<(), zero_train::Error>(())
//! ```
//!
//! One optimizer step is a program ([`zero_pipeline::Program`]), built from the configuration and checked for all ranks
//! before anything runs; [`Engine`] carries it out.

#![forbid(unsafe_code)]

mod advice;
mod append;
mod arrangement;
pub mod autotune;
mod batch;
mod comm_options;
mod configured_model;
mod costs;
pub mod data;
mod device;
mod engine;
mod error;
mod executor;
mod export;
mod gpu_timeline;
mod import;
mod kept;
mod measure;
mod memory;
mod messages;
mod monitor;
mod offload;
mod plan;
pub mod processor;
mod profile;
mod recomputation;
pub mod resident;
mod saving;
mod settings;
mod start;
mod tensor_bytes;
mod timing;
mod trace;
mod tracked;
pub mod train;
mod values;
mod words;

pub use advice::{Advice, Ranks, advice, other_ranks};
pub use batch::Batch;
pub use comm_options::{comm_options, timeout};
pub use configured_model::from_config as configured_layers;
pub use costs::{CostTable, Length as CostLength, Prediction, RankTimes, measure as measure_costs};
pub use device::gpus;
pub use engine::{Engine, Step};
pub use error::Error;
pub use export::{Weights, export};
pub use gpu_timeline::GpuSpan;
pub use import::import;
pub use memory::Limit;
pub use plan::{Draft, Plan};
pub use saving::Ended;
pub use timing::{Lane, Span, Timing};
pub use words::{bytes, counted};
pub use zero_checkpoint::{ExportDtype, Exported};
pub use zero_config::Config;
pub use zero_cuda::{Subject, Track};
pub use zero_model::{Activations, Head, Layer, Layers, Pass, forward_only, ops, zoo};
pub use zero_partition::Kind;

pub use zero_comm as comm;
/// Groups over NCCL: nothing without the feature `cuda`.
pub use zero_nccl as nccl;
pub use zero_pipeline as pipeline;
