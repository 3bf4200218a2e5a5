//! `model.rope_scaling`: scaling of rotary frequencies for longer sequences, with Hugging Face's names.

use serde::Serialize;

use crate::path::last;
use crate::read::node::At;
use crate::read::reader::{Find, Reader, Resolver};
use crate::schema::*;
use crate::table::section;

/// How rotary frequencies are scaled.
#[derive(Debug, Clone, PartialEq, Serialize)]
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
        /// A frequency is low if its pair of dimensions makes fewer than this number of rotations over the positions of
        /// the original training.
        low_freq_factor: f64,
        /// A frequency is high if its pair makes more than this number of rotations.
        high_freq_factor: f64,
        /// Maximum sequence length of the original training.
        original_max_position_embeddings: usize,
    },
    /// LongRoPE, as in Phi-3: divides each frequency by its own factor, with a second list of factors for rows longer
    /// than those of the original training.
    #[serde(rename = "longrope")]
    LongRope {
        /// Divisors for rows of at most `original_max_position_embeddings` tokens.
        short_factor: Vec<f64>,
        /// Divisors for longer rows.
        long_factor: Vec<f64>,
        /// Ratio of the sequence length to that of the original training. `None` divides the model's maximum sequence
        /// length by `original_max_position_embeddings`.
        #[serde(skip_serializing_if = "Option::is_none")]
        factor: Option<f64>,
        /// Factor of cosines and sines; `None` is √(1 + ln factor/ln original length), at least 1.
        #[serde(skip_serializing_if = "Option::is_none")]
        attention_factor: Option<f64>,
        /// Maximum sequence length of the original training.
        original_max_position_embeddings: usize,
    },
}

section! {
    /// The section as written.
    pub(crate) struct Written(keys) in "model.rope_scaling" {
        pub rope_type: String = key(Kind::Choice { names: &["default", "linear", "llama3", "longrope"], later: &["dynamic", "yarn"] }, REQUIRED, "default: no scaling; linear: divides every frequency by factor; llama3: divides the low frequencies, as in Llama 3.1; longrope: divides each frequency by its own factor, as in Phi-3");
        pub factor: Option<f64> = key(POSITIVE, "null", "linear, llama3: divisor of the frequencies; longrope: ratio of the sequence length to that of the original training, by default max_position_embeddings / original_max_position_embeddings");
        pub low_freq_factor: Option<f64> = key(POSITIVE, "null", "llama3: frequencies with fewer rotations than this over original_max_position_embeddings positions are divided by factor");
        pub high_freq_factor: Option<f64> = key(POSITIVE, "null", "llama3: frequencies with more rotations than this are unchanged; must be larger than low_freq_factor");
        pub original_max_position_embeddings: Option<usize> = key(POSITIONS, "null", "llama3, longrope: maximum sequence length in the original training");
        pub short_factor: Vec<f64> = key(FACTORS, "[]", "longrope: divisor of each frequency in rows of at most original_max_position_embeddings tokens");
        pub long_factor: Vec<f64> = key(FACTORS, "[]", "longrope: divisor of each frequency in longer rows");
        pub attention_factor: Option<f64> = key(POSITIVE, "null", "longrope: factor on cosines and sines; null: √(1 + ln factor / ln original_max_position_embeddings), at least 1");
    }
}

const FACTORS: Kind = Kind::Floats(Range { min: 0.0, max: f64::MAX, above: true, below: false });

/// [`check`](RopeScaling::check) reports missing keys.
impl Find for RopeScaling {
    fn find(keys: &mut Reader<'_, '_>, name: &'static str) -> Option<Self> {
        let written = Written::find(keys, name)?;
        let factor = written.factor.unwrap_or(1.0);
        let original_max_position_embeddings = written.original_max_position_embeddings.unwrap_or(1);
        match written.rope_type.as_str() {
            "linear" => Some(Self::Linear { factor }),
            "llama3" => Some(Self::Llama3 {
                factor,
                low_freq_factor: written.low_freq_factor.unwrap_or(1.0),
                high_freq_factor: written.high_freq_factor.unwrap_or(2.0),
                original_max_position_embeddings,
            }),
            "longrope" => Some(Self::LongRope {
                short_factor: written.short_factor,
                long_factor: written.long_factor,
                factor: written.factor,
                attention_factor: written.attention_factor,
                original_max_position_embeddings,
            }),
            _ => None,
        }
    }
}

pub(crate) const TYPE: &str = Written::rope_type;

pub(crate) const ORIGINAL: &str = Written::original_max_position_embeddings;

/// Keys that a type may need.
const PARAMETERS: [&str; 7] = [
    Written::factor,
    Written::low_freq_factor,
    Written::high_freq_factor,
    Written::original_max_position_embeddings,
    Written::short_factor,
    Written::long_factor,
    Written::attention_factor,
];

/// Returns the keys that a type requires, and its optional keys.
pub(crate) fn keys_of(kind: &str) -> (&'static [&'static str], &'static [&'static str]) {
    const LONG: [&str; 3] = [Written::original_max_position_embeddings, Written::short_factor, Written::long_factor];
    match kind {
        "linear" => (&[Written::factor], &[]),
        "llama3" => (PARAMETERS.split_at(4).0, &[]),
        "longrope" => (&LONG, &[Written::factor, Written::attention_factor]),
        _ => (&[], &[]),
    }
}

impl RopeScaling {
    /// Reports missing keys, keys that the type does not use, a low factor that is not below the high one, and lists
    /// whose length is not `pairs`.
    pub(crate) fn check(scaling: Option<&Self>, pairs: usize, resolver: &mut Resolver<'_>) {
        let kind = match scaling {
            None => "default",
            Some(Self::Linear { .. }) => "linear",
            Some(Self::Llama3 { .. }) => "llama3",
            Some(Self::LongRope { .. }) => "longrope",
        };
        let (required, optional) = keys_of(kind);
        for path in PARAMETERS {
            let is_written = resolver.at(path) != At::Default;
            let (message, help) = match (is_written, required.contains(&path), optional.contains(&path)) {
                (true, false, false) => (format!("`rope_type: {kind}` does not use `{}`", last(path)), "remove it"),
                (false, true, _) => {
                    (format!("`rope_type: {kind}` needs `{}`", last(path)), "set it next to `rope_type`")
                }
                _ => continue,
            };
            resolver.contradiction(&[Written::rope_type, path], message, Some(help.to_string()));
        }
        let ends = [Written::high_freq_factor, Written::low_freq_factor];
        if let Some(Self::Llama3 { low_freq_factor: low, high_freq_factor: high, .. }) = scaling
            && high <= low
            && ends.iter().all(|end| resolver.at(end) != At::Default)
        {
            let message = format!("high_freq_factor {high} is not larger than low_freq_factor {low}");
            resolver.contradiction(&ends, message, None);
        }
        if let Some(Self::LongRope { short_factor, long_factor, .. }) = scaling {
            for (path, factors) in [(Written::short_factor, short_factor), (Written::long_factor, long_factor)] {
                if resolver.at(path) != At::Default && factors.len() != pairs {
                    let message = format!(
                        "{} has {} numbers, but needs {pairs}: one for each pair of dimensions of a head",
                        last(path),
                        factors.len()
                    );
                    resolver.contradiction(&[path], message, None);
                }
            }
        }
    }
}
