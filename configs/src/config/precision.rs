//! `bf16`, `fp16`, `data_types` and the names of number types.

use serde::Serialize;

use crate::choice::choice;
use crate::reader::Resolver;

choice! {
    /// A floating-point type that the configuration can name.
    pub enum Dtype {
        /// IEEE single precision.
        F32 = "fp32" | "float32",
        /// bfloat16: 8 bits of exponent, 7 of mantissa.
        Bf16 = "bf16" | "bfp16" | "bfloat16",
        /// IEEE half precision.
        F16 = "fp16" | "float16",
    }
}

/// `bf16`: parameters and activations in bfloat16, master weights and optimizer state in f32.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Bf16 {
    /// Compute in bfloat16.
    pub enabled: bool,
    /// Skip a step whose gradient has an infinity or a NaN.
    pub check_grad_overflow: bool,
}

/// `fp16`: parameters and activations in IEEE half precision, master weights and optimizer state in f32, and a loss that is
/// multiplied by a scale, so that small gradients do not vanish.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Fp16 {
    /// Compute in half precision.
    pub enabled: bool,
    /// The scale; 0 is one that follows the gradients, as the other fields say.
    pub loss_scale: f64,
    /// The first scale is 2 to this power.
    pub initial_scale_power: u32,
    /// Steps that go well before the scale is doubled.
    pub loss_scale_window: usize,
    /// Which overflow halves the scale.
    pub hysteresis: usize,
    /// Count overflows anew after every step that goes well, and not only after the scale is doubled.
    pub consecutive_hysteresis: bool,
    /// The smallest scale; when gradients overflow there, training ends.
    pub min_loss_scale: usize,
}

/// `data_types`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DataTypes {
    /// Type in which gradients of micro-batches are added up; `None` is the type of the parameters.
    pub grad_accum_dtype: Option<Dtype>,
}

impl Bf16 {
    pub(crate) fn read(resolver: &mut Resolver<'_>) -> Self {
        let mut keys = resolver.section("bf16");
        Self { enabled: keys.bool("enabled"), check_grad_overflow: keys.bool("check_grad_overflow") }
    }
}

impl Fp16 {
    pub(crate) fn read(resolver: &mut Resolver<'_>) -> Self {
        let mut keys = resolver.section("fp16");
        Self {
            enabled: keys.bool("enabled"),
            loss_scale: keys.float("loss_scale"),
            initial_scale_power: keys.int("initial_scale_power") as u32,
            loss_scale_window: keys.int("loss_scale_window"),
            hysteresis: keys.int("hysteresis"),
            consecutive_hysteresis: keys.bool("consecutive_hysteresis"),
            min_loss_scale: keys.int("min_loss_scale"),
        }
    }

    /// Whether the scale follows the gradients.
    pub fn is_dynamic(&self) -> bool {
        self.loss_scale == 0.0
    }

    /// What only shows when keys are seen together.
    pub(crate) fn check(&self, bf16: &Bf16, resolver: &mut Resolver<'_>) {
        if self.enabled && bf16.enabled {
            let help = "keep one of the two: bf16 needs no loss scale".to_string();
            let message = "`bf16` and `fp16` are both enabled".to_string();
            resolver.contradiction(&["bf16.enabled", "fp16.enabled"], message, Some(help));
        }
        let first = 2f64.powi(self.initial_scale_power as i32);
        if self.enabled && self.is_dynamic() && first < self.min_loss_scale as f64 {
            let message = format!(
                "the first loss scale, 2^{} = {first}, is below the smallest, {}",
                self.initial_scale_power, self.min_loss_scale
            );
            resolver.contradiction(&["fp16.initial_scale_power", "fp16.min_loss_scale"], message, None);
        }
    }
}

impl DataTypes {
    pub(crate) fn read(resolver: &mut Resolver<'_>) -> Self {
        Self { grad_accum_dtype: resolver.section("data_types").optional_choice("grad_accum_dtype") }
    }
}
