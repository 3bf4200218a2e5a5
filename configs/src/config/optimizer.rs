//! `optimizer`: DeepSpeed's names and defaults.

use serde::Serialize;

use crate::config::{Config, Scheduler, Training};
use crate::reader::{Read, Reader, Resolver};
use crate::schema::*;
use crate::table::{path, section};

/// An optimizer with its hyperparameters. `training.weight_decay_on` selects the parameters that are decayed.
#[derive(Debug, Clone, PartialEq)]
pub enum Optimizer {
    /// Adam with decoupled weight decay (Loshchilov & Hutter 2019), or plain Adam if `adam_w_mode` is off.
    AdamW(Adam),
    /// Stochastic gradient descent, as `torch.optim.SGD`.
    Sgd(Sgd),
    /// Lion: the sign of an interpolated momentum (Chen et al. 2023).
    Lion(Lion),
    /// Adagrad: divides by the root of the sum of squared gradients (Duchi et al. 2011).
    Adagrad(Adagrad),
    /// RMSprop: divides by the root of the mean of squared gradients, as `torch.optim.RMSprop`.
    RmsProp(RmsProp),
    /// NAdam: Adam with Nesterov's look-ahead (Dozat 2016), as `torch.optim.NAdam`.
    NAdam(NAdam),
    /// RAdam: Adam that corrects the variance of its second moment (Liu et al. 2020), as `torch.optim.RAdam`.
    RAdam(RAdam),
    /// Muon: orthogonalized momentum for matrices, AdamW for the rest (Jordan et al. 2024).
    Muon(Muon),
    /// LAMB: Adam whose step on each parameter is scaled by a ratio of norms (You et al. 2020), as DeepSpeed's kernel.
    Lamb(Lamb),
    /// Schedule-free AdamW, as `schedulefree.AdamWScheduleFree` (Defazio et al. 2024).
    ScheduleFree(ScheduleFree),
    /// Adafactor: second moments with a value for each row and column (Shazeer & Stern 2018), as `torch.optim.Adafactor`.
    Adafactor(Adafactor),
}

section! {
    /// Parameters of Adam.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct Adam(keys) in Optimizer::PARAMS {
        /// Learning rate; a scheduler may replace it step by step.
        pub lr: f64 = engine(NON_NEGATIVE, "0.001", LR) [else TRAINER];
        /// Decay of the first and second moment.
        pub betas: [f64; 2] = now(BETAS, "[0.9, 0.999]", "Decay of the first and the second moment");
        /// Added to the square root of the second moment.
        pub eps: f64 = now(NON_NEGATIVE, "1.0e-8", "Added to the root of the second moment");
        /// Weight decay.
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Weight decay");
        /// Divide the moments by 1 − βᵗ.
        pub bias_correction: bool = now(Kind::Bool, "true", "Divide the moments by 1 − βᵗ");
        /// `true`: decay the weights directly (AdamW). `false`: add the decay to the gradient (L2).
        pub adam_w_mode: bool = now(Kind::Bool, "true", "Decay the weights directly; false, with type Adam only: add the decay to the gradient");
        = ignored("torch_adam", Kind::Bool, "false", "there is one implementation");
        /// Keep the moments in f32; otherwise in bf16 if parameters are.
        pub fp32_optimizer_states: bool = now(Kind::Bool, "true", "Moments in f32; false: in the type of the parameters, f32 or bf16");
        /// Bits of a state's value: 32, or 8 for large parameters.
        pub optim_bits: usize = key(OPTIM_BITS, "32", "Bits of a state's value: 32; or 8, in blocks as bitsandbytes'");
        /// Elements from which a parameter has states in 8 bits.
        pub min_8bit_size: usize = key(COUNT, "4096", "Elements from which a parameter has states in 8 bits");
        = rejected("amsgrad", "false", "DeepSpeed's Adam does not have it either");
        = removed("max_grad_norm", "write `gradient_clipping` at the top level");
    }
}

