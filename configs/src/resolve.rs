//! Second phase: fills in defaults and `auto`, and checks keys against each other.

use std::path::Path;
use std::sync::Arc;

use crate::batch::{self, Batch};
use crate::config::*;
use crate::errors::{ErrorKind, Errors};
use crate::node::At;
use crate::origin::Origins;
use crate::reader::Resolver;
use crate::report::Report;
use crate::source::Source;
use crate::typed::{Typed, load};
use crate::world::World;
use crate::yaml_out;

impl Typed {
    /// Resolves the configuration for `world_size` ranks. `None` means `launcher.num_processes` ranks, or one rank
    /// per pipeline stage if that is not set.
    ///
    /// # Errors
    /// All errors of the configuration, including those of single values.
    pub fn resolve(&self, world_size: Option<usize>) -> Result<Config, Errors> {
        let mut resolver = Resolver { fields: &self.fields, report: self.report.clone(), origins: Origins::default() };
        let world = World::read(&mut resolver, world_size);
        let config = config(&mut resolver, world, self);
        check(&config, world, &mut resolver);
        if resolver.report.has_errors() {
            return Err(resolver.report.into_errors());
        }
        let mut origins = resolver.origins;
        origins.seal(yaml_out::leaves(&config));
        Ok(Config { origins, warnings: resolver.report.into_warnings(), ..config })
    }
}

impl Config {
    /// Reads and resolves the file at `path` for `launcher.num_processes` ranks.
    ///
    /// # Errors
    /// All errors of the configuration.
    pub fn from_path(path: impl AsRef<Path>) -> Result<Self, Errors> {
        load(Source::from_path(path)?, &[])?.resolve(None)
    }

    /// Parses and resolves `text` for `launcher.num_processes` ranks. Messages call it `name`.
    ///
    /// # Errors
    /// All errors of the configuration.
    pub fn parse(name: impl Into<String>, text: impl Into<String>) -> Result<Self, Errors> {
        load(Source { name: name.into(), text: text.into() }, &[])?.resolve(None)
    }

    /// Parses and resolves `text` for `world_size` ranks. Messages call it `name`.
    ///
    /// # Errors
    /// All errors of the configuration.
    pub fn with_world_size(
        name: impl Into<String>,
        text: impl Into<String>,
        world_size: usize,
    ) -> Result<Self, Errors> {
        load(Source { name: name.into(), text: text.into() }, &[])?.resolve(Some(world_size))
    }
}

impl Config {
    /// Returns the keys written as `auto`, each with its resolved value as YAML, or `auto` if only the engine knows
    /// the value.
    pub fn autos(&self) -> Vec<(String, String)> {
        self.leaves().into_iter().filter(|(path, _)| self.typed.fields.is_auto(path)).collect()
    }

    /// Returns the sections `model` and `data`. Training from the command line requires both.
    ///
    /// # Errors
    /// One or both of the sections are missing.
    pub fn model_and_data(&self) -> Result<(&Model, &Data), Errors> {
        match (&self.model, &self.data) {
            (Some(model), Some(data)) => Ok((model, data)),
            (model, data) => {
                let mut report = Report::new(Source { name: self.name.clone(), text: String::new() }, &[]);
                let sections = [
                    (
                        "model",
                        model.is_none(),
                        "write what to train, for instance `model: {type: gpt2}`, here or in a second `--config`",
                    ),
                    (
                        "data",
                        data.is_none(),
                        "write what to train on, for instance `data: {train: \"**/*.txt\"}`, here or in a second `--config`",
                    ),
                ];
                for (path, missing, help) in sections {
                    if missing {
                        let message = format!("the section `{path}` is missing");
                        report.error(ErrorKind::Missing, path, At::Default, message, Some(help.to_string()));
                    }
                }
                Err(report.into_errors())
            }
        }
    }
}

