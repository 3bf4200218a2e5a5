//! Converts a configuration to the options of the lower crates.

mod schedule;

use candle_core::DType;
use zero_config::{self as config, Config};
use zero_isa::Isa;
use zero_model::Model;
use zero_model::ops::Sharing;
use zero_optim::{
    Adafactor, Adagrad, AdamW, Average, Custom, DynamicLossScale, Lamb, Lion, LossScaling, Muon, NAdam, Optimizer,
    RAdam, RmsProp, RmsPropVariant, Schedule, ScheduleFree, Sgd,
};
use zero_partition::passes::{GatherOptions, PassOptions, RecomputeOptions, ReduceOptions, RefreshOptions};
use zero_partition::{Coded, LayoutOptions, Order, OuterOptions, OuterShare, TierOptions, ZeroOptions};
use zero_pipeline::ZeroStage;

use crate::batch::MicrobatchOrder;
use crate::device;
use crate::error::Error;
use crate::offload;
use crate::parameter_groups::clippings;

/// Everything that the engine derives from a configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Working dtype of parameters and activations.
    pub dtype: DType,
    /// How segments (flat parameters) are split into shards.
    pub layout: LayoutOptions,
    /// Which values reside on disk.
    pub tiers: TierOptions,
    /// Options of the passes that add communication to the program.
    pub passes: PassOptions,
    /// How a rank stores and updates its share of the model.
    pub zero: ZeroOptions,
    pub(crate) base_lr: f64,
    pub(crate) schedule: Schedule,
    pub(crate) order: MicrobatchOrder,
    /// Micro-batches per replica and step.
    pub micro_batches: usize,
    /// Number of samples per micro-batch.
    pub micro_batch_size: usize,
    /// Gradient of the reported loss with respect to the loss of one micro-batch.
    pub(crate) loss_gradient: f32,
    /// Loss scaling, with `fp16`.
    pub(crate) loss_scaling: Option<LossScaling>,
    /// Whether a gradient that is not finite skips the step: always in f32 and f16, and in bf16 unless
    /// `check_grad_overflow` is off.
    pub(crate) skips_overflow: bool,
}

/// Checks the configuration as far as possible without the model, and returns the dtype of parameters and activations.
///
/// # Errors
/// Fails on an unsupported combination of keys.
pub fn working_dtype(config: &Config) -> Result<DType, Error> {
    device::check(config)?;
    choose_instructions(config)?;
    narrow_values(config)?;
    schedule::schedule(config)?;
    Ok(dtype(config.working_dtype()))
}

