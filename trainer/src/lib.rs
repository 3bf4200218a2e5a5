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
//! One optimizer step is a program ([`pipeline::Program`]), built from the configuration and checked for all ranks
//! before anything runs; [`Engine`] carries it out.

#![forbid(unsafe_code)]

mod append;
pub mod data;
mod monitor;
mod report_page;
pub mod resident;
pub mod train;

pub use report_page::report_page;
pub use train::measure_costs;
pub use zero_engine::costs::{CostTable, Length as CostLength, Prediction, RankTimes};
pub use zero_engine::{
    Activations, Batch, Config, Ended, Engine, Error, ExportDtype, Exported, GpuSpan, Head, Kind, Layer, Layers, Pass,
    Span, Step, Subject, TimeCategory, Timing, Track, Weights, bytes, comm, comm_options, configured_layers, counted,
    export, forward_only, gpus, import, nccl, ops, pipeline, timeout, zoo,
};
pub use zero_planner::{Advice, Limit, MemoryPlan, Plan, Planner, Ranks, advice, autotune, other_ranks, processor};