section! {
    /// Parameters of SGD.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct Sgd(keys) in Optimizer::PARAMS {
        /// Learning rate.
        pub lr: f64 = engine(NON_NEGATIVE, "0.001", LR) [else TRAINER];
        /// Momentum; 0 keeps no state.
        pub momentum: f64 = now(Kind::Float(FRACTION), "0.0", "Momentum; 0 keeps no state");
        /// Dampening of the gradient that enters the momentum.
        pub dampening: f64 = now(RATIO, "0.0", "Dampening of the gradient that enters the momentum");
        /// Nesterov momentum.
        pub nesterov: bool = now(Kind::Bool, "false", "Nesterov momentum");
        /// L2 weight decay, added to the gradient.
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Added to the gradient");
        = rejected("maximize", "false", "losses are minimised");
        = rejected("differentiable", "false", "the step is not part of a graph");
        = ignored("foreach", Kind::Bool, "= PyTorch's choice", "there is one implementation");
        = ignored("fused", Kind::Bool, "= PyTorch's choice", "there is one implementation");
        = removed("max_grad_norm", "write `gradient_clipping` at the top level");
    }
}

section! {
    /// Parameters of Lion.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct Lion(keys) in Optimizer::PARAMS {
        /// Learning rate.
        pub lr: f64 = engine(NON_NEGATIVE, "0.001", LR) [else TRAINER];
        /// Interpolation factor of the update and decay of the momentum.
        pub betas: [f64; 2] = now(BETAS, "[0.9, 0.999]", "Interpolation for the update, decay of the momentum");
        /// Decoupled weight decay.
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Decoupled weight decay");
        /// Bits of a state's value: 32, or 8 for large parameters.
        pub optim_bits: usize = key(OPTIM_BITS, "32", "Bits of a state's value: 32; or 8, in blocks as bitsandbytes'");
        /// Elements from which a parameter has states in 8 bits.
        pub min_8bit_size: usize = key(COUNT, "4096", "Elements from which a parameter has states in 8 bits");
        = removed("max_grad_norm", "write `gradient_clipping` at the top level");
    }
}

section! {
    /// Parameters of Adagrad.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct Adagrad(keys) in Optimizer::PARAMS {
        /// Learning rate.
        pub lr: f64 = engine(NON_NEGATIVE, "0.01", LR) [else TRAINER];
        /// Added to the square root of the sum.
        pub eps: f64 = now(NON_NEGATIVE, "1.0e-10", "Added to the root of the sum");
        /// L2 weight decay, added to the gradient.
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Added to the gradient");
        /// Keep the sum in f32; otherwise in bf16 if parameters are.
        pub fp32_optimizer_states: bool = now(Kind::Bool, "true", "The sum in f32; false: in the type of the parameters, f32 or bf16");
        = removed("max_grad_norm", "write `gradient_clipping` at the top level");
    }
}

section! {
    /// Parameters of RMSprop, as `torch.optim.RMSprop`.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct RmsProp(keys) in Optimizer::PARAMS {
        /// Learning rate.
        pub lr: f64 = engine(NON_NEGATIVE, "0.01", LR) [else TRAINER];
        /// Decay of the mean of squared gradients.
        pub alpha: f64 = now(Kind::Float(FRACTION), "0.99", "Decay of the mean of squared gradients");
        /// Added to the square root of the mean.
        pub eps: f64 = now(NON_NEGATIVE, "1.0e-8", "Added to the root of the mean");
        /// L2 weight decay, added to the gradient.
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Added to the gradient");
        /// Momentum of the steps; 0 keeps no state.
        pub momentum: f64 = now(Kind::Float(FRACTION), "0.0", "Momentum of the steps; 0 keeps no state for it");
        /// Divide by the root of the variance.
        pub centered: bool = now(Kind::Bool, "false", "Divide by the root of the variance; not together with `momentum`");
        = rejected("maximize", "false", "losses are minimised");
        = rejected("differentiable", "false", "the step is not part of a graph");
        = ignored("capturable", Kind::Bool, "false", "there is no CUDA graph to capture into");
        = ignored("foreach", Kind::Bool, "= PyTorch's choice", "there is one implementation");
        = removed("max_grad_norm", "write `gradient_clipping` at the top level");
    }
}

