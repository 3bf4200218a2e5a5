//! `quantization_config`: frozen weights in 4 or 8 bits.

use serde::Serialize;

use crate::choice::{Choice as _, choice};
use crate::config::{Bf16, Dtype};
use crate::read::reader::Resolver;
use crate::schema::*;
use crate::table::section;

pub use zero_model_options::FourBit;

section! {
    /// `quantization_config`, with the names of transformers' `BitsAndBytesConfig`.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Quantization(keys) in "quantization_config" {
        pub quant_method: QuantizationMethod = key(QuantizationMethod::KIND, "bitsandbytes", "Library whose formats are used");
        pub load_in_4bit: bool = key(Kind::Bool, "false", "Store the weights of linear layers in 4 bits");
        pub load_in_8bit: bool = key(Kind::Bool, "false", "Store the weights of linear layers in 8 bits");
        pub bnb_4bit_quant_type: FourBit = key(FourBit::KIND, "fp4", "Values that the 4-bit codes represent: fp4, or nf4, which fits normally distributed weights better");
        pub bnb_4bit_use_double_quant: bool = key(Kind::Bool, "false", "Double quantization: store the scales of 4-bit blocks in 8 bits, for a total of 4.13 instead of 4.5 bits per element");
        pub bnb_4bit_compute_dtype: Option<Dtype> = key(Dtype::KIND, "null", "Data type of the inputs of quantized linear layers; null: the working data type, which is the only one supported");
        pub llm_int8_skip_modules: Vec<String> = key(Kind::Texts, "[]", "Modules whose linear layers are not quantized: paths, or the ends of paths. Embeddings and the head of a language model are never quantized");
        pub bnb_4bit_quant_storage: QuantStorage = key(QuantStorage::KIND, "uint8", "Data type that holds 4-bit codes");
        = later_unless("llm_int8_threshold", &["0", "0.0"], "Inputs above this value are multiplied outside int8").instead("inputs are not quantized, so no outliers need separate treatment; set it to 0");
        = later("llm_int8_has_fp16_weight", "false", "Train int8 weights").instead("`adapter` trains alongside quantized weights");
        = later("llm_int8_enable_fp32_cpu_offload", "false", "Keep modules in f32 on the host").instead("`llm_int8_skip_modules` names modules that are not quantized");
    }
}

choice! {
    /// A library that quantizes weights.
    pub enum QuantizationMethod {
        /// bitsandbytes.
        BitsAndBytes = "bitsandbytes",
    }
}

choice! {
    /// A data type that stores 4-bit codes.
    pub enum QuantStorage {
        /// Bytes, each of which holds two codes.
        Bytes = "uint8",
    }
}

choice! {
    enum FourBit {
        Fp4 = "fp4",
        Nf4 = "nf4",
    }
}

impl Quantization {
    /// Returns whether anything is quantized.
    #[must_use]
    pub fn quantizes(&self) -> bool {
        self.load_in_4bit || self.load_in_8bit
    }

    /// Checks the keys against each other and against the working data type.
    pub(crate) fn check(&self, working: Dtype, resolver: &mut Resolver<'_>) {
        if self.load_in_4bit && self.load_in_8bit {
            let help = "set one of `load_in_4bit: true` and `load_in_8bit: true`".to_string();
            let message = "weights cannot be stored in both 4 and 8 bits".to_string();
            resolver.contradiction(&[Self::load_in_4bit, Self::load_in_8bit], message, Some(help));
        }
        for (key, needs, is_set, without) in [
            (Self::bnb_4bit_use_double_quant, Self::load_in_4bit, self.bnb_4bit_use_double_quant, !self.load_in_4bit),
            (
                Self::bnb_4bit_quant_type,
                Self::load_in_4bit,
                self.bnb_4bit_quant_type == FourBit::Nf4,
                !self.load_in_4bit,
            ),
            (
                Self::llm_int8_skip_modules,
                Self::load_in_4bit,
                !self.llm_int8_skip_modules.is_empty(),
                !self.quantizes(),
            ),
        ] {
            if is_set && without {
                let message = format!("`{key}` has no effect, because `{needs}` is false");
                resolver.contradiction(&[key, needs], message, Some("remove it".to_string()));
            }
        }
        if self.bnb_4bit_compute_dtype.is_some_and(|dtype| dtype != working) {
            let message = "quantized linear layers compute in the same data type as all other layers".to_string();
            let help = "remove it, or set `bf16.enabled` or `fp16.enabled` to match it".to_string();
            resolver.contradiction(&[Self::bnb_4bit_compute_dtype, Bf16::enabled], message, Some(help));
        }
    }
}
