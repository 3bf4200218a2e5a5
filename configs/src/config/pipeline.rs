//! `pipeline`: how layers are dealt out to stages, and in what order micro-batches go through them.

use std::fmt;

use serde::Serialize;

use crate::choice::choice;
use crate::config::LayerPattern;
use crate::nearest::nearest;
use crate::reader::Resolver;

/// `pipeline`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Pipeline {
    /// Number of stages; 1 is no pipeline. The number of ranks is a multiple of it.
    pub stages: usize,
    /// How layers are dealt out to the stages.
    pub partition_method: PartitionMethod,
    /// In what order micro-batches go through the stages.
    pub schedule: PipelineSchedule,
    /// Chunks of layers that each stage has; more than 1 with [`PipelineSchedule::Interleaved1F1B`] and only there.
    pub virtual_stages: usize,
    /// ZeRO-3: gather a stage's parameters once a step (`true`), or for each micro-batch. `None` is `auto`: once a step where
    /// `stage3_max_live_parameters` allows it.
    #[serde(serialize_with = "crate::yaml_out::auto")]
    pub keep_gathered: Option<bool>,
}

choice! {
    /// In what order micro-batches go through the stages.
    pub enum PipelineSchedule {
        /// Forwards and backwards in turn: a stage holds no more micro-batches than there are stages from it to the end.
        OneF1B = "1f1b",
        /// All forwards, then all backwards.
        GPipe = "gpipe",
        /// 1F1B where each stage has several chunks of layers, [`Pipeline::virtual_stages`]: less waiting, more messages.
        Interleaved1F1B = "interleaved_1f1b",
        /// 1F1B whose backwards are split in two: gradients of weights are found while a stage would wait.
        ZbH1 = "zb_h1",
    }
}

/// How layers are dealt out to the stages. Each stage gets consecutive layers.
#[derive(Debug, Clone, PartialEq)]
pub enum PartitionMethod {
    /// About as many parameters in each stage.
    Parameters,
    /// About as many layers in each stage.
    Uniform,
    /// About as much measured time in each stage.
    Time,
    /// About as many layers whose name matches in each stage.
    Type(LayerPattern),
}

impl PartitionMethod {
    /// All but the one that takes a pattern. `best` is what DeepSpeed writes for its default.
    const NAMES: [&str; 4] = ["parameters", "uniform", "time", "best"];

    /// The method that is written like this.
    ///
    /// # Errors
    /// Advice on what to write instead, where there is any.
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