impl Settings {
    /// Derives the settings from a model and a configuration that is resolved for its number of ranks.
    ///
    /// # Errors
    /// Fails on an unsupported combination of keys, and if the configuration needs an optimizer that the model lacks.
    pub fn new(config: &Config, model: &Model) -> Result<Self, Error> {
        let dtype = working_dtype(config)?;
        if model.lr_lambda().is_some() && config.scheduler != config::Scheduler::Constant {
            let message = "both the program, with `lr_lambda`, and the configured scheduler set the learning rate";
            return Err(Error::setting("scheduler", message, "remove the section or the call of `lr_lambda`"));
        }
        if let (Some(_), Some(buffer)) = (config.training.local_steps, model.buffers().first()) {
            let message = format!(
                "local steps do not support models with buffers such as `{}`: outer steps average only parameters",
                buffer.name()
            );
            let help = "use a model without running statistics, or remove the section";
            return Err(Error::setting("training.local_steps", message, help));
        }
        if let (2.., Some(buffer)) = (config.tensor_size(), model.buffers().first()) {
            let message = format!(
                "tensor parallelism does not support the buffer `{}`: its statistics need whole sequences, but each rank has slices",
                buffer.name()
            );
            let help = "use a model without running statistics, or remove the key";
            return Err(Error::setting("tensor_parallel.autotp_size", message, help));
        }
        if config.context_size() > 1 && model.whole_inputs().is_none() {
            let message = "ranks cannot share the sequences of this model: its layers may mix positions";
            let help = "remove the key; in your own program, call `Layers::shares_sequences` if the layers compute each position independently, or mix positions only with this project's attention";
            return Err(Error::setting(config.context_key(), message, help));
        }
        let ranks = config.shard_group_size();
        let zero_stage = config.zero.stage;
        let micro_batches = config.gradient_accumulation_steps;
        let shards_gradients = zero_stage >= ZeroStage::Two;
        let reproducible = config.training.reproducible;
        let overlap = config.zero.overlap_comm.unwrap_or(zero_stage == ZeroStage::Three);
        let optimizers: Result<Vec<_>, Error> =
            config.optimizers().into_iter().map(|(_, optimizer)| optimizers(optimizer, model)).collect();
        Ok(Self {
            dtype,
            layout: LayoutOptions {
                zero_stage,
                ranks,
                secondary: config.secondary_group_size(),
                tensor: config.tensor_size(),
                persistence_threshold: config.zero.stage3_param_persistence_threshold,
                model_persistence_threshold: config.zero.stage3_model_persistence_threshold,
            },
            tiers: offload::tiers(config),
            passes: PassOptions {
                offload: offload::passes(config),
                recompute: RecomputeOptions::none(),
                gather: GatherOptions {
                    prefetch: config.zero.stage3_prefetch_bucket_size,
                    max_live: config.zero.stage3_max_live_parameters,
                    max_reuse_distance: config.zero.stage3_max_reuse_distance,
                    overlap,
                },
                reduce: ReduceOptions { bucket: config.zero.reduce_bucket_size, overlap },
                refresh: RefreshOptions {
                    bucket: config.zero.allgather_bucket_size,
                    overlap,
                    last: config
                        .optimizers()
                        .iter()
                        .any(|(_, optimizer)| matches!(optimizer, config::Optimizer::Muon(_))),
                },
            },
            zero: ZeroOptions {
                optimizers: optimizers?.concat(),
                clippings: clippings(config).into_iter().map(|(_, clipping)| clipping).collect(),
                average: config.training.ema.map(|ema| Average { decay: ema.decay, start: ema.start_step }),
                outer: config.training.local_steps.map(|local| OuterOptions {
                    lr: local.outer_lr,
                    momentum: local.outer_momentum,
                    share: OuterShare {
                        replicates: config.mesh.data_parallel_replicate_degree,
                        replicate: 0,
                        width: if local.outer_momentum > 0.0 { 8 } else { 4 },
                    },
                }),
                sums_micro_batches: config.training.gradient_noise_scale.is_some(),
                state_dtype: state_dtype(config),
                gradient_dtype: self::dtype(config.gradient_dtype()),
                has_master: !config.bf16.bf16_master_weights_and_grads,
                stochastic_rounding: config.bf16.stochastic_rounding.then_some(config.training.seed),
                order: if reproducible { Order::Tree } else { Order::Arrival },
                communication: communication(config, dtype),
                coded: Coded {
                    weights: config.zero.zero_quantized_weights,
                    frozen_weights: config.zero.zero_quantized_weights
                        || config.zero.zero_quantized_nontrainable_weights,
                    gradients: config.zero.zero_quantized_gradients,
                },
                reduce_scatter: config.zero.reduce_scatter,
                decay_all: config.training.weight_decay_on == config::WeightDecayOn::All,
                ignore_unused: config.zero.ignore_unused_parameters,
                disk: offload::disk(config),
                on_gpu: device::on_gpu(config),
            },
            base_lr: config.optimizer.lr(),
            schedule: schedule::schedule(config)?,
            // The micro-batches that are summed first must be neighbours in the binary tree of a reproducible sum. If
            // each rank accumulates before the reduction, these are the micro-batches of one rank. With sharded
            // gradients, each micro-batch is first reduced over the ranks, so these are the micro-batches with the same
            // index on all ranks.
            order: if reproducible && !shards_gradients {
                MicrobatchOrder::Contiguous
            } else {
                MicrobatchOrder::InTurn
            },
            micro_batches,
            micro_batch_size: config.train_micro_batch_size_per_gpu,
            loss_gradient: loss_gradient(config, micro_batches),
            loss_scaling: loss_scaling(&config.fp16),
            skips_overflow: !config.bf16.enabled || config.bf16.check_grad_overflow,
        })
    }
}

/// Returns how attention combines the slices of sequences. If both `sequence_parallel_size` and
/// `context_parallel_degree` are set, returns how the outer groups combine them.
pub(crate) fn sharing(config: &Config) -> Sharing {
    match config.mesh.context_parallel_degree {
        1 => Sharing::Heads,
        _ if config.uses_ring_attention() => Sharing::Ring,
        _ => Sharing::Queries,
    }
}

