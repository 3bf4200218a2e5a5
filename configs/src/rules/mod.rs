//! The rules that concern several sections.

mod data;
mod mup;
mod optimizer;
mod parallel;
mod precision;
mod preference;

use crate::config::*;
use crate::read::reader::Resolver;
use crate::world::World;

/// Runs the checks that concern more than one section.
pub(crate) fn check(config: &mut Config, world: World, resolver: &mut Resolver<'_>) {
    config.training.check(resolver);
    if config.gradient_clipping_value.is_some() && config.gradient_clipping > 0.0 {
        let (norm, value) = (Config::gradient_clipping, Config::gradient_clipping_value);
        let message = format!("`{norm}` and `{value}` both clip the gradient");
        resolver.contradiction(&[norm, value], message, Some(format!("keep one of the two, or set `{norm}: 0`")));
    }
    config.optimizer.check(config, resolver);
    config.scheduler.check(&config.optimizer, config.training.max_steps, resolver);
    let groups = config.training.param_groups.as_deref().unwrap_or_default();
    ParameterGroup::check(groups, &config.optimizer, &config.scheduler, resolver);
    if let Some(model) = &config.model {
        model.check(resolver);
    }
    if let Some(data) = &config.data {
        data.check(resolver.facts.longest, resolver);
        if let Some(Model::Llama(model)) = &config.model {
            model.check_rows(data, config.preference.is_some(), resolver);
        }
    }
    if let Some(quantization) = &config.quantization_config {
        quantization.check(config.working_dtype(), resolver);
    }
    Mup::check(config, resolver);
    Data::check_max_tokens(config, resolver);
    if let Some(rampup) = config.training.rampup_batch_size {
        rampup.check(config, resolver);
    }
    if config.training.gradient_noise_scale.is_some() {
        let key = Training::gradient_noise_scale;
        if config.batch_sizes().at(0) == config.train_micro_batch_size_per_gpu {
            let message =
                "the gradient noise scale compares the micro-batches of a step, but a step has only one".to_string();
            let help = "use more ranks, or set `gradient_accumulation_steps: 2`".to_string();
            resolver.contradiction(&[key, Config::train_batch_size], message, Some(help));
        }
        if config.data.as_ref().is_some_and(|data| data.max_tokens.is_some()) {
            let message = "the gradient noise scale needs micro-batches with equal numbers of samples; with \
                           `max_tokens` these numbers differ"
                .to_string();
            resolver.contradiction(&[key, Data::max_tokens], message, Some("keep one of the two".to_string()));
        }
    }
    Preference::check(config, resolver);
    DataEfficiency::check(config, resolver);
    config.zero.check(resolver);
    config.pipeline.check(resolver);
    Mesh::check(config, resolver);
    LocalSteps::check(config, resolver);
    parallel::check_sequences(config, resolver);
    TensorParallel::check(config, resolver);
    Zero::check_secondary(config, world, resolver);
    if let Some(activation_checkpointing) = &config.activation_checkpointing {
        activation_checkpointing.check(resolver);
    }
    config.comms_logger.check(resolver);
    FlopsProfiler::check(resolver);
    config.autotuning.check(resolver);
    if config.training.eval_every > 0 && config.data.as_ref().is_some_and(|data| !data.has_eval()) {
        let message = "`eval_every` needs evaluation data, and there is none".to_string();
        let help = "set `data.eval` or `data.eval_fraction`".to_string();
        resolver.contradiction(&[Training::eval_every, Config::data], message, Some(help));
    }
    if config.training.sample.is_some() && matches!(config.model, Some(Model::Mlp(_))) {
        let message = "an mlp does not generate text".to_string();
        resolver.contradiction(&[Training::sample, Model::TYPE], message, Some("remove `sample`".to_string()));
    }
    if config.training.initial_weights.is_some() && config.model.as_ref().is_some_and(|m| m.pretrained().is_some()) {
        let message =
            format!("`{}` and `{}` both set the initial weights", Gpt2::pretrained, Training::initial_weights);
        let help = Some("keep one of the two".to_string());
        resolver.contradiction(&[Gpt2::pretrained, Training::initial_weights], message, help);
    }
    if config.autotuning.sweep.is_some() && config.data.as_ref().is_some_and(|data| !data.has_eval()) {
        let message = "a sweep compares evaluation losses, but there is no evaluation data".to_string();
        let help = "set `data.eval` or `data.eval_fraction`".to_string();
        resolver.contradiction(&[Autotuning::sweep, Config::data], message, Some(help));
    }
    config.fp16.check(&config.bf16, resolver);
    config.bf16.check(config, resolver);
    config.launcher.check(resolver);
    if config.training.reproducible {
        reproducible(config, world, resolver);
    }
}

/// Checks the requirements of `training.reproducible`. Gradients are added in one binary tree. Its leaves are all
/// micro-batches of the global batch, or all their slices if ranks share sequences, and each rank of a stage has one
/// subtree. The numbers of leaves and of ranks must therefore be powers of two, and communication must not round.
fn reproducible(config: &Config, world: World, resolver: &mut Resolver<'_>) {
    const KEY: &str = Training::reproducible;
    if let Some(dtype) = config.communication_data_type.filter(|dtype| *dtype != Dtype::F32) {
        let message = format!(
            "results are not reproducible if gradients are communicated as {dtype}: rounding depends on the number of \
             ranks"
        );
        let help = "set `communication_data_type: fp32`, or remove it".to_string();
        resolver.contradiction(&[KEY, Config::communication_data_type], message, Some(help));
    }
    if let Some(dtype) = config.data_types.grad_accum_dtype.filter(|dtype| *dtype != Dtype::F32) {
        let message = format!(
            "results are not reproducible if gradients are summed as {dtype}: rounding depends on the number of ranks"
        );
        let help = "set `grad_accum_dtype: fp32`, or remove it".to_string();
        resolver.contradiction(&[KEY, DataTypes::grad_accum_dtype], message, Some(help));
    }
    if config.zero.zero_quantized_gradients {
        let message = "results are not reproducible if gradients are communicated in 8 or 4 bits: rounding depends on \
                       the number of ranks"
            .to_string();
        let help = "remove `zero_quantized_gradients`".to_string();
        resolver.contradiction(&[KEY, Zero::zero_quantized_gradients], message, Some(help));
    }
    let (ranks, name) = match world.context {
        1 => (world.data_parallel(), world.data_parallel_name()),
        context => (world.data_parallel() * context, "ranks of a stage"),
    };
    let micro_batches = config.gradient_accumulation_steps.saturating_mul(ranks);
    if !ranks.is_power_of_two() || !micro_batches.is_power_of_two() {
        let message = format!(
            "with `reproducible: true`, the numbers of {name} and of micro-batches in the global batch must be powers of two, \
             not {ranks} {name} × {} = {micro_batches}",
            config.gradient_accumulation_steps
        );
        let own = [KEY, Config::gradient_accumulation_steps].map(|path| (path, resolver.at(path)));
        let places: Vec<_> = own.into_iter().chain(world.places(resolver)).collect();
        resolver.report.contradiction(&places, message, None);
    }
}
