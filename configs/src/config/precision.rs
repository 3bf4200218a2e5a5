//! `bf16`, `data_types` and the names of number types.

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

impl DataTypes {
    pub(crate) fn read(resolver: &mut Resolver<'_>) -> Self {
        Self { grad_accum_dtype: resolver.section("data_types").optional_choice("grad_accum_dtype") }
    }
}