section! {
    /// Parameters of NAdam, as `torch.optim.NAdam`.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct NAdam(keys) in Optimizer::PARAMS {
        /// Learning rate.
        pub lr: f64 = engine(NON_NEGATIVE, "0.002", LR) [else TRAINER];
        /// Decay of the first and second moment.
        pub betas: [f64; 2] = now(BETAS, "[0.9, 0.999]", "Decay of the first and the second moment");
        /// Added to the square root of the second moment.
        pub eps: f64 = now(NON_NEGATIVE, "1.0e-8", "Added to the root of the second moment");
        /// Weight decay.
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Weight decay");
        /// `true`: decay the weights directly. `false`: add the decay to the gradient (L2).
        pub decoupled_weight_decay: bool = now(Kind::Bool, "false", "Decay the weights directly; false: add the decay to the gradient");
        /// Speed at which the momentum rises to the first beta.
        pub momentum_decay: f64 = now(NON_NEGATIVE, "0.004", "Speed at which the momentum rises to β₁");
        = rejected("maximize", "false", "losses are minimised");
        = rejected("differentiable", "false", "the step is not part of a graph");
        = ignored("capturable", Kind::Bool, "false", "there is no CUDA graph to capture into");
        = ignored("foreach", Kind::Bool, "= PyTorch's choice", "there is one implementation");
        = removed("max_grad_norm", "write `gradient_clipping` at the top level");
    }
}

section! {
    /// Parameters of RAdam, as `torch.optim.RAdam`.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct RAdam(keys) in Optimizer::PARAMS {
        /// Learning rate.
        pub lr: f64 = engine(NON_NEGATIVE, "0.001", LR) [else TRAINER];
        /// Decay of the first and second moment.
        pub betas: [f64; 2] = now(BETAS, "[0.9, 0.999]", "Decay of the first and the second moment");
        /// Added to the square root of the second moment.
        pub eps: f64 = now(NON_NEGATIVE, "1.0e-8", "Added to the root of the second moment");
        /// Weight decay.
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Weight decay");
        /// `true`: decay the weights directly. `false`: add the decay to the gradient (L2).
        pub decoupled_weight_decay: bool = now(Kind::Bool, "false", "Decay the weights directly; false: add the decay to the gradient");
        = rejected("maximize", "false", "losses are minimised");
        = rejected("differentiable", "false", "the step is not part of a graph");
        = ignored("capturable", Kind::Bool, "false", "there is no CUDA graph to capture into");
        = ignored("foreach", Kind::Bool, "= PyTorch's choice", "there is one implementation");
        = removed("max_grad_norm", "write `gradient_clipping` at the top level");
    }
}

section! {
    /// Parameters of Muon.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Muon(keys) in Optimizer::PARAMS {
        /// Learning rate.
        pub lr: f64 = engine(NON_NEGATIVE, "0.001", LR) [else TRAINER];
        /// Learning rate of the matrices, in place of `lr`.
        pub muon_lr: Option<f64> = now(NON_NEGATIVE, "= lr", "Learning rate of the matrices");
        /// Learning rate of all other parameters, in place of `lr`.
        pub adam_lr: Option<f64> = now(NON_NEGATIVE, "= lr", "Learning rate of all other parameters, which AdamW updates");
        /// Names of the matrices; `None` for all but embeddings and the head.
        pub matrices: Option<Vec<String>> = key(Kind::Texts, "null", "Globs over the names of the parameters with two dimensions that are orthogonalized; null: all whose name has none of embed, lm_head, wte and wpe");
        /// Momentum of the matrices.
        pub momentum: f64 = now(Kind::Float(FRACTION), "0.95", "Momentum of the matrices");
        /// Nesterov momentum.
        pub nesterov: bool = key(Kind::Bool, "true", "Nesterov momentum");
        /// Weight decay.
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Decoupled weight decay");
        /// Number of Newton–Schulz iterations.
        pub ns_steps: usize = key(COUNT, "5", "Newton–Schulz iterations");
        /// Decay of AdamW's moments.
        pub betas: [f64; 2] = now(BETAS, "[0.9, 0.999]", "AdamW's decay of the first and the second moment");
        /// Added to AdamW's root.
        pub eps: f64 = now(NON_NEGATIVE, "1.0e-8", "Added to the root of AdamW's second moment");
        = ignored("ns_method", Kind::Text, "gram", "there is one implementation, in f32; gram and standard differ by rounding");
        = removed("max_grad_norm", "write `gradient_clipping` at the top level");
    }
}

