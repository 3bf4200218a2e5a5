//! `pipeline`: how layers are assigned to stages, and the order in which micro-batches pass through them.

use std::fmt;

use serde::Serialize;

use crate::choice::choice;
use crate::config::LayerPattern;
use crate::nearest::nearest;
use crate::reader::Resolver;

/// `pipeline`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Pipeline {
    /// Number of stages, which must divide the number of ranks; 1 disables the pipeline.
    pub stages: usize,
    /// How layers are assigned to stages.
    pub partition_method: PartitionMethod,
    /// Order in which micro-batches pass through the stages.
    pub schedule: PipelineSchedule,
    /// Chunks of layers per stage; more than 1 only with [`PipelineSchedule::Interleaved1F1B`], which requires it.
    pub virtual_stages: usize,
    /// ZeRO-3: gather a stage's parameters once per step (`true`) or for each micro-batch. `None` is `auto`: once
    /// per step if `stage3_max_live_parameters` allows it.
    #[serde(serialize_with = "crate::yaml_out::auto")]
    pub keep_gathered: Option<bool>,
}

choice! {
    /// Order in which micro-batches pass through the stages.
    pub enum PipelineSchedule {
        /// Alternates forwards and backwards. A stage holds at most as many micro-batches as there are stages from
        /// it to the last.
        OneF1B = "1f1b",
        /// All forwards, then all backwards.
        GPipe = "gpipe",
        /// 1F1B with several chunks of layers per stage, [`Pipeline::virtual_stages`]: less waiting, more messages.
        Interleaved1F1B = "interleaved_1f1b",
        /// 1F1B with backwards split in two: gradients of weights are computed while a stage would otherwise wait.
        ZbH1 = "zb_h1",
    }
}

/// How layers are assigned to stages. Each stage gets consecutive layers.
#[derive(Debug, Clone, PartialEq)]
pub enum PartitionMethod {
    /// Balances the number of parameters.
    Parameters,
    /// Balances the number of layers.
    Uniform,
    /// Balances the measured time.
    Time,
    /// Balances the number of layers whose names match.
    Type(LayerPattern),
}

impl PartitionMethod {
    /// Names of all methods but the one with a pattern. DeepSpeed calls its default `best`.
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
                    Err(Some("write a regular expression after `type:`, or `uniform` for all layers".to_string()))
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

impl Pipeline {
    pub(crate) fn read(resolver: &mut Resolver<'_>) -> Self {
        let mut keys = resolver.section("pipeline");
        let method = keys.text("partition_method");
        let schedule = keys.choice("schedule", PipelineSchedule::OneF1B);
        let is_interleaved = schedule == PipelineSchedule::Interleaved1F1B;
        let pipeline = Self {
            stages: keys.int("stages"),
            partition_method: PartitionMethod::parse(&method).unwrap_or(PartitionMethod::Parameters),
            schedule,
            virtual_stages: keys.optional_int("virtual_stages").unwrap_or(if is_interleaved { 2 } else { 1 }),
            keep_gathered: keys.optional_bool("keep_gathered"),
        };
        let chunks = pipeline.virtual_stages;
        if is_interleaved != (chunks > 1) {
            let (message, help) = match is_interleaved {
                true => (
                    format!("`{schedule}` goes back and forth between the chunks of a stage, and there is {chunks}"),
                    "write `virtual_stages: 2` or more, or `schedule: 1f1b`",
                ),
                false => (
                    format!("`{schedule}` runs a stage's layers in one go, not in {chunks} chunks"),
                    "write `schedule: interleaved_1f1b`, or leave `virtual_stages` out",
                ),
            };
            resolver.contradiction(&["pipeline.virtual_stages", "pipeline.schedule"], message, Some(help.to_string()));
        }
        pipeline
    }
}
