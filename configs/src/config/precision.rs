//! `bf16`, `fp16`, `data_types` and the names of data types.

use serde::Serialize;

use crate::choice::{Choice as _, choice};
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
    pub struct Bf16(keys) in "bf16" {
        pub enabled: bool = now(Kind::Bool, "false", "Compute in bfloat16");
        pub check_grad_overflow: bool = now(Kind::Bool, "true", "Skip a step if its gradient contains an infinity or a NaN");
        = ignored("immediate_grad_update", Kind::Bool, "false", "gradients are always written to their buffer as they are produced");
        pub bf16_master_weights_and_grads: bool = now(Kind::Bool, "false", "Keep no f32 copy of the parameters: the optimizer updates them in bf16. Gradients are kept in bf16 too; see `data_types.grad_accum_dtype`");
        pub bf16_optimizer_states: bool = now(Kind::Bool, "false", "Keep optimizer states in bf16; needs bf16_master_weights_and_grads");
        pub stochastic_rounding: bool = key(Kind::Bool, "false", "Round updated parameters stochastically, so that rounding is unbiased; needs bf16_master_weights_and_grads");
    }
}

section! {
    /// `fp16`: parameters and activations in IEEE half precision, master weights and optimizer state in f32. The loss
    /// is multiplied by a loss scale, so that small gradients do not underflow.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Fp16(keys) in "fp16", off while enabled is ["false", "auto"] {
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
    pub struct DataTypes(keys) in "data_types" {
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
