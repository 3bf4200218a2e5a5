//! `model.rope_scaling`: scaling of rotary frequencies for longer sequences, with Hugging Face's names.

use serde::Serialize;

use crate::config::Llama;
use crate::config::model::POSITIONS;
use crate::node::At;
use crate::reader::{Find, Reader, Resolver};
use crate::schema::*;
use crate::table::{last, section};

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

section! {
    /// The section as written.
    pub(super) struct Written(keys) in Llama::rope_scaling {
        pub rope_type: String = key(Kind::Choice { names: &["default", "linear", "llama3"], later: &["dynamic", "yarn", "longrope"] }, REQUIRED, "default: none; linear: every frequency divided by factor; llama3: the low ones, as Llama 3.1");
        pub factor: Option<f64> = key(POSITIVE, "null", "What frequencies are divided by; with linear and llama3");
        pub low_freq_factor: Option<f64> = key(POSITIVE, "null", "llama3: a pair that turns less often than this over the original positions is divided");
        pub high_freq_factor: Option<f64> = key(POSITIVE, "null", "llama3: a pair that turns more often than this is kept; larger than low_freq_factor");
        pub original_max_position_embeddings: Option<usize> = key(POSITIONS, "null", "llama3: longest sequence of the earlier training");
    }
}

/// [`check`](RopeScaling::check) reports missing keys.
impl Find for RopeScaling {
    fn find(keys: &mut Reader<'_, '_>, name: &'static str) -> Option<Self> {
        let written = Written::find(keys, name)?;
        let factor = written.factor.unwrap_or(1.0);
        match written.rope_type.as_str() {
            "linear" => Some(Self::Linear { factor }),
            "llama3" => Some(Self::Llama3 {
                factor,
                low_freq_factor: written.low_freq_factor.unwrap_or(1.0),
                high_freq_factor: written.high_freq_factor.unwrap_or(2.0),
                original_max_position_embeddings: written.original_max_position_embeddings.unwrap_or(1),
            }),
            _ => None,
        }
    }
}

pub(crate) const TYPE: &str = Written::rope_type;

/// Keys that a type may need.
pub(crate) const PARAMETERS: [&str; 4] =
    [Written::factor, Written::low_freq_factor, Written::high_freq_factor, Written::original_max_position_embeddings];

impl RopeScaling {
    /// Reports keys that the type requires and that are missing, keys that it does not use, and a low factor above
    /// the high one.
    pub(crate) fn check(scaling: Option<Self>, resolver: &mut Resolver<'_>) {
        let (kind, needed) = match scaling {
            None => ("default", 0),
            Some(Self::Linear { .. }) => ("linear", 1),
            Some(Self::Llama3 { .. }) => ("llama3", PARAMETERS.len()),
        };
        for (index, path) in PARAMETERS.into_iter().enumerate() {
            let is_written = resolver.at(path) != At::Default;
            if is_written != (index < needed) {
                let name = last(path);
                let (message, help) = match is_written {
                    true => (format!("`rope_type: {kind}` has no use for `{name}`"), "leave it out"),
                    false => (format!("`rope_type: {kind}` needs `{name}`"), "write it beside `rope_type`"),
                };
                resolver.contradiction(&[Written::rope_type, path], message, Some(help.to_string()));
            }
        }
        let ends = [Written::high_freq_factor, Written::low_freq_factor];
        if let Some(Self::Llama3 { low_freq_factor: low, high_freq_factor: high, .. }) = scaling
            && high <= low
            && ends.iter().all(|end| resolver.at(end) != At::Default)
        {
            let message = format!("high_freq_factor {high} is not larger than low_freq_factor {low}");
            resolver.contradiction(&ends, message, None);
        }
    }
}
