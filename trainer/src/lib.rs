//! ZeRO-style memory-optimized training for candle models.
//!
//! [`Trainer`] trains a model on data, with evaluation, metrics, checkpoints, resume, restarts and monitors, on any
//! number of ranks.
//!
//! ```no_run
//! use candle_nn::{VarBuilder, linear, loss::cross_entropy};
//! use zero_train::{Layers, Trainer, data::csv, metrics::accuracy};
//!
//! let (train, valid) = (csv(["train.csv"], 3)?, csv(["valid.csv"], 3)?);
//! let model = Layers::new().layer("classes", |vb: VarBuilder| linear(4, 3, vb)).loss(cross_entropy);
//! Trainer::from_args()?.model(model).data(train, valid).metric("accuracy", accuracy).fit()?;
//! # Ok::<(), zero_train::Error>(())
//! ```
//!
//! [`Engine`] runs one optimizer step at a time, for programs with their own training loop.
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
//! One optimizer step is a program ([`pipeline::Program`]). It is built from the configuration and checked for all
//! ranks before anything runs, and [`Engine`] executes it.

#![forbid(unsafe_code)]

mod append;
pub mod data;
pub mod metrics;
mod monitor;
pub mod process;
mod report_page;
pub mod resident;
pub mod train;
mod trainer;

pub use data::Dataset;
pub use report_page::report_page;
pub use train::measure_costs;
pub use train::{Evaluation, Finished, Output, Resume, StepInfo, Summary};
pub use trainer::Trainer;
pub use zero_engine::costs::{CostTable, Length as CostLength, Prediction, RankTimes};
pub use zero_engine::files::replace as replace_file;
pub use zero_engine::{
    Activations, Batch, Config, Ended, Engine, Error, ExportDtype, Exported, GpuSpan, Head, Kind, Layer, Layers, Pass,
    Span, Step, Subject, TimeCategory, Timing, Track, Weights, bytes, comm, comm_options, config, configured_layers,
    counted, export, forward_only, gpus, import, nccl, ops, pipeline, timeout, zoo,
};
pub use zero_planner::{Advice, Limit, MemoryPlan, Plan, Planner, Ranks, advice, autotune, other_ranks, processor};
