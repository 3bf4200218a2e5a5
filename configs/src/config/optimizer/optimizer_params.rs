//! `optimizer.params` of each type of optimizer.

use serde::Serialize;

use crate::read::reader::Resolver;
use crate::schema::*;
use crate::table::section;

const LR: &str = "Learning rate; auto: 5e-5, as in Hugging Face's Trainer";
/// Default `learning_rate` of Hugging Face's Trainer, which replaces an `lr` of `auto`.
const TRAINER: f64 = 5e-5;
const ANY_SIZE: Range = Range { min: 0.0, max: f64::MAX, above: false, below: false };
const NOT_POSITIVE: Kind = Kind::Float(Range { min: f64::MIN, max: 0.0, ..ANY_SIZE });
const BETAS: Kind = Kind::Pair(FRACTION);
/// 8 or 32: see [`check_bits`].
pub(crate) const OPTIM_BITS: Kind = Kind::Int { min: 8, max: 32 };
/// bitsandbytes' default. A check takes any other value as a sign that the file sets `min_8bit_size`.
pub(crate) const MIN_8BIT_SIZE: usize = 4096;

/// Checks that `optim_bits` is 8 or 32.
pub(crate) fn check_bits(bits: usize, place: &str, resolver: &mut Resolver<'_>) {
    if ![8, 32].contains(&bits) {
        let message = format!("optimizer states of {bits} bits are not implemented");
        resolver.contradiction(&[place], message, Some("use 8 or 32".to_string()));
    }
}

section! {
    /// Parameters of Adam.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct AdamParams(keys) in "optimizer.params" {
        /// Learning rate; a scheduler may replace it step by step.
        pub lr: f64 = engine(NON_NEGATIVE, "0.001", LR) [else TRAINER];
        pub betas: [f64; 2] = now(BETAS, "[0.9, 0.999]", "Decay rates of the first and second moments");
        pub eps: f64 = now(NON_NEGATIVE, "1.0e-8", "Added to the square root of the second moment");
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Weight decay");
        pub bias_correction: bool = now(Kind::Bool, "true", "Divide the moments by 1 − βᵗ");
        pub adam_w_mode: bool = now(Kind::Bool, "true", "Decay the weights directly; false (only allowed with type Adam): add the decay to the gradient");
        = ignored("torch_adam", Kind::Bool, "false", "the optimizer has only one implementation");
        pub fp32_optimizer_states: bool = now(Kind::Bool, "true", "Keep the moments in f32; false: in the data type of the parameters, f32 or bf16");
        pub optim_bits: usize = key(OPTIM_BITS, "32", "Bits per value of the optimizer state: 32, or 8 with blockwise quantization as in bitsandbytes");
        pub min_8bit_size: usize = key(COUNT, "4096", "Parameters with fewer elements keep 32-bit states");
        = rejected("amsgrad", "false", "AMSGrad is not implemented; DeepSpeed's Adam does not have it either");
        = removed("max_grad_norm", "set `gradient_clipping` at the top level");
    }
}

section! {
    /// Parameters of SGD.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct SgdParams(keys) in "optimizer.params" {
        /// Learning rate.
        pub lr: f64 = engine(NON_NEGATIVE, "0.001", LR) [else TRAINER];
        pub momentum: f64 = now(Kind::Float(FRACTION), "0.0", "Momentum; 0: no momentum state");
        pub dampening: f64 = now(RATIO, "0.0", "Dampening of the gradient in the momentum update");
        pub nesterov: bool = now(Kind::Bool, "false", "Nesterov momentum");
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Added to the gradient");
        = rejected("maximize", "false", "losses are minimised");
        = rejected("differentiable", "false", "the optimizer step is not part of an autograd graph");
        = ignored("foreach", Kind::Bool, "= PyTorch's choice", "the optimizer has only one implementation");
        = ignored("fused", Kind::Bool, "= PyTorch's choice", "the optimizer has only one implementation");
        = removed("max_grad_norm", "set `gradient_clipping` at the top level");
    }
}