section! {
    /// Parameters of LAMB.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct Lamb(keys) in Optimizer::PARAMS {
        /// Learning rate.
        pub lr: f64 = engine(NON_NEGATIVE, "0.001", LR) [else TRAINER];
        /// Decay of the first and second moment.
        pub betas: [f64; 2] = now(BETAS, "[0.9, 0.999]", "Decay of the first and the second moment");
        /// Added to the square root of the second moment.
        pub eps: f64 = now(NON_NEGATIVE, "1.0e-8", "Added to the root of the second moment");
        /// Weight decay.
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Weight decay, part of the direction whose norm the ratio has");
        /// Multiply the step by √(1 − β₂ᵗ)/(1 − β₁ᵗ).
        pub bias_correction: bool = now(Kind::Bool, "true", "Multiply the step by √(1 − β₂ᵗ)/(1 − β₁ᵗ)");
        /// Largest trust ratio.
        pub max_coeff: f64 = now(NON_NEGATIVE, "10.0", "Largest trust ratio");
        /// Smallest trust ratio.
        pub min_coeff: f64 = now(NON_NEGATIVE, "0.01", "Smallest trust ratio");
        /// Add `eps` to the second moment, under the root.
        pub eps_inside_sqrt: bool = now(Kind::Bool, "false", "Add eps to the second moment, under the root");
        = rejected("amsgrad", "false", "DeepSpeed's Lamb does not have it either");
        = removed("max_grad_norm", "write `gradient_clipping` at the top level");
    }
}

section! {
    /// Parameters of schedule-free AdamW, as `schedulefree.AdamWScheduleFree`.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct ScheduleFree(keys) in Optimizer::PARAMS {
        /// Learning rate.
        pub lr: f64 = engine(NON_NEGATIVE, "0.0025", LR) [else TRAINER];
        /// Share of the average in the weights that gradients are taken at, and decay of the second moment.
        pub betas: [f64; 2] = now(BETAS, "[0.9, 0.999]", "Share of the average in the weights that gradients are taken at, and decay of the second moment");
        /// Added to the square root of the second moment.
        pub eps: f64 = now(NON_NEGATIVE, "1.0e-8", "Added to the root of the second moment");
        /// Weight decay.
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Weight decay");
        /// Steps in which the learning rate rises linearly to `lr`.
        pub warmup_steps: u64 = key(COUNT_OR_0, "0", "Steps in which the learning rate rises linearly to `lr`");
        /// Power of the step in the weight of its iterate in the average.
        pub r: f64 = key(NON_NEGATIVE, "0.0", "Power of the step in the weight of its iterate in the average");
        /// Power of the largest learning rate so far in the weight of an iterate.
        pub weight_lr_power: f64 = key(NON_NEGATIVE, "2.0", "Power of the largest learning rate so far in the weight of an iterate");
        = ignored("foreach", Kind::Bool, "= PyTorch's choice", "there is one implementation");
        = removed("max_grad_norm", "write `gradient_clipping` at the top level");
    }
}

section! {
    /// Parameters of Adafactor, as `torch.optim.Adafactor`.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct Adafactor(keys) in Optimizer::PARAMS {
        /// Largest relative step size, and the rate of the weight decay.
        pub lr: f64 = engine(NON_NEGATIVE, "0.01", "Largest relative step: steps are min(lr, 1/√step) times the rms of the parameter; auto: 5e-5, as Hugging Face's Trainer") [else TRAINER];
        /// Exponent of the step in the weight of new squares.
        pub beta2_decay: f64 = now(NOT_POSITIVE, "-0.8", "β₂ is 1 − step^beta2_decay");
        /// Bounds of the second moment's root and of the parameter's rms.
        pub eps: [f64; 2] = now(Kind::Pair(ANY_SIZE), "[1.1920928955078125e-7, 0.001]", "Smallest root of the second moment, and smallest rms of a parameter; PyTorch's null is the first default, in f32");
        /// Largest rms of an update.
        pub d: f64 = now(Kind::Float(Range { min: 1.0, ..ANY_SIZE }), "1.0", "Largest rms of an update before it is scaled down");
        /// Weight decay.
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Decoupled weight decay");
        = rejected("maximize", "false", "losses are minimised");
        = ignored("foreach", Kind::Bool, "= PyTorch's choice", "there is one implementation");
        = rejected("scale_parameter", "true", "steps always scale with the rms of the parameter, as in PyTorch");
        = rejected("relative_step", "false", "write the largest relative step as `lr`");
        = rejected("warmup_init", "false", "write a `scheduler`");
        = rejected("beta1", "null", "a first moment is not implemented");
        = removed("clip_threshold", "write `d`, its name in PyTorch");
        = removed("decay_rate", "write `beta2_decay`, its name in PyTorch");
        = removed("max_grad_norm", "write `gradient_clipping` at the top level");
    }
}

