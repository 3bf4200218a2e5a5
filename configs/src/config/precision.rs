//! `bf16`, `fp16`, `data_types` and the names of data types.

use serde::Serialize;

use crate::choice::{Choice as _, choice};
use crate::config::Config;
use crate::reader::Resolver;
use crate::schema::*;
use crate::table::section;

/// Advice on optimizer state in other data types.
pub(super) const OFFLOADED: &str = "`zero_optimization.offload_optimizer` puts this state on a disk";

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
        /// Compute in bfloat16.
        pub enabled: bool = now(Kind::Bool, "false", "Compute in bfloat16");
        /// Skip a step if its gradient contains an infinity or a NaN.
        pub check_grad_overflow: bool = now(Kind::Bool, "true", "Skip a step whose gradient has an infinity or a NaN");
        = ignored("immediate_grad_update", Kind::Bool, "false", "gradients always go to their buffer as they are produced");
        = later("bf16_master_weights_and_grads", "false", "No f32 master weights").instead(OFFLOADED);
        = later("bf16_optimizer_states", "false", "Optimizer state in bfloat16").instead(OFFLOADED);
    }
}

section! {
    /// `fp16`: parameters and activations in IEEE half precision, master weights and optimizer state in f32. The loss
    /// is multiplied by a loss scale, so that small gradients do not underflow.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Fp16(keys) in Config::fp16, off while enabled is ["false", "auto"] {
        /// Compute in half precision.
        pub enabled: bool = now(Kind::Bool, "false", "Compute in f16");
        /// Loss scale; 0 enables dynamic loss scaling with the parameters below.
        pub loss_scale: f64 = now(NON_NEGATIVE, "0", "What the loss is multiplied by before the backward; 0 is a scale that follows the gradients");
        /// The initial loss scale is 2 to this power.
        pub initial_scale_power: u32 = now(Kind::Int { min: 0, max: 127 }, "16", "The first scale, as a power of 2");
        /// Steps without overflow after which the scale is doubled.
        pub loss_scale_window: usize = now(COUNT, "1000", "Steps without overflow before the scale is doubled");
        /// Number of overflows that it takes to halve the scale.
        pub hysteresis: usize = now(COUNT, "2", "Which overflow halves the scale; those before it only skip the step");
        /// Reset the count of overflows after every step without overflow, not only after the scale is doubled.
        pub consecutive_hysteresis: bool = now(Kind::Bool, "false", "Count overflows anew after each step that goes well, and not only after the scale is doubled");
        /// Minimum loss scale. Training stops if gradients overflow at this scale.
        pub min_loss_scale: usize = now(COUNT, "1", "The smallest scale; an overflow there ends training, with exit status 5");
        = later("auto_cast", "false", "Cast the model's inputs to f16");
        = rejected("fp16_master_weights_and_grads", "false", "it costs accuracy");
    }
}

section! {
    /// `data_types`: data types of buffers.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct DataTypes(keys) in Config::data_types {
        /// Data type in which the gradients of micro-batches are accumulated; `None` uses the data type of the
        /// parameters.
        pub grad_accum_dtype: Option<Dtype> = now(Dtype::KIND, "null", "Type in which gradients of micro-batches are added up; null: that of the parameters");
        = later("param_dtype", "null", "Type that parameters are cast to").instead("`bf16` and `fp16` say in what parameters are stored");
        = later("buffer_dtype", "null", "Type that buffers are cast to").instead("`bf16` and `fp16` say in what values are stored");
        = later_unless("keep_in_fp32_modules", &["auto", "[]"], "Modules that stay in f32").instead("every parameter has an f32 master anyway");
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
                "the first loss scale, 2^{} = {first}, is below the smallest, {}",
                self.initial_scale_power, self.min_loss_scale
            );
            resolver.contradiction(&[Self::initial_scale_power, Self::min_loss_scale], message, None);
        }
    }
}
