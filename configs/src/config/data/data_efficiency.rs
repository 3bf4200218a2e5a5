//! `data_efficiency`: DeepSpeed's curriculum over the sequence length.

use serde::Serialize;

use crate::choice::{Choice as _, choice};
use crate::config::inactive::{DATA_ROUTING, DYNAMIC_BATCHING};
use crate::errors::ErrorKind;
use crate::path::last;
use crate::read::reader::Resolver;
use crate::schema::*;
use crate::table::section;

section! {
    /// `data_efficiency`: which part of each sample a step trains on.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct DataEfficiency(keys) in "data_efficiency", off while enabled is ["false"] {
        pub enabled: bool = now(Kind::Bool, "false", "Enable the section");
        = ignored("seed", SIZE, "1234", "`training.seed` decides the order of the samples");
        pub data_sampling: DataSampling = section(&DataSampling::SECTION, "How samples are drawn");
        = rejected_section("data_routing", &DATA_ROUTING, "zero-train has no random layer-token drop");
    }
}

section! {
    /// `data_efficiency.data_sampling`: how samples are drawn.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct DataSampling(keys) in "data_efficiency.data_sampling", off while enabled is ["false"] {
        pub enabled: bool = now(Kind::Bool, "false", "Enable the section");
        = ignored("num_epochs", COUNT, "1000", "`training.epochs` or `training.max_steps` says how long to train");
        = ignored("num_workers", COUNT_OR_0, "0", "`training.dataloader_num_workers` is the number of threads that load samples");
        = ignored("pin_memory", Kind::Bool, "false", "the key changes how batches reach a GPU, not the results");
        pub curriculum_learning: CurriculumLearning = section(&CurriculumLearning::SECTION, "Curriculum learning: short sequences first");
        = later_section("dynamic_batching", &DYNAMIC_BATCHING, "Batches limited by the number of tokens instead of samples").instead("`data.max_tokens` limits the tokens of a micro-batch, and keeps the number of samples of a step");
    }
}

section! {
    /// `data_efficiency.data_sampling.curriculum_learning`: training on short sequences first.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct CurriculumLearning(keys) in "data_efficiency.data_sampling.curriculum_learning", off while enabled is ["false"] {
        pub enabled: bool = now(Kind::Bool, "false", "Enable the section");
        = ignored("data_cluster_path", Kind::Path, "= unset", "the order of the samples is computed, not kept in files");
        pub curriculum_metrics: CurriculumMetrics = section(&CurriculumMetrics::SECTION, "Curriculum metric; only the sequence length is supported");
    }
}

section! {
    /// `curriculum_metrics`: the quantity that the curriculum increases.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct CurriculumMetrics(keys) in "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics" {
        pub seqlen: Option<Curriculum> = section(&Curriculum::SECTION, "Tokens per sample: each sample is truncated to the length of the step");
        = alias("seqlen_truncate", CurriculumMetrics::seqlen);
    }
}

section! {
    /// `curriculum_metrics.seqlen`: the number of tokens per sample at each step.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Curriculum(keys) in "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.seqlen" {
        = ignored("index_to_sample_path", Kind::Text, "= unset", "samples are truncated, not looked up by length; with `single_cluster` DeepSpeed does not read the key either");
        = ignored("index_to_metric_path", Kind::Text, "= unset", "samples are truncated, not looked up by length; with `single_cluster` DeepSpeed does not read the key either");
        = later("difficulty_type", "value", "value: the length in tokens").instead("difficulties are lengths in tokens");
        = later("clustering_type", "single_cluster", "single_cluster: every sample is drawn and truncated to the length of the step").instead("every sample is drawn and truncated to the length of the step");
        pub min_difficulty: usize = now(COUNT, REQUIRED, "Tokens per sample at the start");
        pub max_difficulty: usize = now(COUNT, REQUIRED, "Tokens per sample at the end");
        pub schedule_type: CurriculumSchedule = now(Kind::Choice { names: CurriculumSchedule::NAMES, later: &["custom"] }, REQUIRED, "How the length grows: fixed_linear, in proportion to the step; fixed_root, in proportion to a root of the step; fixed_discrete, through a list of lengths");
        pub schedule_config: CurriculumConfig = key(Kind::Section(&CurriculumConfig::SECTION), REQUIRED, "Parameters of the schedule");
    }
}