impl Muon {
    /// Returns the learning rate of the parameters that are no matrices.
    pub fn lr_of_others(&self) -> f64 {
        self.adam_lr.unwrap_or(self.lr)
    }
}

const LR: &str = "Learning rate; auto: 5e-5, as Hugging Face's Trainer";
/// Hugging Face's Trainer replaces an `lr` of `auto` by the default of its `learning_rate`.
const TRAINER: f64 = 5e-5;
const ANY_SIZE: Range = Range { min: 0.0, max: f64::MAX, above: false, below: false };
const NOT_POSITIVE: Kind = Kind::Float(Range { min: f64::MIN, max: 0.0, ..ANY_SIZE });
const BETAS: Kind = Kind::Pair(FRACTION);
/// 8 or 32.
pub(crate) const OPTIM_BITS: Kind = Kind::Int { min: 8, max: 32 };
const ONE_BIT: &str = "compressed-momentum optimizers are gone from DeepSpeed; use AdamW";
const LATER: Status = Status::Later { off: &[] };

impl Optimizer {
    pub(crate) const PARAMS: &'static str = path!(Config::optimizer, PARAMS);
    pub(crate) const TYPE: &'static str = path!(Config::optimizer, TYPE);

    #[rustfmt::skip]
    pub(crate) const VARIANTS: Variants = Variants {
        params: Some(PARAMS),
        shared: &[rejected("legacy_fusion", "false", "it is an old path for fp16")],
        list: &[
            variant(ADAMW, "Adam with decoupled weight decay", Adam::SECTION.keys),
            variant("Adam", "The same, unless `adam_w_mode` is false", Adam::SECTION.keys),
            variant("SGD", "Stochastic gradient descent with momentum", Sgd::SECTION.keys),
            variant("Lion", "Sign of an interpolated momentum", Lion::SECTION.keys),
            variant("Adagrad", "Sum of squared gradients", Adagrad::SECTION.keys),
            variant("RMSprop", "Mean of squared gradients", RmsProp::SECTION.keys),
            variant("NAdam", "Adam with Nesterov's look-ahead", NAdam::SECTION.keys),
            variant("RAdam", "Adam with a correction of the second moment's variance", RAdam::SECTION.keys),
            variant(SCHEDULE_FREE, "AdamW with an average of the iterates in place of a schedule", ScheduleFree::SECTION.keys),
            variant("Muon", "Orthogonalized momentum for matrices, AdamW for the rest", Muon::SECTION.keys),
            variant("Lamb", "Adam with a trust ratio for each parameter", Lamb::SECTION.keys),
            variant("Adafactor", "Second moments with one value for each row and column", Adafactor::SECTION.keys),
            Variant { status: LATER, ..variant("MuAdam", "Adam for maximal-update parametrisation", &[]) },
            Variant { status: LATER, ..variant("MuAdamW", "AdamW for maximal-update parametrisation", &[]) },
            Variant { status: LATER, ..variant("MuSGD", "SGD for maximal-update parametrisation", &[]) },
            Variant { status: Status::Removed, ..variant("OneBitAdam", ONE_BIT, &[]) },
            Variant { status: Status::Removed, ..variant("ZeroOneAdam", ONE_BIT, &[]) },
            Variant { status: Status::Removed, ..variant("OneBitLamb", ONE_BIT, &[]) },
        ],
    };

