//! `model.rope_scaling`: scaling of rotary frequencies for longer sequences, with Hugging Face's names.

use crate::path::last;
use crate::read::node::At;
use crate::read::reader::{Find, Reader, Resolver};
use crate::schema::*;
use crate::table::section;

pub use zero_model_options::RopeScaling;

section! {
    /// The section as written.
    pub(crate) struct Written(keys) in "model.rope_scaling" {
        pub rope_type: String = key(Kind::Choice { names: &["default", "linear", "llama3", "longrope"], later: &["dynamic", "yarn"] }, REQUIRED, "default: no scaling; linear: divides every frequency by factor; llama3: divides the low frequencies, as in Llama 3.1; longrope: divides each frequency by its own factor, as in Phi-3");
        pub factor: Option<f64> = key(POSITIVE, "null", "linear, llama3: divisor of the frequencies; longrope: ratio of the sequence length to that of the original training, by default max_position_embeddings / original_max_position_embeddings");
        pub low_freq_factor: Option<f64> = key(POSITIVE, "null", "llama3: frequencies with fewer rotations than this over original_max_position_embeddings positions are divided by factor");
        pub high_freq_factor: Option<f64> = key(POSITIVE, "null", "llama3: frequencies with more rotations than this are unchanged; must be larger than low_freq_factor");
        pub original_max_position_embeddings: Option<usize> = key(POSITIONS, "null", "llama3, longrope: maximum sequence length in the original training");
        pub short_factor: Vec<f64> = key(FACTORS, "[]", "longrope: divisor of each frequency in sequences of at most original_max_position_embeddings tokens");
        pub long_factor: Vec<f64> = key(FACTORS, "[]", "longrope: divisor of each frequency in longer sequences");
        pub attention_factor: Option<f64> = key(POSITIVE, "null", "longrope: factor on cosines and sines; null: √(1 + ln factor / ln original_max_position_embeddings), at least 1");
    }
}

const FACTORS: Kind = Kind::Floats(Range { min: 0.0, max: f64::MAX, above: true, below: false });

/// [`check`] reports missing keys.
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

/// Reports missing keys, keys that the type does not use, a low factor that is not below the high one, and lists
/// whose length is not `pairs`.
pub(crate) fn check(scaling: Option<&RopeScaling>, pairs: usize, resolver: &mut Resolver<'_>) {
    let kind = match scaling {
        None => "default",
        Some(RopeScaling::Linear { .. }) => "linear",
        Some(RopeScaling::Llama3 { .. }) => "llama3",
        Some(RopeScaling::LongRope { .. }) => "longrope",
    };
    let (required, optional) = keys_of(kind);
    for path in PARAMETERS {
        let is_written = resolver.at(path) != At::Default;
        let (message, help) = match (is_written, required.contains(&path), optional.contains(&path)) {
            (true, false, false) => (format!("`rope_type: {kind}` does not use `{}`", last(path)), "remove it"),
            (false, true, _) => (format!("`rope_type: {kind}` needs `{}`", last(path)), "set it next to `rope_type`"),
            _ => continue,
        };
        resolver.contradiction(&[Written::rope_type, path], message, Some(help.to_string()));
    }
    let ends = [Written::high_freq_factor, Written::low_freq_factor];
    if let Some(RopeScaling::Llama3 { low_freq_factor: low, high_freq_factor: high, .. }) = scaling
        && high <= low
        && ends.iter().all(|end| resolver.at(end) != At::Default)
    {
        let message = format!("high_freq_factor {high} is not larger than low_freq_factor {low}");
        resolver.contradiction(&ends, message, None);
    }
    if let Some(RopeScaling::LongRope { short_factor, long_factor, .. }) = scaling {
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