section! {
    /// Parameters of MuAdam and MuAdamW, as in the package `mup`.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct MuAdamParams(keys) in "optimizer.params" {
        pub lr: f64 = engine(NON_NEGATIVE, "0.001", "Learning rate of the base model; auto: 5e-5, as in Hugging Face's Trainer") [else TRAINER];
        pub betas: [f64; 2] = now(BETAS, "[0.9, 0.999]", "Decay rates of the first and second moments");
        pub eps: f64 = now(NON_NEGATIVE, "1.0e-8", "Added to the square root of the second moment");
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Weight decay of the base model");
        = rejected("amsgrad", "false", "AMSGrad is not implemented");
        = rejected("maximize", "false", "losses are minimised");
        = rejected("differentiable", "false", "the optimizer step is not part of an autograd graph");
        = ignored("capturable", Kind::Bool, "false", "CUDA graphs are not supported");
        = ignored("foreach", Kind::Bool, "= PyTorch's choice", "the optimizer has only one implementation");
        = ignored("fused", Kind::Bool, "= PyTorch's choice", "the optimizer has only one implementation");
        = removed("max_grad_norm", "set `gradient_clipping` at the top level");
    }
}

section! {
    /// Parameters of Lion.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct LionParams(keys) in "optimizer.params" {
        /// Learning rate.
        pub lr: f64 = engine(NON_NEGATIVE, "0.001", LR) [else TRAINER];
        pub betas: [f64; 2] = now(BETAS, "[0.9, 0.999]", "β₁ interpolates the update; β₂ decays the momentum");
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Decoupled weight decay");
        pub optim_bits: usize = key(OPTIM_BITS, "32", "Bits per value of the optimizer state: 32, or 8 with blockwise quantization as in bitsandbytes");
        pub min_8bit_size: usize = key(COUNT, "4096", "Parameters with fewer elements keep 32-bit states");
        = removed("max_grad_norm", "set `gradient_clipping` at the top level");
    }
}

section! {
    /// Parameters of Adagrad.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct AdagradParams(keys) in "optimizer.params" {
        /// Learning rate.
        pub lr: f64 = engine(NON_NEGATIVE, "0.01", LR) [else TRAINER];
        pub eps: f64 = now(NON_NEGATIVE, "1.0e-10", "Added to the square root of the sum");
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Added to the gradient");
        pub fp32_optimizer_states: bool = now(Kind::Bool, "true", "Keep the sum of squared gradients in f32; false: in the data type of the parameters, f32 or bf16");
        = removed("max_grad_norm", "set `gradient_clipping` at the top level");
    }
}

section! {
    /// Parameters of RMSprop, as `torch.optim.RMSprop`.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct RmsPropParams(keys) in "optimizer.params" {
        /// Learning rate.
        pub lr: f64 = engine(NON_NEGATIVE, "0.01", LR) [else TRAINER];
        pub alpha: f64 = now(Kind::Float(FRACTION), "0.99", "Decay rate of the mean of squared gradients");
        pub eps: f64 = now(NON_NEGATIVE, "1.0e-8", "Added to the square root of the mean");
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Added to the gradient");
        pub momentum: f64 = now(Kind::Float(FRACTION), "0.0", "Momentum of the updates; 0: no momentum state");
        pub centered: bool = now(Kind::Bool, "false", "Divide by the square root of the variance; cannot be combined with `momentum`");
        = rejected("maximize", "false", "losses are minimised");
        = rejected("differentiable", "false", "the optimizer step is not part of an autograd graph");
        = ignored("capturable", Kind::Bool, "false", "CUDA graphs are not supported");
        = ignored("foreach", Kind::Bool, "= PyTorch's choice", "the optimizer has only one implementation");
        = removed("max_grad_norm", "set `gradient_clipping` at the top level");
    }
}