    /// Checks the parameters against each other and against the type as written.
    pub(crate) fn check(&self, config: &Config, resolver: &mut Resolver<'_>) {
        match self {
            Self::Sgd(sgd) if sgd.nesterov && (sgd.momentum == 0.0 || sgd.dampening != 0.0) => {
                let message = "Nesterov momentum needs `momentum` greater than 0 and `dampening` 0".to_string();
                resolver.contradiction(&[Sgd::nesterov, Sgd::momentum, Sgd::dampening], message, None);
            }
            Self::AdamW(adam) if !adam.adam_w_mode && resolver.top().variant(Config::optimizer, ADAMW).0 == ADAMW => {
                let message = "type AdamW is Adam with `adam_w_mode`, which is switched off".to_string();
                let help = Some("for L2 decay write `type: Adam`".to_string());
                resolver.contradiction(&[Adam::adam_w_mode, Self::TYPE], message, help);
            }
            Self::RmsProp(rmsprop) if rmsprop.centered && rmsprop.momentum > 0.0 => {
                let message = "`centered` together with `momentum` needs a third state, which is not implemented";
                let help = Some("leave one of them out".to_string());
                resolver.contradiction(&[RmsProp::centered, RmsProp::momentum], message.to_string(), help);
            }
            Self::Lamb(lamb) if lamb.min_coeff > lamb.max_coeff => {
                let message = "the smallest trust ratio is larger than the largest".to_string();
                resolver.contradiction(&[Lamb::min_coeff, Lamb::max_coeff], message, None);
            }
            Self::Muon(muon) if self.lr() == 0.0 && muon.lr_of_others() != 0.0 => {
                let message =
                    "the learning rate of the matrices is 0, and that of the others is relative to it".to_string();
                let help = Some("use AdamW, with `training.frozen` for the matrices".to_string());
                resolver.contradiction(&[Muon::muon_lr, Muon::adam_lr], message, help);
            }
            Self::ScheduleFree(free) if free.warmup_steps > 0 && config.scheduler != Scheduler::Constant => {
                let message = "`warmup_steps` and `scheduler` both set the learning rate of a step".to_string();
                let help = Some("keep one of the two; the method needs no decay".to_string());
                resolver.contradiction(&[ScheduleFree::warmup_steps, Config::scheduler], message, help);
            }
            Self::AdamW(Adam { optim_bits, .. }) | Self::Lion(Lion { optim_bits, .. })
                if ![8, 32].contains(optim_bits) =>
            {
                let message = format!("states of {optim_bits} bits are not implemented");
                resolver.contradiction(&[Adam::optim_bits], message, Some("write 8 or 32".to_string()));
            }
            Self::AdamW(adam) if adam.optim_bits == 8 && !adam.fp32_optimizer_states => {
                let message = "states have 8 bits, or the type of the parameters".to_string();
                let help = Some("keep one of the two keys".to_string());
                resolver.contradiction(&[Adam::optim_bits, Adam::fp32_optimizer_states], message, help);
            }
            Self::ScheduleFree(_) if config.training.ema.is_some() => {
                let message =
                    "AdamWScheduleFree has an average of its own, which is evaluated and exported".to_string();
                let help = Some("leave `training.ema` out".to_string());
                resolver.contradiction(&[Training::ema, Self::TYPE], message, help);
            }
            _ => {}
        }
    }

    /// Returns whether `fp32_optimizer_states` keeps the states in f32; true for an optimizer without this parameter.
    pub fn has_f32_states(&self) -> bool {
        match self {
            Self::AdamW(Adam { fp32_optimizer_states, .. }) | Self::Adagrad(Adagrad { fp32_optimizer_states, .. }) => {
                *fp32_optimizer_states
            }
            _ => true,
        }
    }

