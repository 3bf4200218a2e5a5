//! Checks the schema for consistency, and compares it with resolved configurations.

use std::collections::BTreeSet;

use super::*;
use crate::Config;
use crate::read::reader::default;
use crate::value::Leaf;

fn all() -> Vec<(String, &'static Key)> {
    let mut all = Vec::new();
    walk("", Config::SECTION.keys, &mut |path, key| all.push((path.to_string(), key)));
    all
}

/// Returns whether a key's section is implemented. A `Now` key in any other section is never read.
fn is_live(path: &str, all: &[(String, &'static Key)]) -> bool {
    let dead = |(section, key): &&(String, &Key)| {
        key.status != Status::Now && path.len() > section.len() && path.starts_with(&format!("{section}."))
    };
    !all.iter().any(|entry| dead(&entry))
}

#[test]
fn every_key_is_unique_and_has_a_description() {
    let mut seen = BTreeSet::new();
    for (path, key) in all() {
        assert!(seen.insert(path.clone()), "{path} appears twice");
        assert!(!key.meaning.is_empty() && !key.meaning.ends_with('.'), "{path}");
    }
}

#[test]
fn every_default_is_a_valid_value() {
    for (path, key) in all() {
        let computed = key.default.starts_with('=') || key.default == REQUIRED || key.default == "null";
        if key.status == Status::Now && !matches!(key.kind, Kind::Section(_) | Kind::Variants(_)) {
            assert_eq!(default(key) == Leaf::Null, computed, "{path}: {}", key.default);
        }
        if let (Kind::Choice { names, .. }, false) = (key.kind, computed) {
            assert!(names.contains(&key.default), "{path}: {}", key.default);
        }
    }
}

#[test]
fn every_alias_refers_to_a_key_of_the_same_section() {
    let all = all();
    for (path, alias) in all.iter().filter(|(_, key)| key.status == Status::Alias) {
        let beside = join(path.rsplit_once('.').map_or("", |(section, _)| section), alias.meaning);
        assert!(all.iter().any(|(path, key)| *path == beside && key.status != Status::Alias), "{path}");
    }
}

/// Returns one configuration for each variant of each section.
fn one_of_each() -> Vec<Config> {
    let optimizers = [
        "AdamW",
        "Adam",
        "SGD",
        "Lion",
        "Adagrad",
        "RMSprop",
        "NAdam",
        "RAdam",
        "Muon",
        "Lamb",
        "Adafactor",
        "AdamWScheduleFree",
        "MuAdam",
        "MuAdamW",
        "MuSGD",
        "Custom",
    ];
    let schedulers = [
        "{type: Constant}",
        "{type: WarmupLR}",
        "{type: WarmupDecayLR, params: {total_num_steps: 9}}",
        "{type: WarmupCosineLR, params: {total_num_steps: 9}}",
        "{type: LRRangeTest}",
        "{type: OneCycle, params: {cycle_min_lr: 0.1, cycle_max_lr: 0.2}}",
        "{type: constant_with_warmup}",
        "{type: linear}",
        "{type: cosine}",
        "{type: cosine_with_restarts}",
        "{type: cosine_with_min_lr, params: {min_lr_rate: 0.1}}",
        "{type: cosine_warmup_with_min_lr, params: {min_lr: 0.0001}}",
        "{type: polynomial}",
        "{type: inverse_sqrt}",
        "{type: warmup_stable_decay, params: {num_decay_steps: 9}}",
    ];
    let models = [
        "{type: gpt2}",
        "{type: llama, rope_scaling: {rope_type: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4, original_max_position_embeddings: 64}}",
        "{type: mlp, input_size: 1, output_size: 1}",
        "{type: llama, head_dim: 2, rope_scaling: {rope_type: longrope, short_factor: [1], long_factor: [2], original_max_position_embeddings: 64, attention_factor: 1}}",
    ];
    (0..schedulers.len().max(optimizers.len()))
        .map(|index| {
            let text = format!(
                "train_batch_size: 4\ntrain_micro_batch_size_per_gpu: 1\nadapter: {{}}\nquantization_config: {{load_in_4bit: true}}\noptimizer: {{type: {}}}\nscheduler: {}\nmodel: {}\ndata: {{{}, eval: b, format: chat, tokenizer: c}}\n\
                 training: {{eval_every: 1, early_stopping: {{patience: 1}}, keep_best: {{}}, spikes: {{window: 8}}, ema: {{}}, gradient_noise_scale: {{}}, rampup_batch_size: {{start: 2, increment: 1, samples: 9}}{}}}\n\
                 activation_checkpointing: {{}}\nautotuning: {{sweep: {{space: {{optimizer.type: [SGD]}}}}}}\n\
                 data_efficiency: {{data_sampling: {{curriculum_learning: {{curriculum_metrics: {{seqlen: {{min_difficulty: 1, max_difficulty: 2, schedule_type: fixed_linear, schedule_config: {{}}}}}}}}}}}}\n",
                optimizers[index % optimizers.len()],
                schedulers[index % schedulers.len()],
                models[index % 4],
                if index % 4 == 3 { "datasets: [{path: a}]" } else { "train: a" },
                if index % 4 == 2 { "" } else { ", sample: {prompt: a}" },
            );
            // µP does not work with adapters.
            let text = match text.contains("type: Mu") && !text.contains("type: Muon") {
                true => text.replace("adapter: {}", "mup: {base: {}}"),
                false => text,
            };
            // `preference` needs answers, which the MLP lacks. LongRoPE's original length is too short for two answers.
            let text = if index % 4 < 2 { text + "preference: {}\n" } else { text };
            // A schedule-free optimizer averages the weights itself.
            let text = if text.contains("ScheduleFree") { text.replace("ema: {}, ", "") } else { text };
            Config::parse("each", text).unwrap_or_else(|errors| panic!("{errors}"))
        })
        .chain([of_replicates_alone()])
        .collect()
}

/// Returns a configuration with local steps, which exclude averages, spikes and the noise scale.
fn of_replicates_alone() -> Config {
    let text = "train_batch_size: 2\nmodel: {type: gpt2}\nmesh: {data_parallel_replicate_degree: 2}\n\
                training: {local_steps: {steps: 5}}";
    Config::with_world_size("each", text, 2).unwrap_or_else(|errors| panic!("{errors}"))
}

#[test]
fn resolved_keys_are_exactly_the_implemented_keys() {
    let mut resolved = BTreeSet::new();
    for config in one_of_each() {
        // The keys below a search space are paths of other keys, so only the part up to `.space` counts.
        let without_dimension =
            |path: String| path.split_inclusive(".space").next().map(String::from).unwrap_or_default();
        resolved.extend(config.leaves().into_iter().map(|(path, _)| without_dimension(path)));
    }
    let all = all();
    let without_variant = |path: &str| match (path.find('['), path.find(']')) {
        (Some(open), Some(close)) => format!("{}{}", &path[..open], &path[close + 1..]),
        _ => path.to_string(),
    };
    let live = all.iter().filter(|(path, key)| {
        let leaf = !matches!(key.kind, Kind::Section(_) | Kind::Variants(_));
        leaf && key.status == Status::Now && is_live(path, &all)
    });
    let mut table: BTreeSet<String> = live.map(|(path, _)| without_variant(path)).collect();
    for section in ["optimizer", "scheduler", "model"] {
        table.insert(format!("{section}.type"));
    }
    // A section that is absent resolves to a single null.
    let absent = |path: &String| !all.iter().any(|(other, key)| other == path && matches!(key.kind, Kind::Section(_)));
    let resolved: BTreeSet<String> = resolved.into_iter().filter(absent).collect();
    assert_eq!(resolved, table);
}

#[test]
fn defaults_of_keys_without_effect_are_accepted_without_warning() {
    for key in Config::SECTION.keys.iter().filter(|key| !matches!(key.status, Status::Removed | Status::Alias)) {
        let sections: Vec<(&str, &'static [Key])> = match key.kind {
            Kind::Section(section) => vec![(key.name, section.keys)],
            Kind::Variants(_) => vec![],
            _ => vec![("", std::slice::from_ref(key))],
        };
        for (section, keys) in sections {
            for key in keys.iter().filter(|key| !matches!(key.status, Status::Removed | Status::Now)) {
                if key.default.starts_with('=') || matches!(key.kind, Kind::Section(_)) {
                    continue;
                }
                let written = format!("{}: {}", key.name, key.default);
                let text = match section {
                    "" => format!("train_batch_size: 1\n{written}"),
                    section => format!("train_batch_size: 1\n{section}: {{{written}}}"),
                };
                let config = Config::parse("off", text.as_str()).unwrap_or_else(|errors| panic!("{text}\n{errors}"));
                assert_eq!(config.warnings, [], "{text}");
            }
        }
    }
}

#[test]
fn the_reference_has_a_row_for_every_key() {
    let reference = crate::pages::reference::reference();
    for (path, key) in all() {
        assert!(reference.contains(&format!("| `{}` | ", key.name)), "{path}");
    }
    let columns = |line: &&str| line.replace("\\|", "").matches('|').count();
    let rows = reference.lines().filter(|line| line.starts_with('|'));
    assert!(rows.clone().count() > 400 && rows.clone().all(|line| matches!(columns(&line), 3 | 4 | 6)));
}