section! {
    /// Parameters of NAdam, as `torch.optim.NAdam`.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct NAdamParams(keys) in "optimizer.params" {
        /// Learning rate.
        pub lr: f64 = engine(NON_NEGATIVE, "0.002", LR) [else TRAINER];
        pub betas: [f64; 2] = now(BETAS, "[0.9, 0.999]", "Decay rates of the first and second moments");
        pub eps: f64 = now(NON_NEGATIVE, "1.0e-8", "Added to the square root of the second moment");
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Weight decay");
        pub decoupled_weight_decay: bool = now(Kind::Bool, "false", "Decay the weights directly; false: add the decay to the gradient");
        pub momentum_decay: f64 = now(NON_NEGATIVE, "0.004", "Speed at which the momentum rises to β₁");
        = rejected("maximize", "false", "losses are minimised");
        = rejected("differentiable", "false", "the optimizer step is not part of an autograd graph");
        = ignored("capturable", Kind::Bool, "false", "CUDA graphs are not supported");
        = ignored("foreach", Kind::Bool, "= PyTorch's choice", "the optimizer has only one implementation");
        = removed("max_grad_norm", "set `gradient_clipping` at the top level");
    }
}

section! {
    /// Parameters of RAdam, as `torch.optim.RAdam`.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct RAdamParams(keys) in "optimizer.params" {
        /// Learning rate.
        pub lr: f64 = engine(NON_NEGATIVE, "0.001", LR) [else TRAINER];
        pub betas: [f64; 2] = now(BETAS, "[0.9, 0.999]", "Decay rates of the first and second moments");
        pub eps: f64 = now(NON_NEGATIVE, "1.0e-8", "Added to the square root of the second moment");
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Weight decay");
        pub decoupled_weight_decay: bool = now(Kind::Bool, "false", "Decay the weights directly; false: add the decay to the gradient");
        = rejected("maximize", "false", "losses are minimised");
        = rejected("differentiable", "false", "the optimizer step is not part of an autograd graph");
        = ignored("capturable", Kind::Bool, "false", "CUDA graphs are not supported");
        = ignored("foreach", Kind::Bool, "= PyTorch's choice", "the optimizer has only one implementation");
        = removed("max_grad_norm", "set `gradient_clipping` at the top level");
    }
}

section! {
    /// Parameters of Muon.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct MuonParams(keys) in "optimizer.params" {
        /// Learning rate.
        pub lr: f64 = engine(NON_NEGATIVE, "0.001", LR) [else TRAINER];
        /// Learning rate of the matrices, in place of `lr`.
        pub muon_lr: Option<f64> = now(NON_NEGATIVE, "= lr", "Learning rate for the matrices");
        /// Learning rate of all other parameters, in place of `lr`.
        pub adam_lr: Option<f64> = now(NON_NEGATIVE, "= lr", "Learning rate for all other parameters, which AdamW updates");
        pub matrices: Option<Vec<String>> = key(Kind::Texts, "null", "Globs over the names of the two-dimensional parameters that Muon updates; null: all except those with embed, lm_head, wte or wpe in their name");
        pub momentum: f64 = now(Kind::Float(FRACTION), "0.95", "Momentum of the matrices");
        pub nesterov: bool = key(Kind::Bool, "true", "Nesterov momentum");
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Decoupled weight decay");
        pub ns_steps: usize = key(COUNT, "5", "Newton–Schulz iterations");
        pub betas: [f64; 2] = now(BETAS, "[0.9, 0.999]", "AdamW's decay rates of the first and second moments");
        pub eps: f64 = now(NON_NEGATIVE, "1.0e-8", "Added to the square root of AdamW's second moment");
        = ignored("ns_method", Kind::Text, "gram", "the only implementation computes in f32; DeepSpeed's gram and standard differ only in rounding");
        = removed("max_grad_norm", "set `gradient_clipping` at the top level");
    }
}

section! {
    /// Parameters of LAMB.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct LambParams(keys) in "optimizer.params" {
        /// Learning rate.
        pub lr: f64 = engine(NON_NEGATIVE, "0.001", LR) [else TRAINER];
        pub betas: [f64; 2] = now(BETAS, "[0.9, 0.999]", "Decay rates of the first and second moments");
        pub eps: f64 = now(NON_NEGATIVE, "1.0e-8", "Added to the square root of the second moment");
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Weight decay, added to the update before the trust ratio is computed");
        pub bias_correction: bool = now(Kind::Bool, "true", "Multiply the step by √(1 − β₂ᵗ)/(1 − β₁ᵗ)");
        pub max_coeff: f64 = now(NON_NEGATIVE, "10.0", "Largest trust ratio");
        pub min_coeff: f64 = now(NON_NEGATIVE, "0.01", "Smallest trust ratio");
        pub eps_inside_sqrt: bool = now(Kind::Bool, "false", "Add eps to the second moment, under the square root");
        = rejected("amsgrad", "false", "AMSGrad is not implemented; DeepSpeed's Lamb does not have it either");
        = removed("max_grad_norm", "set `gradient_clipping` at the top level");
    }
}

