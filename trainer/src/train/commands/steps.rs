//! Runs the steps of a configuration without logging, saving or evaluating, for benchmarks.

use std::sync::Arc;

use zero_comm::Communicator;
use zero_config::Config;
use zero_model::Model;

use crate::data::Unwatched;
use crate::train::configured_data;
use crate::train::corpus::Corpus;
use zero_engine::Batch;
use zero_engine::Error;
use zero_engine::checkpoint::start::Start;
use zero_engine::configured_model;
use zero_engine::costs::{self, CostTable, Length, Trainee};
use zero_engine::settings::with_total_steps;
use zero_engine::{Engine, Step};

/// A model and its data, ready for training step by step.
pub struct Steps {
    engine: Engine,
    corpus: Corpus,
}

impl Steps {
    /// Opens the data and builds the model; a collective.
    ///
    /// # Errors
    /// Returns the same errors as [`crate::train::train`].
    pub fn open(config: &Config, comm: &Arc<dyn Communicator>) -> Result<Self, Error> {
        let mut config = config.for_world_size(comm.size())?;
        // Measurements need steps of the full batch size.
        config.training.rampup_batch_size = None;
        let corpus = configured_data::open(&config, false, &Unwatched)?;
        let layers = configured_model::from_config(&config, corpus.vocabulary)?;
        let config = with_total_steps(config, 1000);
        let sample = || corpus.sampler.batch(0);
        let engine = Engine::measured_with(config, layers, comm.clone(), Start::Anew, sample)?;
        Ok(Self { engine, corpus })
    }

    /// Runs one optimizer step on the next samples; a collective.
    ///
    /// # Errors
    /// Returns the same errors as [`Engine::train_batch`].
    pub fn step(&mut self) -> Result<Step, Error> {
        let first = self.engine.samples();
        let sampler = &self.corpus.sampler;
        self.engine.train_with(|m| sampler.batch(first + (m * sampler.rows) as u64))
    }

    /// Returns the number of tokens in a global batch.
    #[must_use]
    pub fn tokens_per_step(&self) -> usize {
        self.engine.config().train_batch_size * self.corpus.tokens_per_sample()
    }

    /// Returns the number of elements of all parameters.
    #[must_use]
    pub fn parameters(&self) -> usize {
        self.engine.model().elements()
    }

    /// Returns the engine, for example to save a checkpoint.
    pub fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// Returns the engine.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }
}

impl Trainee for Steps {
    fn engine(&self) -> &Engine {
        &self.engine
    }

    fn step(&mut self) -> Result<Step, Error> {
        Self::step(self)
    }

    fn model(&self) -> Result<Model, Error> {
        let config = self.engine.config();
        let layers = configured_model::from_config(config, self.corpus.vocabulary)?;
        configured_model::build(config, layers, self.engine.settings().dtype)
    }

    fn micro_batch(&self) -> Result<Batch, Error> {
        self.corpus.sampler.batch(0)
    }
}

/// Measures the cost table of a configuration on the ranks of `comm`; a collective.
///
/// # Errors
/// Returns the same errors as training.
pub fn measure_costs(config: &Config, comm: &Arc<dyn Communicator>, length: &Length) -> Result<CostTable, Error> {
    costs::measure(config, comm, length, Steps::open)
}
