//! DeepSpeed's keys of `optimizer` and `scheduler`, by type.

use super::*;

#[rustfmt::skip]
pub(super) static OPTIMIZER: Group = Group { title: "`optimizer`", path: "optimizer.", with: &[], keys: &[
    key("type: Adam", "null", "Adam").differs("Not given, the optimizer is AdamW; in DeepSpeed the program then brings its own"),
    key("type: AdamW", "null", "AdamW"),
    key("type: Adagrad", "null", "Adagrad"),
    key("type: Lion", "null", "Lion"),
    key("type: SGD", "null", "SGD").differs("upper and lower case do not matter, in any type"),
    key("type: Lamb", "null", "Lamb"),
    key("type: Muon", "null", "Muon"),
    key("type: MuAdam", "null", "MuAdam"),
    key("type: MuAdamW", "null", "MuAdamW"),
    key("type: MuSGD", "null", "MuSGD"),
    key("type: RMSprop", "null", "RMSprop"),
    key("type: OneBitAdam", "null", "OneBitAdam"),
    key("type: ZeroOneAdam", "null", "ZeroOneAdam"),
    key("type: OneBitLamb", "null", "OneBitLamb"),
    key("legacy_fusion", "false", "true").with(&["optimizer.type=AdamW"]),
] };

#[rustfmt::skip]
pub(super) static ADAM: Group = Group { title: "`optimizer.params` of Adam and AdamW", path: "optimizer.params.", with: &["optimizer.type=Adam"], keys: &[
    key("lr", "1e-3", "6e-4"),
    key("betas", "[0.9, 0.999]", "[0.9, 0.95]"),
    key("eps", "1e-8", "1e-6"),
    key("weight_decay", "0", "0.1").differs("by default biases and norms are not decayed; `training.weight_decay_on: all` decays them too"),
    key("adam_w_mode", "true", "false").differs("with type AdamW it is an error; DeepSpeed takes it there too"),
    key("torch_adam", "false", "true"),
    key("bias_correction", "true", "false"),
    key("amsgrad", "false", "true"),
    key("fp32_optimizer_states", "true", "false"),
    key("max_grad_norm", "null", "1.0"),
] };

#[rustfmt::skip]
pub(super) static LION: Group = Group { title: "`optimizer.params` of Lion", path: "optimizer.params.", with: &["optimizer.type=Lion"], keys: &[
    key("lr", "1e-3", "1e-4"),
    key("betas", "[0.9, 0.999]", "[0.9, 0.99]"),
    key("weight_decay", "0", "0.1"),
    key("max_grad_norm", "null", "1.0"),
] };

#[rustfmt::skip]
pub(super) static ADAGRAD: Group = Group { title: "`optimizer.params` of Adagrad", path: "optimizer.params.", with: &["optimizer.type=Adagrad"], keys: &[
    key("lr", "1e-2", "1e-3"),
    key("eps", "1e-10", "1e-8"),
    key("weight_decay", "0", "0.1"),
    key("fp32_optimizer_states", "true", "false"),
    key("max_grad_norm", "null", "1.0"),
] };

#[rustfmt::skip]
pub(super) static SGD: Group = Group { title: "`optimizer.params` of SGD, PyTorch's", path: "optimizer.params.", with: &["optimizer.type=SGD"], keys: &[
    key("lr", "1e-3", "1e-2"),
    key("momentum", "0", "0.9"),
    key("dampening", "0", "0.1"),
    key("weight_decay", "0", "0.1"),
    key("nesterov", "false", "true").with(&["optimizer.params.momentum=0.9"]),
    key("maximize", "false", "true"),
    key("differentiable", "false", "true"),
    key("foreach", "null", "true"),
    key("fused", "null", "true"),
] };

#[rustfmt::skip]
pub(super) static LAMB: Group = Group { title: "`optimizer.params` of Lamb", path: "optimizer.params.", with: &["optimizer.type=Lamb"], keys: &[
    key("lr", "1e-3", "1e-2"),
    key("betas", "[0.9, 0.999]", "[0.9, 0.95]"),
    key("eps", "1e-8", "1e-6"),
    key("weight_decay", "0", "0.1"),
    key("bias_correction", "true", "false"),
    key("max_coeff", "10", "5"),
    key("min_coeff", "0.01", "0.1"),
    key("eps_inside_sqrt", "false", "true"),
] };

#[rustfmt::skip]
pub(super) static MUON: Group = Group { title: "`optimizer.params` of Muon", path: "optimizer.params.", with: &["optimizer.type=Muon"], keys: &[
    key("lr", "1e-3", "1e-2"),
    key("momentum", "0.95", "0.9"),
    key("weight_decay", "0", "0.1"),
    key("muon_lr", "null", "0.02"),
    key("adam_lr", "null", "1e-3"),
    key("betas", "[0.9, 0.999]", "[0.9, 0.95]"),
    key("eps", "1e-8", "1e-6"),
    key("ns_method", "gram", "standard"),
] };

