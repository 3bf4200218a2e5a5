//! Checks `data`, `data_efficiency` and `training.rampup_batch_size` against the model and the batch sizes.

use crate::config::{
    Config, Curriculum, CurriculumLearning, CurriculumMetrics, Data, DataEfficiency, DataFormat, DataSampling,
    FlopsProfiler, Llama, MixedDataset, Model, Pipeline, PipelineSchedule, RampUp, RopeScaling, Training,
};
use crate::errors::ErrorKind;
use crate::read::node::At;
use crate::read::reader::Resolver;
use crate::schema::NO_EFFECT;

impl Data {
    /// Checks `max_tokens` against the other keys that determine the micro-batches of a step.
    pub(crate) fn check_max_tokens(config: &Config, resolver: &mut Resolver<'_>) {
        let Some(data) = &config.data else { return };
        let Some(max_tokens) = data.max_tokens else { return };
        let mut refused = |key: &'static str, message: &str, help: String| {
            resolver.contradiction(&[Self::max_tokens, key], message.to_string(), Some(help));
        };
        let without = || format!("remove `{}`", Self::max_tokens);
        if data.sample_packing {
            refused(
                Self::sample_packing,
                "`max_tokens` cannot group packed samples, which all have the same length",
                "keep one of the two".into(),
            );
        }
        if config.preference.is_some() {
            refused(
                Config::preference,
                "`max_tokens` groups samples by length, which is not implemented for pairs of answers",
                without(),
            );
        }
        if config.training.rampup_batch_size.is_some() {
            let message = "a growing batch size needs micro-batches with equal numbers of samples; with `max_tokens` \
                           these numbers differ";
            refused(Training::rampup_batch_size, message, "keep one of the two".into());
        }
        if config.pipeline.stages > 1 {
            let message = "a pipeline needs micro-batches of the same shape; with `max_tokens` the shapes differ";
            refused(Pipeline::stages, message, without());
        }
        for (key, is_on) in [
            (Config::wall_clock_breakdown, config.wall_clock_breakdown),
            (Training::trace, config.training.trace),
            (FlopsProfiler::enabled, config.flops_profiler.enabled),
        ] {
            if is_on {
                let message =
                    "measurements need identical steps; with `max_tokens` the number of micro-batches per step differs";
                refused(key, message, without());
            }
        }
        let Some(length) = data.sequence_length else { return };
        let micro = config.train_micro_batch_size_per_gpu;
        let planned = micro.saturating_mul(length);
        if max_tokens < length {
            let message =
                format!("a micro-batch of at most {max_tokens} positions cannot hold a sample of {length} tokens");
            refused(Self::sequence_length, &message, format!("use {length} or more"));
        } else if max_tokens > planned {
            let message = format!(
                "micro-batches of {max_tokens} positions exceed the planned memory, which is for {micro} samples × {length} tokens = {planned} positions"
            );
            let help = format!("use {planned} or less, or increase `{}`", Config::train_micro_batch_size_per_gpu);
            refused(Config::train_micro_batch_size_per_gpu, &message, help);
        } else if max_tokens < planned && config.training.reproducible {
            let message = format!(
                "`reproducible: true` fixes the number of micro-batches per step; with at most {max_tokens} positions \
                 each, they may not hold all samples"
            );
            refused(Training::reproducible, &message, format!("set it to {planned}"));
        }
    }
}

impl DataEfficiency {
    /// Checks the keys against each other and against the data.
    pub(crate) fn check(config: &Config, resolver: &mut Resolver<'_>) {
        let Self { enabled, data_sampling, .. } = &config.data_efficiency;
        let learning = &data_sampling.curriculum_learning;
        let switches = [
            (Self::enabled, *enabled),
            (DataSampling::enabled, data_sampling.enabled),
            (CurriculumLearning::enabled, learning.enabled),
        ];
        let off = switches.iter().position(|(_, is_on)| !is_on);
        let on = switches.iter().rposition(|(_, is_on)| *is_on);
        match (off.map(|index| (index, switches[index].0)), on.map(|index| (index, switches[index].0))) {
            (None, _) => {}
            // A section with `enabled: false` also switches off the sections inside it. If the outer section has no key
            // `enabled`, the user probably meant it to be on, so this is an error.
            (Some((outside, outer)), Some((inside, inner))) if inside > outside => {
                if resolver.at(outer) == At::Default {
                    let message = format!("`{inner}: true` has no effect without `{outer}: true`");
                    resolver.contradiction(&[inner], message, Some(format!("set `{outer}: true`")));
                }
                return;
            }
            (Some((_, inner)), outer) => {
                if let Some((_, outer)) = outer {
                    resolver.warn(outer, format!("`{outer}` {NO_EFFECT}: `{inner}` is not true"));
                }
                return;
            }
        }
        match config.data_efficiency.curriculum() {
            Some(curriculum) => {
                curriculum.check(resolver);
                curriculum.fits(config, resolver);
            }
            None => {
                let key = CurriculumMetrics::seqlen;
                if !resolver.report.is_poisoned(key) && !resolver.has_section(key) {
                    let (at, message) = (resolver.at(CurriculumLearning::enabled), format!("`{key}` is missing"));
                    let help = "add the section with min_difficulty, max_difficulty, schedule_type and schedule_config"
                        .to_string();
                    resolver.report.error(ErrorKind::Missing, key, at, message, Some(help));
                }
            }
        }
    }
}