fn config(resolver: &mut Resolver<'_>, world: World, typed: &Typed) -> Config {
    let Batch { train, micro, accumulation } = batch::resolve(resolver, world);
    let training = Training::read(resolver);
    let optimizer = Optimizer::read(resolver);
    let scheduler = Scheduler::read(resolver, optimizer.lr(), training.max_steps);
    let model = Model::read(resolver);
    let width = model.as_ref().and_then(Model::width);
    let data = Data::read(resolver, model.as_ref().and_then(Model::max_sequence_length));
    let mut keys = resolver.top();
    Config {
        train_batch_size: train,
        train_micro_batch_size_per_gpu: micro,
        gradient_accumulation_steps: accumulation,
        world_size: world.ranks,
        steps_per_print: keys.int("steps_per_print"),
        gradient_clipping: keys.float("gradient_clipping"),
        gradient_allreduce_op: keys.choice("gradient_allreduce_op", ReduceOp::Mean),
        communication_data_type: keys.optional_choice("communication_data_type"),
        wall_clock_breakdown: keys.bool("wall_clock_breakdown"),
        memory_breakdown: keys.bool("memory_breakdown"),
        dump_state: keys.bool("dump_state"),
        dataloader_drop_last: keys.bool("dataloader_drop_last"),
        log_level: keys.choice("log_level", LogLevel::Info),
        data_types: DataTypes::read(resolver),
        bf16: Bf16::read(resolver),
        fp16: Fp16::read(resolver),
        optimizer,
        scheduler,
        zero: Zero::read(resolver, width),
        pipeline: Pipeline::read(resolver),
        activation_checkpointing: ActivationCheckpointing::read(resolver),
        aio: Aio::read(resolver),
        csv_monitor: Monitor::read(resolver, "csv_monitor"),
        tensorboard: Monitor::read(resolver, "tensorboard"),
        mlflow: Mlflow::read(resolver),
        prometheus: Prometheus::read(resolver),
        machine_monitor: MachineMonitor::read(resolver),
        comms_logger: CommsLogger::read(resolver),
        flops_profiler: FlopsProfiler::read(resolver),
        model,
        data,
        training,
        launcher: Launcher::read(resolver, world.ranks),
        autotuning: Autotuning::read(resolver),
        name: resolver.report.source().name.clone(),
        warnings: Vec::new(),
        typed: Arc::new(typed.clone()),
        origins: Origins::default(),
    }
}

/// Checks that concern more than one section.
fn check(config: &Config, world: World, resolver: &mut Resolver<'_>) {
    if config.training.eval_every > 0 && config.data.as_ref().is_some_and(|data| !data.has_eval()) {
        let message = "there is nothing to evaluate on".to_string();
        let help = "write `data.eval` or `data.eval_fraction`".to_string();
        resolver.contradiction(&["training.eval_every", "data"], message, Some(help));
    }
    if config.training.sample.is_some() && matches!(config.model, Some(Model::Mlp(_))) {
        let message = "an mlp does not generate text".to_string();
        resolver.contradiction(&["training.sample", "model.type"], message, Some("leave `sample` out".to_string()));
    }
    if config.training.initial_weights.is_some() && config.model.as_ref().is_some_and(|m| m.pretrained().is_some()) {
        let message = "`model.pretrained` and `training.initial_weights` both say what to start from".to_string();
        let help = Some("keep one of the two".to_string());
        resolver.contradiction(&["model.pretrained", "training.initial_weights"], message, help);
    }
    if config.autotuning.sweep.is_some() && config.data.as_ref().is_some_and(|data| !data.has_eval()) {
        let message = "a sweep is judged by the evaluation loss, and there is nothing to evaluate on".to_string();
        let help = "write `data.eval` or `data.eval_fraction`".to_string();
        resolver.contradiction(&["autotuning.sweep", "data"], message, Some(help));
    }
    config.fp16.check(&config.bf16, resolver);
    config.launcher.check(resolver);
    if config.training.reproducible {
        reproducible(config, world, resolver);
    }
}

/// Checks the requirements of `training.reproducible`. It adds over one binary tree of all micro-batches of the
/// global batch, cut at data-parallel ranks. Both numbers must therefore be powers of two, and communication must
/// not round.
fn reproducible(config: &Config, world: World, resolver: &mut Resolver<'_>) {
    const KEY: &str = "training.reproducible";
    if let Some(dtype) = config.communication_data_type.filter(|dtype| *dtype != Dtype::F32) {
        let message = format!("gradients that travel as {dtype} are rounded differently at every number of ranks");
        let help = "write `communication_data_type: fp32`, or leave it out".to_string();
        resolver.contradiction(&[KEY, "communication_data_type"], message, Some(help));
    }
    if let Some(dtype) = config.data_types.grad_accum_dtype.filter(|dtype| *dtype != Dtype::F32) {
        let message =
            format!("gradients that are added up as {dtype} are rounded differently at every number of ranks");
        let help = "write `grad_accum_dtype: fp32`, or leave it out".to_string();
        resolver.contradiction(&[KEY, "data_types.grad_accum_dtype"], message, Some(help));
    }
    let (ranks, name) = (world.data_parallel(), world.data_parallel_name());
    let micro_batches = config.gradient_accumulation_steps.saturating_mul(ranks);
    if !ranks.is_power_of_two() || !micro_batches.is_power_of_two() {
        let message = format!(
            "reproducible gradients need a power of two of {name} and of micro-batches in the global batch, \
             not {ranks} {name} × {} = {micro_batches}",
            config.gradient_accumulation_steps
        );
        let own = [KEY, "gradient_accumulation_steps"].map(|path| (path, resolver.at(path)));
        let places: Vec<_> = own.into_iter().chain(world.places(resolver)).collect();
        resolver.report.contradiction(&places, message, None);
    }
}
