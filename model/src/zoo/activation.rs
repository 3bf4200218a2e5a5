//! Activations under Hugging Face's names.

use crate::ops;
use candle_core::{Result, Tensor};
use std::str::FromStr;

/// An elementwise activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `gelu_new`, `gelu_pytorch_tanh`: GELU's tanh form.
    GeluNew,
    /// `gelu`: GELU by the error function.
    Gelu,
    /// `silu`, `swish`.
    Silu,
    /// `relu`.
    Relu,
}

impl Activation {
    /// Applies it to each element.
    pub fn apply(self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::GeluNew => ops::gelu(x),
            Self::Gelu => ops::gelu_erf(x),
            Self::Silu => ops::silu(x),
            Self::Relu => ops::relu(x),
        }
    }
}

/// No activation of this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no activation is called `{0}`: gelu_new, gelu_pytorch_tanh, gelu, silu, swish, relu")]
pub struct UnknownActivation(pub String);

impl FromStr for Activation {
    type Err = UnknownActivation;

    fn from_str(name: &str) -> std::result::Result<Self, UnknownActivation> {
        match name {
            "gelu_new" | "gelu_pytorch_tanh" => Ok(Self::GeluNew),
            "gelu" => Ok(Self::Gelu),
            "silu" | "swish" => Ok(Self::Silu),
            "relu" => Ok(Self::Relu),
            other => Err(UnknownActivation(other.to_string())),
        }
    }
}
