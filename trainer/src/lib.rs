//! ZeRO-style memory-optimized training for candle models.
//!
//! [`Trainer`] trains a model on data, with evaluation, metrics, checkpoints, resume, restarts and monitors, on any
//! number of ranks.
//!
//! ```no_run
//! use candle_nn::{VarBuilder, linear, loss::cross_entropy};
//! use zero_train::{Layers, Trainer, data::csv, metrics::accuracy};
//!
//! let trainer = Trainer::from_args()?;
//! let (train, valid) = (csv(["train.csv"], 3)?, csv(["valid.csv"], 3)?);
//! let model = Layers::new().layer("classes", |vb: VarBuilder| linear(4, 3, vb)).loss(cross_entropy);
//! trainer.model(model).data(train, valid).metric("accuracy", accuracy).fit()?;
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
//! # What is here
//!
//! | to | use |
//! |---|---|
//! | train a model | [`Trainer`]; [`Resume`] and [`Output`] select the checkpoint to resume from and the output |
//! | describe a model | [`Layers`]; each [`Layer`] maps [`Activations`] in a [`Pass`]; [`Head`]; [`ops`], [`zoo`] |
//! | provide data | [`Dataset`], [`data`], [`Batch`], [`metrics`] |
//! | provide an optimizer | [`optimizer`] |
//! | select parameters to train in code | [`tuning`] |
//! | configure the run | [`Config`], [`configured_layers`] |
//! | write the training loop | [`Engine`], [`Step`], [`process::set_up`] |
//! | generate text | [`generate`] |
//! | export and import weights | [`checkpoint`] |
//! | run ranks as threads | [`ranks`] |
//! | handle errors | [`Error`] |
//! | run a configuration, as the program `zero-train` does | [`train`], [`process`] |
//!
//! Plans, advice and autotuning are in the crate `zero_planner`. Step programs, costs and timings are in `zero_engine`.

#![forbid(unsafe_code)]

mod append;
pub mod data;
pub mod generate;
pub mod metrics;
mod monitor;
pub mod process;
#[cfg(test)]
#[path = "../../engine/tests/python/mod.rs"]
mod python;
mod report_page;
pub mod train;
mod trainer;

#[doc(inline)]
pub use data::Dataset;
#[doc(inline)]
pub use train::{Output, Resume};
pub use trainer::Trainer;
pub use zero_engine::{Activations, Batch, Config, Engine, Error, Head, Layer, Layers, Pass, Step, configured_layers};
#[doc(inline)]
pub use zero_engine::{config, ops, optimizer, zoo};

/// Exports a checkpoint's weights to safetensors files, and imports such files.
pub mod checkpoint {
    pub use zero_engine::{Ended, ExportDtype, Exported, Weights, export, import, merge};
}

/// The ranks of a run: the communicator and the arguments of its collectives, ranks that are threads of one process,
/// and the allocator for large buffers that the ranks of a host share.
///
/// ```
/// use zero_train::ranks::{Buffer, Options, ReduceOp, threads};
///
/// let sum = |comm: std::sync::Arc<dyn zero_train::ranks::Communicator>| {
///     comm.all_reduce(Buffer::F32(vec![comm.rank() as f32 + 1.0]), ReduceOp::Sum).wait()?.into_f32()
/// };
/// let ranks = threads(2, &Options::default()).into_iter().map(|comm| std::thread::spawn(move || sum(comm)));
/// for rank in ranks.collect::<Vec<_>>() {
///     assert_eq!(rank.join().unwrap()?, [3.0]);
/// }
/// # Ok::<(), zero_train::ranks::CommError>(())
/// ```
pub mod ranks {
    pub use zero_comm::{Buffer, CommError, Communicator, Options, Pending, ReduceOp, SharedAllocator, threads};
}

/// Arguments of the [`Layers`] methods that select the parameters to train, add adapters, quantize weights and set the
/// base model of µP.
pub mod tuning {
    pub use zero_model::ops::QuantizationOptions;
    pub use zero_model::{Adapter, BaseShapes, Trainable, TrainedBias};
}