/// Returns the gradient of the reported loss with respect to the loss of one micro-batch. Each replica has
/// `micro_batches` micro-batches.
pub(crate) fn loss_gradient(config: &Config, micro_batches: usize) -> f32 {
    let ranks = match config.training.local_steps {
        Some(_) => config.shard_group_size(),
        None => config.ranks_of_stage(),
    };
    let averaged = match config.gradient_allreduce_op {
        config::GradientReduceOp::Mean => micro_batches * ranks,
        // The loss of a sample is the mean of the losses of its slices.
        config::GradientReduceOp::Sum => micro_batches * config.context_size(),
    };
    1.0 / averaged as f32
}

/// Rejects optimizer values in bf16 or in 8 bits on a GPU.
fn narrow_values(config: &Config) -> Result<(), Error> {
    if config.training.device == config::Compute::Cpu {
        return Ok(());
    }
    if let Some(key) = config.eight_bit_states() {
        let message = "8-bit states are not implemented on a GPU";
        return Err(Error::setting(&key, message, "set `optim_bits: 32`"));
    }
    if config.bf16.bf16_master_weights_and_grads || state_dtype(config) == DType::BF16 {
        let message = "parameters without an f32 copy, and states in bf16, are not implemented on a GPU";
        return Err(Error::setting(
            "training.device",
            message,
            "keep the f32 copy of the parameters, and the states in f32",
        ));
    }
    if config.gradient_dtype() != config::Dtype::F32 {
        let message = "gradients in bf16 are not implemented on a GPU";
        return Err(Error::setting("training.device", message, "set `data_types: {grad_accum_dtype: fp32}`"));
    }
    Ok(())
}

/// Selects the instruction set of this process's kernels.
fn choose_instructions(config: &Config) -> Result<(), Error> {
    let set = config.launcher.instruction_set;
    let configured = (set != config::InstructionSet::Auto).then_some(set.as_str());
    Isa::choose(configured).map_err(|error| Error::setting(error.source(), error.to_string(), error.help()))?;
    Ok(())
}

fn dtype(named: config::Dtype) -> DType {
    match named {
        config::Dtype::F32 => DType::F32,
        config::Dtype::Bf16 => DType::BF16,
        config::Dtype::F16 => DType::F16,
    }
}

/// Returns the dtype of the optimizer's states.
fn state_dtype(config: &Config) -> DType {
    match config.bf16.enabled && (config.bf16.bf16_optimizer_states || !config.optimizer.has_f32_states()) {
        true => DType::BF16,
        false => DType::F32,
    }
}

fn communication(config: &Config, working: DType) -> DType {
    match config.communication_data_type {
        None if config.training.reproducible => DType::F32,
        None => working,
        Some(named) => dtype(named),
    }
}

fn loss_scaling(fp16: &config::Fp16) -> Option<LossScaling> {
    let dynamic = DynamicLossScale {
        initial: 2f64.powi(fp16.initial_scale_power as i32),
        window: fp16.loss_scale_window as u64,
        hysteresis: fp16.hysteresis as u64,
        consecutive: fp16.consecutive_hysteresis,
        min: fp16.min_loss_scale as f64,
    };
    let scaling = if fp16.is_dynamic() { LossScaling::Dynamic(dynamic) } else { LossScaling::Static(fp16.loss_scale) };
    fp16.enabled.then_some(scaling)
}

