//! `bf16`, `fp16`, `data_types` and the names of data types.

use serde::Serialize;

use crate::choice::choice;
use crate::reader::Resolver;

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

/// `bf16`: parameters and activations in bfloat16, master weights and optimizer state in f32.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Bf16 {
    /// Compute in bfloat16.
    pub enabled: bool,
    /// Skip a step if its gradient contains an infinity or a NaN.
    pub check_grad_overflow: bool,
}

/// `fp16`: parameters and activations in IEEE half precision, master weights and optimizer state in f32. The loss
/// is multiplied by a loss scale, so that small gradients do not underflow.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Fp16 {
    /// Compute in half precision.
    pub enabled: bool,
    /// Loss scale; 0 enables dynamic loss scaling with the parameters below.
    pub loss_scale: f64,
    /// The initial loss scale is 2 to this power.
    pub initial_scale_power: u32,
    /// Steps without overflow after which the scale is doubled.
    pub loss_scale_window: usize,
    /// Number of overflows that it takes to halve the scale.
    pub hysteresis: usize,
    /// Reset the count of overflows after every step without overflow, not only after the scale is doubled.
    pub consecutive_hysteresis: bool,
    /// Minimum loss scale. Training stops if gradients overflow at this scale.
    pub min_loss_scale: usize,
}

/// `data_types`: data types of buffers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DataTypes {
    /// Data type in which the gradients of micro-batches are accumulated; `None` uses the data type of the
    /// parameters.
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

    /// Returns whether loss scaling is dynamic.
    pub fn is_dynamic(&self) -> bool {
        self.loss_scale == 0.0
    }

    /// Checks the section against `bf16`.
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
