//! `pipeline.partition_method`: how layers are assigned to pipeline stages.

use std::fmt;

use serde::Serialize;

use crate::config::LayerPattern;
use crate::nearest::nearest;

/// How layers are assigned to stages. Each stage gets consecutive layers.
#[derive(Debug, Clone, PartialEq)]
pub enum PartitionMethod {
    /// Balances the number of parameters.
    Parameters,
    /// Balances the number of layers.
    Uniform,
    /// Balances the measured time.
    Time,
    /// Balances the number of layers whose names match the pattern.
    Type(LayerPattern),
}

impl PartitionMethod {
    /// Names of all methods except `type:`, which takes a pattern. DeepSpeed calls its default `best`.
    const NAMES: [&str; 4] = ["parameters", "uniform", "time", "best"];

    /// Parses a method.
    ///
    /// # Errors
    /// Advice on what to write instead, if there is any.
    pub(crate) fn parse(text: &str) -> Result<Self, Option<String>> {
        match text {
            "parameters" | "best" => Ok(Self::Parameters),
            "uniform" => Ok(Self::Uniform),
            "time" => Ok(Self::Time),
            _ => match text.strip_prefix("type:") {
                Some("") => {
                    Err(Some("give a regular expression after `type:`, or use `uniform` for all layers".to_string()))
                }
                Some(pattern) => LayerPattern::new(pattern).map(Self::Type).map_err(Some),
                None => Err(nearest(text, Self::NAMES.into_iter()).map(|near| format!("did you mean `{near}`?"))),
            },
        }
    }
}

impl fmt::Display for PartitionMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Parameters => f.write_str("parameters"),
            Self::Uniform => f.write_str("uniform"),
            Self::Time => f.write_str("time"),
            Self::Type(pattern) => write!(f, "type:{}", pattern.as_str()),
        }
    }
}

impl Serialize for PartitionMethod {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
