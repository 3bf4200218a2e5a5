//! `adapter`: small trainable matrices alongside the linear layers of a frozen model.

use serde::Serialize;

use crate::choice::{Choice as _, choice};
use crate::schema::*;
use crate::table::section;

pub use zero_model_options::{LoraInit, TrainedBias};

section! {
    /// `adapter`, with the names of PEFT's `LoraConfig`.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Adapter(keys) in "adapter" {
        pub kind as "type": AdapterType = key(AdapterType::KIND, "lora", "Kind of adapter");
        pub r: usize = key(COUNT, "8", "Rank of the two matrices");
        pub lora_alpha: f64 = key(POSITIVE, "8.0", "Scale α: the adapter's output is multiplied by α/r");
        pub lora_dropout: f64 = key(Kind::Float(Range { min: 0.0, max: 1.0, above: false, below: true }), "0.0", "Dropout probability of the adapter's input in training");
        pub target_modules: Vec<String> = key(Kind::Names, "all-linear", "Linear layers that get an adapter: a name or a list of names, each the path of a module or the end of its path, such as `q_proj`; all-linear: all except the head");
        pub modules_to_save: Vec<String> = key(Kind::Texts, "[]", "Modules of the base model that are trained and saved in full. As in PEFT, a name selects all modules whose path ends with this text: `norm` also selects `input_layernorm`, and `model.norm` only the last norm of a Llama");
        pub bias: TrainedBias = key(TrainedBias::KIND, "none", "Biases of the base model that are trained: none; all; lora_only, those of the layers with an adapter");
        pub use_rslora: bool = key(Kind::Bool, "false", "Multiply the adapter's output by α/√r instead of α/r (rsLoRA)");
        pub init_lora_weights: LoraInit = key(LoraInit::KIND, "true", "Initial values. true: A from a uniform distribution and B = 0; gaussian: A from a normal distribution and B = 0; false: both from random distributions. With B = 0, training starts from the base model");
        pub pretrained: Option<String> = key(Kind::Path, "null", "Folder of an adapter to start from, relative to the working directory, with `adapter_config.json` and `adapter_model.safetensors` as PEFT saves them");
        pub use_dora: bool = key(Kind::Bool, "false", "Also train the norm of each output's weight vector (DoRA)");
        pub loraplus_lr_ratio: Option<f64> = key(POSITIVE, "null", "LoRA+: ratio of the learning rate of B and of trained vectors to the learning rate of A");
    }
}

/// The value of `target_modules` that selects all linear layers.
pub const ALL_LINEAR: &str = "all-linear";

choice! {
    /// Kind of adapter.
    pub enum AdapterType {
        /// Low-rank products.
        Lora = "lora",
    }
}

choice! {
    enum TrainedBias {
        None = "none",
        All = "all",
        LoraOnly = "lora_only",
    }
}

choice! {
    enum LoraInit {
        Zero = "true",
        Gaussian = "gaussian",
        Random = "false",
    }
}

impl Adapter {
    /// Returns the names of the linear layers that get an adapter; `None` selects all linear layers.
    #[must_use]
    pub fn targets(&self) -> Option<Vec<String>> {
        (self.target_modules != [ALL_LINEAR]).then(|| self.target_modules.clone())
    }

    /// Returns the factor of the product B·A.
    #[must_use]
    pub fn scale(&self) -> f64 {
        let r = self.r as f64;
        self.lora_alpha / if self.use_rslora { r.sqrt() } else { r }
    }
}