#[rustfmt::skip]
pub(super) static ONE_BIT: Group = Group { title: "`optimizer.params` of OneBitAdam, ZeroOneAdam and OneBitLamb", path: "optimizer.params.", with: &["optimizer.type=OneBitAdam"], keys: &[
    key("freeze_step", "100000", "400"),
    key("var_freeze_step", "100000", "400"),
    key("var_update_scaler", "16", "8"),
    key("local_step_scaler", "32678", "100"),
    key("local_step_clipper", "16", "8"),
    key("cuda_aware", "false", "true"),
    key("comm_backend_name", "nccl", "mpi"),
    key("coeff_beta", "0.9", "0.8"),
    key("factor_max", "4.0", "2.0"),
    key("factor_min", "0.5", "0.1"),
    key("factor_threshold", "0.1", "0.2"),
] };

#[rustfmt::skip]
pub(super) static SCHEDULER: Group = Group { title: "`scheduler`", path: "scheduler.", with: &[], keys: &[
    key("type: WarmupLR", "null", "WarmupLR"),
    key("type: WarmupDecayLR", "null", "WarmupDecayLR").with(&["scheduler.params.total_num_steps=9000"]),
    key("type: WarmupCosineLR", "null", "WarmupCosineLR").with(&["scheduler.params.total_num_steps=9000"]),
    key("type: LRRangeTest", "null", "LRRangeTest"),
    key("type: OneCycle", "null", "OneCycle"),
] };

#[rustfmt::skip]
pub(super) static WARMUP: Group = Group { title: "`scheduler.params` of WarmupLR", path: "scheduler.params.", with: &["scheduler.type=WarmupLR"], keys: &[
    key("warmup_min_lr", "0", "1e-5"),
    key("warmup_max_lr", "null", "5e-4"),
    key("warmup_num_steps", "1000", "100"),
    key("warmup_type", "log", "linear"),
] };

#[rustfmt::skip]
pub(super) static WARMUP_DECAY: Group = Group { title: "`scheduler.params` of WarmupDecayLR", path: "scheduler.params.", with: &["scheduler.type=WarmupDecayLR", "scheduler.params.total_num_steps=9000"], keys: &[
    key("total_num_steps", "", "5000"),
    key("warmup_min_lr", "0", "1e-5"),
    key("warmup_max_lr", "0.001", "6e-4"),
    key("warmup_num_steps", "1000", "100"),
    key("warmup_type", "log", "linear"),
] };

#[rustfmt::skip]
pub(super) static WARMUP_COSINE: Group = Group { title: "`scheduler.params` of WarmupCosineLR", path: "scheduler.params.", with: &["scheduler.type=WarmupCosineLR", "scheduler.params.total_num_steps=9000"], keys: &[
    key("total_num_steps", "", "5000"),
    key("warmup_min_ratio", "0", "0.1"),
    key("warmup_num_steps", "1000", "100"),
    key("cos_min_ratio", "1e-4", "0.1"),
    key("warmup_type", "log", "linear"),
] };

#[rustfmt::skip]
pub(super) static LR_RANGE_TEST: Group = Group { title: "`scheduler.params` of LRRangeTest", path: "scheduler.params.", with: &["scheduler.type=LRRangeTest"], keys: &[
    key("lr_range_test_min_lr", "1e-3", "1e-4"),
    key("lr_range_test_step_size", "2000", "100"),
    key("lr_range_test_step_rate", "1.0", "5.0"),
    key("lr_range_test_staircase", "false", "true"),
] };

#[rustfmt::skip]
pub(super) static ONE_CYCLE: Group = Group { title: "`scheduler.params` of OneCycle", path: "scheduler.params.", with: &["scheduler.type=OneCycle"], keys: &[
    key("cycle_min_lr", "", "1e-4"),
    key("cycle_max_lr", "", "1e-3"),
    key("decay_lr_rate", "0", "0.001"),
    key("cycle_first_step_size", "2000", "1000"),
    key("cycle_second_step_size", "null", "1000"),
    key("cycle_first_stair_count", "0", "500"),
    key("cycle_second_stair_count", "null", "500"),
    key("decay_step_size", "0", "1000"),
    key("cycle_momentum", "true", "false"),
    key("cycle_min_mom", "0.8", "0.85"),
    key("cycle_max_mom", "0.9", "0.99"),
    key("decay_mom_rate", "0", "0.001"),
] };