section! {
    /// Parameters of schedule-free AdamW, as `schedulefree.AdamWScheduleFree`.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct ScheduleFreeParams(keys) in "optimizer.params" {
        /// Learning rate.
        pub lr: f64 = engine(NON_NEGATIVE, "0.0025", LR) [else TRAINER];
        pub betas: [f64; 2] = now(BETAS, "[0.9, 0.999]", "β₁: share of the average in the weights at which gradients are computed; β₂: decay rate of the second moment");
        pub eps: f64 = now(NON_NEGATIVE, "1.0e-8", "Added to the square root of the second moment");
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Weight decay");
        pub warmup_steps: u64 = key(COUNT_OR_0, "0", "Steps over which the learning rate rises linearly to `lr`");
        pub r: f64 = key(NON_NEGATIVE, "0.0", "Exponent of the step number in the averaging weights");
        pub weight_lr_power: f64 = key(NON_NEGATIVE, "2.0", "Exponent of the largest learning rate so far in the averaging weights");
        = ignored("foreach", Kind::Bool, "= PyTorch's choice", "the optimizer has only one implementation");
        = removed("max_grad_norm", "set `gradient_clipping` at the top level");
    }
}

section! {
    /// Parameters of Adafactor, as `torch.optim.Adafactor`.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct AdafactorParams(keys) in "optimizer.params" {
        /// Maximum relative step size; also the learning rate of the weight decay.
        pub lr: f64 = engine(NON_NEGATIVE, "0.01", "Largest relative step size: step t has the size min(lr, 1/√t) × the rms of the parameter; auto: 5e-5, as in Hugging Face's Trainer") [else TRAINER];
        pub beta2_decay: f64 = now(NOT_POSITIVE, "-0.8", "β₂ is 1 − step^beta2_decay");
        pub eps: [f64; 2] = now(Kind::Pair(ANY_SIZE), "[1.1920928955078125e-7, 0.001]", "Lower bounds of the square root of the second moment and of a parameter's rms; the first default is what `null` means for f32 in PyTorch");
        pub d: f64 = now(Kind::Float(Range { min: 1.0, ..ANY_SIZE }), "1.0", "Updates with a larger rms are scaled down to this rms");
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Decoupled weight decay");
        = rejected("maximize", "false", "losses are minimised");
        = ignored("foreach", Kind::Bool, "= PyTorch's choice", "the optimizer has only one implementation");
        = rejected("scale_parameter", "true", "steps always scale with the rms of the parameter, as in PyTorch");
        = rejected("relative_step", "false", "set `lr` to the largest relative step size");
        = rejected("warmup_init", "false", "use a `scheduler`");
        = rejected("beta1", "null", "a first moment is not implemented");
        = removed("clip_threshold", "use `d`, its name in PyTorch");
        = removed("decay_rate", "use `beta2_decay`, its name in PyTorch");
        = removed("max_grad_norm", "set `gradient_clipping` at the top level");
    }
}

section! {
    /// The two parameters that every optimizer of a program takes from the file; the program sets any others.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct CustomParams(keys) in "optimizer.params" {
        /// Learning rate.
        pub lr: f64 = engine(NON_NEGATIVE, "0.001", LR) [else TRAINER];
        pub weight_decay: f64 = now(NON_NEGATIVE, "0.0", "Weight decay");
    }
}

impl MuonParams {
    /// Returns the learning rate of the parameters that AdamW updates.
    pub fn lr_of_others(&self) -> f64 {
        self.adam_lr.unwrap_or(self.lr)
    }
}
