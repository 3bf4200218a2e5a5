//! `bf16`, `fp16`, `data_types` and the names of data types.

use serde::Serialize;

use crate::choice::{Choice as _, choice};
use crate::config::{Adam, Config, Optimizer, Training};
use crate::read::reader::Resolver;
use crate::schema::*;
use crate::table::section;

choice! {
    /// A floating-point data type that the configuration can name.
    pub enum Dtype {
        /// IEEE single precision.
        F32 = "fp32" | "float32",
        /// bfloat16: 8 bits of exponent, 7 of mantissa.
        Bf16 = "bf16" | "bfp16" | "bfloat16",
        /// IEEE half precision.
        F16 = "fp16" | "float16",
    }
}

section! {
    /// `bf16`: parameters and activations in bfloat16, master weights and optimizer state in f32.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Bf16(keys) in Config::bf16 {
        pub enabled: bool = now(Kind::Bool, "false", "Compute in bfloat16");
        pub check_grad_overflow: bool = now(Kind::Bool, "true", "Skip a step if its gradient contains an infinity or a NaN");
        = ignored("immediate_grad_update", Kind::Bool, "false", "gradients are always written to their buffer as they are produced");
        pub bf16_master_weights_and_grads: bool = now(Kind::Bool, "false", "Keep no f32 copy of the parameters: the optimizer updates them in bf16. Gradients are kept in bf16 too; see `data_types.grad_accum_dtype`");
        pub bf16_optimizer_states: bool = now(Kind::Bool, "false", "Keep optimizer states in bf16; needs bf16_master_weights_and_grads");
        pub stochastic_rounding: bool = key(Kind::Bool, "false", "Round updated parameters stochastically, so that rounding is unbiased; needs bf16_master_weights_and_grads");
    }
}

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
            (!config.optimizer.has_f32_states(), Adam::fp32_optimizer_states),
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
            Adam::fp32_optimizer_states,
            Fp16::enabled,
            "`fp32_optimizer_states: false` would keep the states in f16, whose range is too small for them",
            "set `fp32_optimizer_states: true`, or use `bf16`",
        );
    }
}

section! {
    /// `fp16`: parameters and activations in IEEE half precision, master weights and optimizer state in f32. The loss
    /// is multiplied by a loss scale, so that small gradients do not underflow.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Fp16(keys) in Config::fp16, off while enabled is ["false", "auto"] {
        pub enabled: bool = now(Kind::Bool, "false", "Compute in f16");
        pub loss_scale: f64 = now(NON_NEGATIVE, "0", "Static loss scale, by which the loss is multiplied before the backward pass; 0: dynamic loss scaling");
        pub initial_scale_power: u32 = now(Kind::Int { min: 0, max: 127 }, "16", "Initial loss scale, as an exponent of 2");
        pub loss_scale_window: usize = now(COUNT, "1000", "Steps without overflow before the scale is doubled");
        pub hysteresis: usize = now(COUNT, "2", "Number of overflows until the scale is halved; earlier overflows only skip the step");
        pub consecutive_hysteresis: bool = now(Kind::Bool, "false", "Reset the overflow count after each step without an overflow; false: reset it only when the scale is doubled");
        pub min_loss_scale: usize = now(COUNT, "1", "Smallest loss scale; an overflow at this scale ends training with exit status 5");
        = later("auto_cast", "false", "Cast the model's inputs to f16");
        = rejected("fp16_master_weights_and_grads", "false", "master weights and gradients in f16 reduce accuracy");
    }
}

section! {
    /// `data_types`: data types of buffers.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct DataTypes(keys) in Config::data_types {
        pub grad_accum_dtype: Option<Dtype> = now(Dtype::KIND, "null", "Data type in which gradients are accumulated over micro-batches and stored: fp32 or bf16. null: bf16 if bf16_master_weights_and_grads is set and training.reproducible is not, else fp32");
        = later("param_dtype", "null", "Data type that parameters are cast to").instead("`bf16` and `fp16` set the data type of parameters");
        = later("buffer_dtype", "null", "Data type that buffers are cast to").instead("`bf16` and `fp16` set the data type of all values");
        = later_unless("keep_in_fp32_modules", &["auto", "[]"], "Modules that stay in f32").instead("`bf16` and `fp16` apply to all modules; f32 master weights are kept unless `bf16_master_weights_and_grads` is set");
    }
}

impl Fp16 {
    /// Returns whether loss scaling is dynamic.
    pub fn is_dynamic(&self) -> bool {
        self.loss_scale == 0.0
    }

    /// Checks the section against `bf16`.
    pub(crate) fn check(&self, bf16: &Bf16, resolver: &mut Resolver<'_>) {
        if self.enabled && bf16.enabled {
            let help = "keep one of the two: bf16 needs no loss scale".to_string();
            let message = "`bf16` and `fp16` are both enabled".to_string();
            resolver.contradiction(&[Bf16::enabled, Self::enabled], message, Some(help));
        }
        let first = 2f64.powi(self.initial_scale_power as i32);
        if self.enabled && self.is_dynamic() && first < self.min_loss_scale as f64 {
            let message = format!(
                "the initial loss scale, 2^{} = {first}, is below the smallest loss scale, {}",
                self.initial_scale_power, self.min_loss_scale
            );
            resolver.contradiction(&[Self::initial_scale_power, Self::min_loss_scale], message, None);
        }
    }
}
