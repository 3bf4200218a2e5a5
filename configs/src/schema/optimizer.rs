//! Keys of `optimizer` and `scheduler`, by type.

use super::*;
use crate::choice::Choice as _;
use crate::config::WarmupType;

const ONE_BIT: &str = "compressed-momentum optimizers are gone from DeepSpeed; use AdamW";

#[rustfmt::skip]
pub(super) static OPTIMIZER: Variants = Variants {
    params: Some("params"),
    shared: &[rejected("legacy_fusion", "false", "it is an old path for fp16")],
    list: &[
        Variant { name: "AdamW", meaning: "Adam with decoupled weight decay", status: Status::Now, keys: ADAM },
        Variant { name: "Adam", meaning: "The same, unless `adam_w_mode` is false", status: Status::Now, keys: ADAM },
        Variant { name: "SGD", meaning: "Stochastic gradient descent with momentum", status: Status::Now, keys: SGD },
        Variant { name: "Lion", meaning: "Sign of an interpolated momentum", status: Status::Now, keys: LION },
        Variant { name: "Adagrad", meaning: "Sum of squared gradients", status: Status::Now, keys: ADAGRAD },
        Variant { name: "Muon", meaning: "Orthogonalised momentum", status: LATER, keys: MUON },
        Variant { name: "Lamb", meaning: "Adam with a trust ratio per layer", status: LATER, keys: LAMB },
        Variant { name: "MuAdam", meaning: "Adam for maximal-update parametrisation", status: LATER, keys: &[] },
        Variant { name: "MuAdamW", meaning: "AdamW for maximal-update parametrisation", status: LATER, keys: &[] },
        Variant { name: "MuSGD", meaning: "SGD for maximal-update parametrisation", status: LATER, keys: &[] },
        Variant { name: "OneBitAdam", meaning: ONE_BIT, status: Status::Removed, keys: &[] },
        Variant { name: "ZeroOneAdam", meaning: ONE_BIT, status: Status::Removed, keys: &[] },
        Variant { name: "OneBitLamb", meaning: ONE_BIT, status: Status::Removed, keys: &[] },
    ],
};

const LR: &str = "Learning rate; auto: 5e-5, as Hugging Face's Trainer";
const WARMUP_STEPS: &str = "Steps of the warm-up; fewer than 2 count as 2; auto: 0, as Hugging Face's Trainer";
const LATER: Status = Status::Later { off: &[] };
const BETAS: Kind = Kind::Pair(FRACTION);

#[rustfmt::skip]
static ADAM: &[Key] = &[
    engine("lr", NON_NEGATIVE, "0.001", LR),
    now("betas", BETAS, "[0.9, 0.999]", "Decay of the first and the second moment"),
    now("eps", NON_NEGATIVE, "1.0e-8", "Added to the root of the second moment"),
    now("weight_decay", NON_NEGATIVE, "0.0", "Weight decay"),
    now("bias_correction", Kind::Bool, "true", "Divide the moments by 1 − βᵗ"),
    now("adam_w_mode", Kind::Bool, "true", "Decay the weights directly; false, with type Adam only: add the decay to the gradient"),
    ignored("torch_adam", Kind::Bool, "false", "there is one implementation"),
    later("fp32_optimizer_states", "true", "Moments in f32; false: in the type of the parameters"),
    rejected("amsgrad", "false", "DeepSpeed's Adam does not have it either"),
    removed("max_grad_norm", "write `gradient_clipping` at the top level"),
];

#[rustfmt::skip]
static SGD: &[Key] = &[
    engine("lr", NON_NEGATIVE, "0.001", LR),
    now("momentum", Kind::Float(FRACTION), "0.0", "Momentum; 0 keeps no state"),
    now("dampening", RATIO, "0.0", "Dampening of the gradient that enters the momentum"),
    now("nesterov", Kind::Bool, "false", "Nesterov momentum"),
    now("weight_decay", NON_NEGATIVE, "0.0", "Added to the gradient"),
    rejected("maximize", "false", "losses are minimised"),
    rejected("differentiable", "false", "the step is not part of a graph"),
    ignored("foreach", Kind::Bool, "= PyTorch's choice", "there is one implementation"),
    ignored("fused", Kind::Bool, "= PyTorch's choice", "there is one implementation"),
    removed("max_grad_norm", "write `gradient_clipping` at the top level"),
];

#[rustfmt::skip]
static LION: &[Key] = &[
    engine("lr", NON_NEGATIVE, "0.001", LR),
    now("betas", BETAS, "[0.9, 0.999]", "Interpolation for the update, decay of the momentum"),
    now("weight_decay", NON_NEGATIVE, "0.0", "Decoupled weight decay"),
    removed("max_grad_norm", "write `gradient_clipping` at the top level"),
];

#[rustfmt::skip]
static ADAGRAD: &[Key] = &[
    engine("lr", NON_NEGATIVE, "0.01", LR),
    now("eps", NON_NEGATIVE, "1.0e-10", "Added to the root of the sum"),
    now("weight_decay", NON_NEGATIVE, "0.0", "Added to the gradient"),
    later("fp32_optimizer_states", "true", "The sum in f32; false: in the type of the parameters"),
    removed("max_grad_norm", "write `gradient_clipping` at the top level"),
];