    /// Returns the name of an optimizer that updates whole parameters in f32, in host memory.
    pub fn of_whole_parameters(&self) -> Option<&'static str> {
        match self {
            Self::Muon(_) => Some("Muon"),
            Self::Lamb(_) => Some("LAMB"),
            Self::Adafactor(_) => Some("Adafactor"),
            _ => None,
        }
    }

    /// Returns the bits of a state's value, and the elements from which a parameter has states in 8 bits; `None` for an
    /// optimizer without states in 8 bits.
    pub fn optim_bits(&self) -> Option<(usize, usize)> {
        match self {
            Self::AdamW(Adam { optim_bits, min_8bit_size, .. })
            | Self::Lion(Lion { optim_bits, min_8bit_size, .. }) => Some((*optim_bits, *min_8bit_size)),
            _ => None,
        }
    }

    /// Returns the betas that a schedule may change, if the optimizer has any. DeepSpeed's schedules do not change those of
    /// the AdamW in Muon. The average of a schedule-free optimizer needs a constant β₁.
    pub fn betas(&self) -> Option<[f64; 2]> {
        match self {
            Self::AdamW(Adam { betas, .. })
            | Self::Lion(Lion { betas, .. })
            | Self::NAdam(NAdam { betas, .. })
            | Self::RAdam(RAdam { betas, .. })
            | Self::Lamb(Lamb { betas, .. }) => Some(*betas),
            Self::Sgd(_)
            | Self::Adagrad(_)
            | Self::RmsProp(_)
            | Self::Muon(_)
            | Self::Adafactor(_)
            | Self::ScheduleFree(_) => None,
        }
    }

    /// Returns the learning rate before any schedule.
    pub fn lr(&self) -> f64 {
        match self {
            Self::AdamW(Adam { lr, .. })
            | Self::Sgd(Sgd { lr, .. })
            | Self::Lion(Lion { lr, .. })
            | Self::Adagrad(Adagrad { lr, .. })
            | Self::RmsProp(RmsProp { lr, .. })
            | Self::NAdam(NAdam { lr, .. })
            | Self::RAdam(RAdam { lr, .. })
            | Self::Lamb(Lamb { lr, .. })
            | Self::ScheduleFree(ScheduleFree { lr, .. })
            | Self::Adafactor(Adafactor { lr, .. }) => *lr,
            Self::Muon(Muon { lr, muon_lr, .. }) => muon_lr.unwrap_or(*lr),
        }
    }
}

pub(crate) const ADAMW: &str = "AdamW";
const SCHEDULE_FREE: &str = "AdamWScheduleFree";

impl Read for Optimizer {
    fn read(keys: &mut Reader<'_, '_>, name: &'static str) -> Self {
        let (kind, mut keys) = keys.variant(name, ADAMW);
        match kind {
            "SGD" => Self::Sgd(Sgd::of(&mut keys)),
            "Lion" => Self::Lion(Lion::of(&mut keys)),
            "Adagrad" => Self::Adagrad(Adagrad::of(&mut keys)),
            "RMSprop" => Self::RmsProp(RmsProp::of(&mut keys)),
            "NAdam" => Self::NAdam(NAdam::of(&mut keys)),
            "RAdam" => Self::RAdam(RAdam::of(&mut keys)),
            SCHEDULE_FREE => Self::ScheduleFree(ScheduleFree::of(&mut keys)),
            "Muon" => Self::Muon(Muon::of(&mut keys)),
            "Lamb" => Self::Lamb(Lamb::of(&mut keys)),
            "Adafactor" => Self::Adafactor(Adafactor::of(&mut keys)),
            _ => Self::AdamW(Adam::of(&mut keys)),
        }
    }
}

/// Serialises as `{type, params}`. Adam without decoupled decay is DeepSpeed's type `Adam` with
/// `adam_w_mode: false`.
impl Serialize for Optimizer {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde_json::json;
        let (kind, params) = match self {
            Self::AdamW(adam) => (if adam.adam_w_mode { ADAMW } else { "Adam" }, json!(adam)),
            Self::Sgd(sgd) => ("SGD", json!(sgd)),
            Self::Lion(lion) => ("Lion", json!(lion)),
            Self::Adagrad(adagrad) => ("Adagrad", json!(adagrad)),
            Self::RmsProp(rmsprop) => ("RMSprop", json!(rmsprop)),
            Self::NAdam(nadam) => ("NAdam", json!(nadam)),
            Self::RAdam(radam) => ("RAdam", json!(radam)),
            Self::ScheduleFree(free) => (SCHEDULE_FREE, json!(free)),
            Self::Muon(muon) => ("Muon", json!(muon)),
            Self::Lamb(lamb) => ("Lamb", json!(lamb)),
            Self::Adafactor(adafactor) => ("Adafactor", json!(adafactor)),
        };
        json!({ TYPE: kind, PARAMS: params }).serialize(serializer)
    }
}