/// Returns the update rules of an optimizer: one, or for Muon two, the second of which is the AdamW that updates the
/// other parameters.
fn optimizers(optimizer: &config::Optimizer, model: &Model) -> Result<Vec<Optimizer>, Error> {
    use config::Optimizer as From;
    const KEY: &str = "optimizer.type";
    let is_custom = matches!(optimizer, From::Custom(_));
    if model.optimizer().is_some() && !is_custom {
        let message = "the program has a custom optimizer, which the configuration does not use";
        return Err(Error::setting(KEY, message, "set `type: Custom`, or remove the program's optimizer"));
    }
    let pair = |[a, b]: [f64; 2]| (a, b);
    let rule = match *optimizer {
        From::AdamW(config::AdamParams { betas, eps, weight_decay, bias_correction, adam_w_mode, .. }) => {
            let betas = pair(betas);
            Optimizer::AdamW(AdamW { betas, eps, weight_decay, bias_correction, decoupled: adam_w_mode })
        }
        From::MuAdam(config::MuAdamParams { betas, eps, weight_decay, .. })
        | From::MuAdamW(config::MuAdamParams { betas, eps, weight_decay, .. }) => {
            let (betas, decoupled) = (pair(betas), matches!(optimizer, From::MuAdamW(_)));
            Optimizer::AdamW(AdamW { betas, eps, weight_decay, decoupled, ..AdamW::default() })
        }
        From::Sgd(config::SgdParams { momentum, dampening, nesterov, weight_decay, .. })
        | From::MuSgd(config::SgdParams { momentum, dampening, nesterov, weight_decay, .. }) => {
            Optimizer::Sgd(Sgd { momentum, dampening, nesterov, weight_decay })
        }
        From::Lion(config::LionParams { betas, weight_decay, .. }) => {
            Optimizer::Lion(Lion { betas: pair(betas), weight_decay })
        }
        From::Adagrad(config::AdagradParams { eps, weight_decay, .. }) => {
            Optimizer::Adagrad(Adagrad { eps, weight_decay })
        }
        From::RmsProp(config::RmsPropParams { alpha, eps, weight_decay, momentum, centered, .. }) => {
            let variant = match (centered, momentum > 0.0) {
                (true, _) => RmsPropVariant::Centered,
                (false, true) => RmsPropVariant::Momentum(momentum),
                (false, false) => RmsPropVariant::Plain,
            };
            Optimizer::RmsProp(RmsProp { alpha, eps, weight_decay, variant })
        }
        From::NAdam(config::NAdamParams {
            betas, eps, weight_decay, decoupled_weight_decay, momentum_decay, ..
        }) => {
            let (betas, decoupled) = (pair(betas), decoupled_weight_decay);
            Optimizer::NAdam(NAdam { betas, eps, weight_decay, momentum_decay, decoupled })
        }
        From::RAdam(config::RAdamParams { betas, eps, weight_decay, decoupled_weight_decay: decoupled, .. }) => {
            Optimizer::RAdam(RAdam { betas: pair(betas), eps, weight_decay, decoupled })
        }
        From::Lamb(config::LambParams {
            betas,
            eps,
            weight_decay,
            bias_correction,
            max_coeff,
            min_coeff,
            eps_inside_sqrt,
            ..
        }) => {
            let (betas, coeffs) = (pair(betas), (min_coeff, max_coeff));
            Optimizer::Lamb(Lamb { betas, eps, eps_inside_sqrt, weight_decay, bias_correction, coeffs })
        }
        From::ScheduleFree(config::ScheduleFreeParams { betas, eps, weight_decay, r, weight_lr_power, .. }) => {
            let (betas, share) = (pair(betas), ScheduleFree::default().share);
            Optimizer::ScheduleFree(ScheduleFree { betas, eps, weight_decay, r, weight_lr_power, share })
        }
        From::Adafactor(config::AdafactorParams { beta2_decay, eps, d, weight_decay, .. }) => {
            Optimizer::Adafactor(Adafactor { beta2_decay, eps: pair(eps), d, weight_decay, rate: 0.0 })
        }
        From::Muon(config::MuonParams { momentum, nesterov, weight_decay, ns_steps, betas, eps, .. }) => {
            let others = AdamW { betas: pair(betas), eps, weight_decay, ..AdamW::default() };
            let muon = Muon { momentum, nesterov, weight_decay, ns_steps };
            return Ok(vec![Optimizer::Muon(muon), Optimizer::AdamW(others)]);
        }
        From::Custom(config::CustomParams { weight_decay, .. }) => {
            let Some(rule) = model.optimizer().cloned() else {
                let message = "`type: Custom` selects the program's custom optimizer, but this program has none";
                let help = "call `Trainer::optimizer` or `Layers::optimizer` in your own program, or use another type";
                return Err(Error::setting(KEY, message, help));
            };
            Optimizer::Custom(Custom { rule, weight_decay })
        }
    };
    Ok(vec![rule])
}

/// Replaces an `auto` number of steps in the schedule with `steps`, for a run whose length is given in epochs.
#[must_use]
pub fn with_total_steps(mut config: Config, steps: u64) -> Config {
    if let Some(total) = config.scheduler.total_steps_mut() {
        total.get_or_insert(steps as usize);
    }
    config
}