#[rustfmt::skip]
static MUON: &[Key] = &[
    later("lr", "0.001", "Learning rate"),
    later("momentum", "0.95", "Momentum"),
    later("weight_decay", "0", "Weight decay"),
    later("muon_lr", "null", "Learning rate of matrices"),
    later("adam_lr", "null", "Learning rate of the other parameters"),
    later("betas", "null", "AdamW's, for the other parameters"),
    later("eps", "null", "AdamW's, for the other parameters"),
    later("ns_method", "gram", "gram or standard"),
];

#[rustfmt::skip]
static LAMB: &[Key] = &[
    later("lr", "0.001", "Learning rate"),
    later("betas", "[0.9, 0.999]", "Decay of the first and the second moment"),
    later("eps", "1e-8", "Added to the root of the second moment"),
    later("weight_decay", "0", "Weight decay"),
    later("bias_correction", "true", "Divide the moments by 1 − βᵗ"),
    later("max_coeff", "10", "Largest trust ratio"),
    later("min_coeff", "0.01", "Smallest trust ratio"),
    later("eps_inside_sqrt", "false", "eps under the root"),
];

#[rustfmt::skip]
pub(super) static SCHEDULER: Variants = Variants {
    params: Some("params"),
    shared: &[],
    list: &[
        Variant { name: "Constant", meaning: "The optimizer's `lr` at every step", status: Status::Now, keys: &[] },
        Variant { name: "WarmupLR", meaning: "Warm-up, then constant", status: Status::Now, keys: WARMUP },
        Variant { name: "WarmupDecayLR", meaning: "Warm-up, then linearly to 0", status: Status::Now, keys: WARMUP_DECAY },
        Variant { name: "WarmupCosineLR", meaning: "Warm-up, then half a cosine", status: Status::Now, keys: WARMUP_COSINE },
        Variant { name: "LRRangeTest", meaning: "Sweep over learning rates", status: LATER, keys: LR_RANGE_TEST },
        Variant { name: "OneCycle", meaning: "One cycle of learning rate and momentum", status: LATER, keys: ONE_CYCLE },
    ],
};

const SHAPE: Kind = Kind::Choice { names: WarmupType::NAMES, later: &[] };

#[rustfmt::skip]
static WARMUP: &[Key] = &[
    now("warmup_min_lr", NON_NEGATIVE, "0.0", "Learning rate at the start"),
    now("warmup_max_lr", NON_NEGATIVE, "= the optimizer's lr", "Learning rate after the warm-up"),
    engine("warmup_num_steps", COUNT_OR_0, "1000", WARMUP_STEPS),
    now("warmup_type", SHAPE, "log", "Shape of the warm-up"),
];

#[rustfmt::skip]
static WARMUP_DECAY: &[Key] = &[
    engine("total_num_steps", COUNT, REQUIRED, "Steps of the whole schedule; auto: those of the run"),
    now("warmup_min_lr", NON_NEGATIVE, "0.0", "Learning rate at the start"),
    engine("warmup_max_lr", NON_NEGATIVE, "0.001", "Learning rate after the warm-up; not the optimizer's lr, but for auto"),
    engine("warmup_num_steps", COUNT_OR_0, "1000", WARMUP_STEPS),
    now("warmup_type", SHAPE, "log", "Shape of the warm-up"),
];

#[rustfmt::skip]
static WARMUP_COSINE: &[Key] = &[
    engine("total_num_steps", COUNT, REQUIRED, "Steps of the whole schedule; auto: those of the run"),
    now("warmup_min_ratio", RATIO, "0.0", "Part of the optimizer's lr at the start"),
    engine("warmup_num_steps", COUNT_OR_0, "1000", WARMUP_STEPS),
    now("cos_min_ratio", RATIO, "0.0001", "Part of the optimizer's lr at the end"),
    now("warmup_type", SHAPE, "log", "Shape of the warm-up"),
];

#[rustfmt::skip]
static LR_RANGE_TEST: &[Key] = &[
    later("lr_range_test_min_lr", "1e-3", "Smallest learning rate"),
    later("lr_range_test_step_size", "2000", "Steps per increase"),
    later("lr_range_test_step_rate", "1.0", "Increase"),
    later("lr_range_test_staircase", "false", "Increase in stairs"),
];

#[rustfmt::skip]
static ONE_CYCLE: &[Key] = &[
    later("cycle_min_lr", "null", "Learning rate at the start and the end of the cycle"),
    later("cycle_max_lr", "null", "Learning rate at the top of the cycle"),
    later("decay_lr_rate", "0", "Decay after the cycle"),
    later("cycle_first_step_size", "2000", "Steps up"),
    later("cycle_second_step_size", "null", "Steps down"),
    later("cycle_first_stair_count", "0", "Stairs up"),
    later("cycle_second_stair_count", "null", "Stairs down"),
    later("decay_step_size", "0", "Steps per decay"),
    later("cycle_momentum", "true", "Cycle the momentum as well"),
    later("cycle_min_mom", "0.8", "Smallest momentum"),
    later("cycle_max_mom", "0.9", "Largest momentum"),
    later("decay_mom_rate", "0", "Decay of the momentum after the cycle"),
];