section! {
    /// `schedule_config`: the parameters of a schedule. The parameters of other schedules are not set.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct CurriculumConfig(keys) in "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.seqlen.schedule_config" {
        pub total_curriculum_step: Option<usize> = now(COUNT, "null", "fixed_linear and fixed_root: the step at which the length reaches max_difficulty");
        pub difficulty_step: Option<usize> = now(COUNT, "null", "fixed_linear and fixed_root: lengths are multiples of this number");
        pub root_degree: Option<f64> = now(POSITIVE, "null", "fixed_root: degree of the root; 2 is the square root");
        pub difficulty: Option<Vec<usize>> = now(Kind::Ints { min: 1, max: u32::MAX as u64 }, "null", "fixed_discrete: the lengths in order");
        pub max_step: Option<Vec<usize>> = now(Kind::Ints { min: 1, max: u32::MAX as u64 }, "null", "fixed_discrete: for each length except the final one, the last step that uses it");
    }
}

choice! {
    /// How the length grows with the step.
    pub enum CurriculumSchedule {
        /// In proportion to the step.
        Linear = "fixed_linear",
        /// In proportion to a root of the step.
        Root = "fixed_root",
        /// In jumps, at given steps.
        Discrete = "fixed_discrete",
    }
}

impl DataEfficiency {
    /// Returns the curriculum, if it is on.
    pub fn curriculum(&self) -> Option<&Curriculum> {
        let sampling = &self.data_sampling;
        let is_on = self.enabled && sampling.enabled && sampling.curriculum_learning.enabled;
        sampling.curriculum_learning.curriculum_metrics.seqlen.as_ref().filter(|_| is_on)
    }
}

impl Curriculum {
    /// Checks the schedule.
    pub(crate) fn check(&self, resolver: &mut Resolver<'_>) {
        let Self { min_difficulty: min, max_difficulty: max, schedule_config: config, .. } = self;
        if min > max {
            let message = format!("`min_difficulty` {min} is more than `max_difficulty` {max}");
            resolver.contradiction(&[Self::min_difficulty, Self::max_difficulty], message, None);
        }
        use CurriculumSchedule::{Discrete, Linear, Root};
        let keys = [
            (CurriculumConfig::total_curriculum_step, config.total_curriculum_step.is_some(), &[Linear, Root][..]),
            (CurriculumConfig::difficulty_step, config.difficulty_step.is_some(), &[Linear, Root]),
            (CurriculumConfig::root_degree, config.root_degree.is_some(), &[Root]),
            (CurriculumConfig::difficulty, config.difficulty.is_some(), &[Discrete]),
            (CurriculumConfig::max_step, config.max_step.is_some(), &[Discrete]),
        ];
        for (key, is_written, schedules) in keys {
            let (name, kind) = (last(key), self.schedule_type);
            match (is_written, schedules.contains(&kind)) {
                (true, false) => {
                    let message = format!("`{name}` has no effect with `schedule_type: {kind}`");
                    let help = Some("remove it, or use another `schedule_type`".to_string());
                    resolver.contradiction(&[key, Self::schedule_type], message, help);
                }
                (false, true)
                    if !resolver.report.is_poisoned(key) && !resolver.report.is_poisoned(Self::schedule_config) =>
                {
                    let at = resolver.at(Self::schedule_config);
                    let message = format!("`{key}` is missing");
                    let help = format!("`schedule_type: {kind}` needs it");
                    resolver.report.error(ErrorKind::Missing, key, at, message, Some(help));
                }
                _ => {}
            }
        }
        let (Some(lengths), Some(steps)) = (&config.difficulty, &config.max_step) else { return };
        if steps.is_empty() || lengths.len() != steps.len() + 1 {
            let message = format!(
                "{} lengths need {} entries in `max_step`, found {}",
                lengths.len(),
                lengths.len().max(2) - 1,
                steps.len()
            );
            let help =
                "add one entry for each length except the last one, which applies after the last step in `max_step`"
                    .to_string();
            resolver.contradiction(&[CurriculumConfig::difficulty, CurriculumConfig::max_step], message, Some(help));
        } else if steps.windows(2).any(|pair| pair[0] >= pair[1]) {
            let message = format!("the steps {steps:?} do not increase");
            resolver.contradiction(&[CurriculumConfig::max_step], message, None);
        } else if let Some(length) = lengths.iter().find(|length| !(*min..=*max).contains(length)) {
            let message = format!("the length {length} is not between {min} and {max}");
            let help = Some("change the length, `min_difficulty` or `max_difficulty`".to_string());
            resolver.contradiction(&[CurriculumConfig::difficulty], message, help);
        }
    }
}
