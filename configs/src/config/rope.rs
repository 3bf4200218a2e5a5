//! `model.rope_scaling`: scaling of rotary frequencies for longer sequences, with Hugging Face's names.

use serde::Serialize;

use crate::node::At;
use crate::reader::{Reader, Resolver};

const SECTION: &str = "model.rope_scaling";

/// How rotary frequencies are scaled.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(tag = "rope_type", rename_all = "snake_case")]
pub enum RopeScaling {
    /// Divides every frequency by `factor`.
    Linear {
        /// Divisor of all frequencies.
        factor: f64,
    },
    /// Llama 3.1: divides low frequencies by `factor`, keeps high ones, and interpolates between them.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// A pair of dimensions that rotates fewer times than this over the original positions has a low frequency.
        low_freq_factor: f64,
        /// A pair of dimensions that rotates more times than this has a high frequency.
        high_freq_factor: f64,
        /// Maximum sequence length of the original training.
        original_max_position_embeddings: usize,
    },
}

impl RopeScaling {
    /// Reads the section. Returns `None` if nothing is scaled. [`check`](Self::check) reports missing keys.
    pub(crate) fn read(model: &mut Reader<'_, '_>) -> Option<Self> {
        let mut keys = model.inner("rope_scaling")?;
        let kind = keys.text("rope_type");
        let factor = keys.optional_float("factor").unwrap_or(1.0);
        let low_freq_factor = keys.optional_float("low_freq_factor").unwrap_or(1.0);
        let high_freq_factor = keys.optional_float("high_freq_factor").unwrap_or(2.0);
        let original_max_position_embeddings = keys.optional_int("original_max_position_embeddings").unwrap_or(1);
        match kind.as_str() {
            "linear" => Some(Self::Linear { factor }),
            "llama3" => {
                Some(Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings })
            }
            _ => None,
        }
    }

    /// Reports keys that the type requires and that are missing, keys that it does not use, and a low factor above
    /// the high one.
    pub(crate) fn check(scaling: Option<Self>, resolver: &mut Resolver<'_>) {
        let (kind, needed): (_, &[&str]) = match scaling {
            None => ("default", &[]),
            Some(Self::Linear { .. }) => ("linear", &["factor"]),
            Some(Self::Llama3 { .. }) => {
                ("llama3", &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
            }
        };
        for name in ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"] {
            let path = format!("{SECTION}.{name}");
            let rope_type = format!("{SECTION}.rope_type");
            let is_written = resolver.at(&path) != At::Default;
            if is_written != needed.contains(&name) {
                let (message, help) = match is_written {
                    true => (format!("`rope_type: {kind}` has no use for `{name}`"), "leave it out"),
                    false => (format!("`rope_type: {kind}` needs `{name}`"), "write it beside `rope_type`"),
                };
                resolver.contradiction(&[&rope_type, &path], message, Some(help.to_string()));
            }
        }
        if let Some(Self::Llama3 { low_freq_factor: low, high_freq_factor: high, .. }) = scaling
            && high <= low
            && ["low", "high"].iter().all(|end| resolver.at(&format!("{SECTION}.{end}_freq_factor")) != At::Default)
        {
            let message = format!("high_freq_factor {high} is not larger than low_freq_factor {low}");
            let paths = [format!("{SECTION}.high_freq_factor"), format!("{SECTION}.low_freq_factor")];
            resolver.contradiction(&paths.each_ref().map(String::as_str), message, None);
        }
    }
}
