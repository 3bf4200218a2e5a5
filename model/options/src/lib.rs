//! Options of models: activations, the scaling of rotary embeddings, the initial values of adapters, the biases trained
//! with an adapter, and 4-bit codes.
//!
//! `zero-config` reads these types from a configuration, and `zero-ops` implements the options. Because both crates use
//! the same types, neither has to convert them.

use serde::{Serialize, Serializer};

/// An elementwise activation, with the names of Hugging Face's configurations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// max(x, 0).
    Relu,
    /// x·Φ(x), with the error function.
    Gelu,
    /// GELU's tanh approximation, which GPT-2 was trained with.
    GeluNew,
    /// x·σ(x).
    Silu,
}

impl Activation {
    /// Returns the activation with a name; `None` if no activation has it.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "relu" => Some(Self::Relu),
            "gelu" => Some(Self::Gelu),
            "gelu_new" | "gelu_pytorch_tanh" => Some(Self::GeluNew),
            "silu" | "swish" => Some(Self::Silu),
            _ => None,
        }
    }

    /// Returns the name that is written to files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Relu => "relu",
            Self::Gelu => "gelu",
            Self::GeluNew => "gelu_new",
            Self::Silu => "silu",
        }
    }
}

impl Serialize for Activation {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// Scales the frequencies of a model that was trained on shorter sequences: Hugging Face's `rope_scaling`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "rope_type", rename_all = "snake_case")]
pub enum RopeScaling {
    /// Divides all frequencies by `factor`: positional interpolation (Chen et al., "Extending context window of large
    /// language models via positional interpolation", 2023).
    Linear {
        /// At least 1 to extend sequences.
        factor: f64,
    },
    /// Divides low frequencies by `factor`, keeps high ones and interpolates between them: the scaling of Llama 3.1.
    Llama3 {
        /// At least 1 to extend sequences.
        factor: f64,
        /// A pair of elements has a low frequency if it makes fewer full rotations than this over the original sequence
        /// length.
        low_freq_factor: f64,
        /// A pair that makes more rotations than this has a high frequency. Must exceed `low_freq_factor`.
        high_freq_factor: f64,
        /// Number of positions that the model was originally trained on.
        original_max_position_embeddings: usize,
    },
    /// Divides each frequency by its own factor, with a second set of factors for sequences longer than those of the
    /// original training. This is LongRoPE (Ding et al., "LongRoPE: extending LLM context window beyond 2 million
    /// tokens", 2024), as in Phi-3. Also multiplies cosines and sines by `attention_factor`.
    #[serde(rename = "longrope")]
    LongRope {
        /// Divisors for sequences of at most `original_max_position_embeddings` tokens, one for each pair of elements.
        short_factor: Vec<f64>,
        /// Divisors for longer sequences, one for each pair of elements.
        long_factor: Vec<f64>,
        /// Ratio of the sequence length to that of the original training. `None` divides the model's number of
        /// positions by `original_max_position_embeddings`.
        #[serde(skip_serializing_if = "Option::is_none")]
        factor: Option<f64>,
        /// Factor of cosines and sines; `None` is √(1 + ln factor/ln original length), at least 1.
        #[serde(skip_serializing_if = "Option::is_none")]
        attention_factor: Option<f64>,
        /// Number of positions that the model was originally trained on.
        original_max_position_embeddings: usize,
    },
}

/// Initial values of the two matrices of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum LoraInit {
    /// A is uniform within ±1/√inputs, as in `torch.nn.Linear`, and B is zero: training starts from the base model.
    #[serde(rename = "true")]
    Zero,
    /// A is normal with standard deviation 1/r, and B is zero.
    #[serde(rename = "gaussian")]
    Gaussian,
    /// A and B are uniform as in `torch.nn.Linear`, so training does not start from the base model. For tests.
    #[serde(rename = "false")]
    Random,
}

/// The biases of the base model that are trained with an adapter: PEFT's `bias`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TrainedBias {
    /// None of them.
    #[default]
    None,
    /// All of them.
    All,
    /// The biases of the linear layers with an adapter.
    LoraOnly,
}

/// The sixteen values of a 4-bit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FourBit {
    /// 4-bit NormalFloat: quantiles of a normal distribution.
    Nf4,
    /// A float with one sign bit, two exponent bits and one mantissa bit.
    Fp4,
}
