//! Checks `bf16` against the other data types, the optimizers and the average of the weights.

use crate::config::{AdamParams, Bf16, Config, DataTypes, Dtype, Fp16, Optimizer, Training};
use crate::read::reader::Resolver;

impl Bf16 {
    /// Checks the keys against each other, the optimizer and `training.ema`.
    pub(crate) fn check(&self, config: &Config, resolver: &mut Resolver<'_>) {
        const GRADIENTS: &str = DataTypes::grad_accum_dtype;
        let gradients = config.data_types.grad_accum_dtype;
        if gradients == Some(Dtype::F16) {
            let message = "sums of gradients can exceed the range of fp16".to_string();
            resolver.contradiction(&[GRADIENTS], message, Some("set `grad_accum_dtype: fp32`".to_string()));
        }
        let mut needs = |is_missing: bool, key: &str, other: &str, message: &str, help: &str| {
            if is_missing {
                resolver.contradiction(&[key, other], message.to_string(), Some(help.to_string()));
            }
        };
        let no_copy = Self::bf16_master_weights_and_grads;
        needs(
            self.bf16_master_weights_and_grads && !self.enabled,
            no_copy,
            Self::enabled,
            "`bf16_master_weights_and_grads` needs `bf16: {enabled: true}`",
            "set `enabled: true`",
        );
        needs(
            self.bf16_optimizer_states && !self.bf16_master_weights_and_grads,
            Self::bf16_optimizer_states,
            no_copy,
            "states in bf16 need parameters without an f32 copy, as in DeepSpeed",
            "set `bf16_master_weights_and_grads: true`, or use `optimizer.params.fp32_optimizer_states: false`",
        );
        needs(
            self.stochastic_rounding && !self.bf16_master_weights_and_grads,
            Self::stochastic_rounding,
            no_copy,
            "`stochastic_rounding` needs parameters without an f32 copy: with the copy, rounding to nearest loses \
             nothing",
            "set `bf16_master_weights_and_grads: true`, or remove `stochastic_rounding`",
        );
        needs(
            self.bf16_master_weights_and_grads && config.training.ema.is_some(),
            no_copy,
            Training::ema,
            "`training.ema` needs the f32 copy of the parameters, which `bf16_master_weights_and_grads` removes",
            "keep the f32 copy, or remove `training.ema`",
        );
        needs(
            self.bf16_master_weights_and_grads && matches!(config.optimizer, Optimizer::ScheduleFree(_)),
            no_copy,
            Optimizer::TYPE,
            "AdamWScheduleFree needs the f32 copy of the parameters: rounding to bf16 loses small steps of the \
             weights, and the average would drift away from the weights",
            "keep the f32 copy, or use another optimizer",
        );
        let of_eight_bits = config.eight_bit_states();
        for (is_in_bf16, key) in [
            (self.bf16_optimizer_states, Self::bf16_optimizer_states),
            (!config.optimizer.has_f32_states(), AdamParams::fp32_optimizer_states),
        ] {
            needs(
                of_eight_bits.is_some() && is_in_bf16,
                of_eight_bits.as_deref().unwrap_or_default(),
                key,
                "optimizer states cannot have both 8 bits and the data type of the parameters",
                "keep one of the two keys",
            );
        }
        let is_narrow = gradients == Some(Dtype::Bf16);
        needs(
            is_narrow && !self.enabled,
            GRADIENTS,
            Self::enabled,
            "gradients can be kept in bf16 only if the parameters are in bf16",
            "set `bf16: {enabled: true}`, or `grad_accum_dtype: fp32`",
        );
        needs(
            config.gradient_dtype() == Dtype::Bf16 && config.communication_data_type == Some(Dtype::F16),
            Config::communication_data_type,
            if is_narrow { GRADIENTS } else { no_copy },
            "gradients in bf16 cannot be communicated in fp16, whose range is smaller",
            "set `communication_data_type: bf16` or `fp32`",
        );
        let of_whole = config.of_whole_parameters();
        let (of_type, name) = of_whole.clone().unwrap_or_default();
        needs(
            of_whole.is_some() && self.bf16_optimizer_states,
            Self::bf16_optimizer_states,
            &of_type,
            &format!("{name} always keeps its moments in f32"),
            "remove `bf16_optimizer_states`, or use another optimizer",
        );
        needs(
            of_whole.is_some() && self.bf16_master_weights_and_grads,
            no_copy,
            &of_type,
            &format!("{name} needs the f32 copy of the parameters"),
            "keep the f32 copy, or use another optimizer",
        );
        needs(
            of_whole.is_some() && is_narrow,
            GRADIENTS,
            &of_type,
            &format!("{name} needs gradients in f32"),
            "set `grad_accum_dtype: fp32`, or use another optimizer",
        );
        needs(
            config.fp16.enabled && !config.optimizer.has_f32_states(),
            AdamParams::fp32_optimizer_states,
            Fp16::enabled,
            "`fp32_optimizer_states: false` would keep the states in f16, whose range is too small for them",
            "set `fp32_optimizer_states: true`, or use `bf16`",
        );
    }
}