impl Curriculum {
    /// Checks that the samples are sequences that can be truncated to these lengths.
    fn fits(&self, config: &Config, resolver: &mut Resolver<'_>) {
        let mut refused = |key: &'static str, message: &str, help: &str| {
            resolver.contradiction(&[Self::max_difficulty, key], message.to_string(), Some(help.to_string()));
        };
        let leave = "remove the `data_efficiency` section";
        if matches!(config.model, Some(Model::Mlp(_))) {
            return refused(
                Model::TYPE,
                "a curriculum truncates sequences, but an mlp trains on rows, which have no length",
                leave,
            );
        }
        if config.preference.is_some() {
            return refused(
                Config::preference,
                "a curriculum truncates samples, but a pair of answers cannot be truncated",
                leave,
            );
        }
        let Some(data) = &config.data else { return };
        let formats = MixedDataset::formats(data.datasets.as_ref(), data.format);
        if formats.contains(&DataFormat::Chat) {
            let message =
                "a curriculum truncates samples, but a conversation cannot be truncated: its answers come last";
            return refused(Data::format, message, leave);
        }
        if formats.contains(&DataFormat::Csv) {
            return refused(
                Data::format,
                "a curriculum truncates sequences, but rows of a table have no length",
                leave,
            );
        }
        let (length, key) = match (data.sequence_length, resolver.facts.longest) {
            (Some(length), _) => (length, Data::sequence_length),
            (None, Some(length)) => (length, Config::model),
            (None, None) => return,
        };
        let max = self.max_difficulty;
        if max > length {
            let message = format!("`max_difficulty` is {max}, but a sample has {length} tokens");
            let help = Some(format!("use {length}, or increase `{}`", Data::sequence_length));
            resolver.contradiction(&[Self::max_difficulty, key], message, help);
        }
    }
}

impl Llama {
    /// Rejects samples with several sequences if LongRoPE's angles would depend on the length of each sequence. With
    /// `has_pairs`, each sample has two sequences.
    pub(crate) fn check_rows(&self, data: &Data, has_pairs: bool, resolver: &mut Resolver<'_>) {
        let Some(RopeScaling::LongRope { original_max_position_embeddings: original, .. }) = &self.rope_scaling else {
            return;
        };
        let length = data.sequence_length.unwrap_or(self.max_position_embeddings);
        let rows = [(data.sample_packing, Data::sample_packing), (data.max_tokens.is_some(), Data::max_tokens)];
        for (_, key) in rows.into_iter().filter(|(is_on, _)| *is_on && length > *original) {
            let message = format!(
                "samples of {length} tokens are too long: above {original} tokens, the angles of `rope_type: \
                 longrope` depend on the length of each conversation"
            );
            let help = format!("set `{}: {original}` or less, or remove `{key}`", Data::sequence_length);
            resolver.contradiction(&[key, Self::rope_scaling], message, Some(help));
        }
        if has_pairs && 2 * length > *original {
            let message = format!(
                "two answers of {length} tokens in a sample are too long: above {original} tokens, the angles of \
                 `rope_type: longrope` depend on the length of each answer"
            );
            let help = format!("set `{}: {}` or less", Data::sequence_length, original / 2);
            resolver.contradiction(&[Config::preference, Self::rope_scaling], message, Some(help));
        }
    }
}

impl RampUp {
    /// Checks the section against the batch size.
    pub(crate) fn check(&self, config: &Config, resolver: &mut Resolver<'_>) {
        let (full, micro) = (config.train_batch_size, config.train_micro_batch_size_per_gpu);
        let is_interleaved = config.pipeline.schedule == PipelineSchedule::Interleaved;
        let groups = if is_interleaved { config.pipeline.stages } else { 1 };
        let unit = full / config.gradient_accumulation_steps.max(1) * groups;
        if config.training.trace {
            let message = "a trace needs steps of equal size, so the batch size must not grow".to_string();
            let help = Some("remove `trace` or `rampup_batch_size`".to_string());
            resolver.contradiction(&[Training::rampup_batch_size, Training::trace], message, help);
        }
        if self.start >= full || !(full - self.start).is_multiple_of(self.increment) {
            let message = format!(
                "a batch size that starts at {} cannot reach `{}` {full} in increments of {}",
                self.start,
                Config::train_batch_size,
                self.increment
            );
            resolver.contradiction(&[Self::start, Self::increment, Config::train_batch_size], message, None);
        } else if let Some((key, count)) = [(Self::start, self.start), (Self::increment, self.increment)]
            .into_iter()
            .find(|(_, n)| !n.is_multiple_of(unit))
        {
            let what = if is_interleaved { "one micro-batch per stage" } else { "one micro-batch" };
            let message = format!(
                "{count} samples are not a multiple of {unit}, the number of samples in {what} on every replica"
            );
            let help =
                Some(format!("use a multiple of {unit}, or a smaller `{}`", Config::train_micro_batch_size_per_gpu));
            resolver.contradiction(&[key, Config::train_micro_batch_size_per_gpu], message, help);
        } else if config.training.reproducible
            && let Some(size) =
                (self.start..=full).step_by(self.increment).find(|size| !(size / micro).is_power_of_two())
        {
            let message = format!(
                "with `reproducible: true`, the number of micro-batches per step must be a power of two, but a step \
                 of {size} samples has {}",
                size / micro
            );
            let help = Some(format!("set `start` and `increment` to half of `{}`", Config::train_batch_size));
            resolver.contradiction(&[Training::reproducible, Self::increment], message, help);
        }
    }
}
