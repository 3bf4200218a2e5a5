//! Compares the registry of DeepSpeed's keys with the schema and with resolved configurations.

use std::collections::BTreeSet;

use super::*;
use crate::errors::ErrorKind;
use crate::schema::{Switch, walk};

/// Keys that this project adds to DeepSpeed's sections.
const OWN: [&str; 17] = [
    "bf16.stochastic_rounding",
    "activation_checkpointing.device",
    "activation_checkpointing.enabled",
    "activation_checkpointing.interval",
    "activation_checkpointing.layers",
    "activation_checkpointing.nvme_path",
    "autotuning.budget_seconds",
    "autotuning.repeats",
    "autotuning.space",
    "autotuning.trial_timeout_seconds",
    "gradient_clipping_value",
    "pipeline.keep_gathered",
    "pipeline.partition_method",
    "pipeline.schedule",
    "pipeline.virtual_stages",
    "zero_optimization.cpu_offload_params",
    "autotuning.sweep",
];

fn each(mut visit: impl FnMut(&Group, &Key)) {
    GROUPS.iter().for_each(|group| group.keys.iter().for_each(|key| visit(group, key)));
}

/// Runs a check on every key and reports all failures together.
fn check_every_key(mut wrong: impl FnMut(&str, &Group, &Key) -> Option<String>) {
    let mut all = Vec::new();
    each(|group, key| {
        let path = path(group, key);
        all.extend(wrong(&path, group, key).map(|text| format!("{path} ({}): {text}", key.name)));
    });
    assert!(all.is_empty(), "{}", all.join("\n"));
}

fn leaves(group: &Group, key: &Key, value: Option<&str>) -> Vec<(String, String)> {
    tried(group, key, value).map(|config| config.leaves()).unwrap_or_default()
}

#[test]
fn every_deepspeed_key_is_known_and_every_rejection_has_help() {
    check_every_key(|_, group, key| {
        let errors = tried(group, key, Some(key.example)).err()?;
        let known = |kind| matches!(kind, ErrorKind::NotImplemented | ErrorKind::Rejected | ErrorKind::Contradiction);
        let has_help = |error: &crate::Error| known(error.kind) && error.help.is_some();
        let is_right = errors.iter().all(has_help);
        (!is_right).then(|| errors.to_string())
    });
}

#[test]
fn the_result_for_each_key_matches_its_status_in_the_schema() {
    check_every_key(|path, group, key| {
        let fate = fate(group, key);
        let is_refused = matches!(fate, Fate::Refused(_));
        // Keys of an unimplemented section or type are skipped: the program rejects the configuration even without
        // the key.
        let is_refused_without = tried(group, key, None).is_err();
        let is_right = match in_schema(path, group).map(|key| key.status) {
            _ if is_refused_without || key.name.starts_with("type: ") => return None,
            Some(Status::Now) => matches!(fate, Fate::Works | Fate::Differs(_)),
            Some(Status::Ignored) => matches!(fate, Fate::Ignored(_)),
            Some(Status::Later { .. } | Status::Rejected { .. } | Status::Removed) => is_refused,
            Some(Status::Old { .. }) => matches!(fate, Fate::Differs(_) | Fate::Ignored(_)),
            Some(Status::Alias) | None => false,
        };
        (!is_right).then(|| format!("{fate:?}"))
    });
}

#[test]
fn implemented_keys_change_the_resolved_configuration() {
    let mut live = 0;
    check_every_key(|_, group, key| {
        matches!(fate(group, key), Fate::Works | Fate::Differs(_)).then_some(())?;
        live += 1;
        // An optimizer type without parameters equals the default.
        let is_default = ["type: AdamW", "type: Adam"].contains(&key.name);
        let changes = leaves(group, key, Some(key.example)) != leaves(group, key, None);
        (!is_default && !changes).then(|| "without effect".to_string())
    });
    assert!(live > 90, "{live}");
}

#[test]
fn ignored_keys_do_not_change_the_resolved_configuration() {
    let mut ignored = 0;
    check_every_key(|_, group, key| {
        let Fate::Ignored(warning) = fate(group, key) else { return None };
        ignored += 1;
        (leaves(group, key, Some(key.example)) != leaves(group, key, None)).then_some(warning)
    });
    assert!(ignored > 20, "{ignored}");
}

#[test]
fn deepspeeds_defaults_of_accepted_keys_are_accepted() {
    check_every_key(|path, group, key| {
        let is_value = !key.default.is_empty() && key.default != "null";
        // Keys that the group enables for the trial are off by default.
        let is_switch = group.with.iter().any(|with| with.starts_with(&format!("{path}=")));
        let is_live = !matches!(fate(group, key), Fate::Refused(_));
        let removed = in_schema(path, group).is_none_or(|key| key.status == Status::Removed);
        (is_value && !is_switch && is_live && !removed).then_some(())?;
        tried(group, key, Some(&key.default)).err().map(|errors| errors.to_string())
    });
}

#[test]
fn unimplemented_features_are_accepted_if_they_are_off() {
    let mut off = 0;
    check_every_key(|path, group, key| {
        let status = in_schema(path, group)?.status;
        let is_value = !key.default.is_empty() && !key.name.starts_with("type: ");
        (is_value && matches!(status, Status::Later { .. } | Status::Rejected { .. })).then_some(())?;
        // Drop the group's overrides, so that the whole section is off in this test.
        let (mut group, mut key) = (group.clone(), key.clone());
        if !["optimizer.", "scheduler."].iter().any(|section| path.starts_with(section)) {
            (group.with, key.with) = (vec![], vec![]);
        }
        off += 1;
        // Skip types that are not implemented, and sections that are on as soon as they are present.
        let inside = path.rsplit_once('.').and_then(|(section, _)| in_schema(section, &group));
        let by_presence = inside.is_some_and(|section| match section.kind {
            Kind::Section(section) => matches!(section.switch, Switch::Presence),
            _ => false,
        });
        if by_presence || tried(&group, &key, None).is_err() {
            return None;
        }
        tried(&group, &key, Some(&key.default)).err().map(|errors| errors.to_string())
    });
    assert!(off > 100, "{off}");
}

#[test]
fn every_key_of_the_schema_is_deepspeeds_or_ours() {
    let mut listed: BTreeSet<String> = BTreeSet::new();
    each(|group, key| {
        listed.insert(path(group, key));
    });
    let mut all = Vec::new();
    walk("", Config::SECTION.keys, &mut |path, key| {
        let top = path.split(['.', '[']).next().unwrap_or(path);
        let plain = match (path.find('['), path.find(']')) {
            (Some(open), Some(close)) => format!("{}{}", &path[..open], &path[close + 1..]),
            _ => path.to_string(),
        };
        let is_section = matches!(key.kind, Kind::Section(_) | Kind::Variants(_));
        let own = [
            "model",
            "mesh",
            "mup",
            "adapter",
            "quantization_config",
            "preference",
            "data",
            "training",
            "launcher",
            "mlflow",
            "prometheus",
            "machine_monitor",
        ]
        .contains(&top)
            || OWN.contains(&path)
            // The other keys that this project adds are parameters of bitsandbytes, of optimizers that DeepSpeed takes
            // from PyTorch by name, and of transformers' schedules, whose names are in lower case.
            || ["optim_bits", "min_8bit_size"].iter().any(|name| path.ends_with(&format!("].{name}")))
            || ["matrices", "ns_steps"].iter().any(|name| path == format!("optimizer.params[Muon].{name}"))
            || ["RMSprop", "NAdam", "RAdam", "Adafactor", "AdamWScheduleFree", "MuAdam", "MuAdamW"]
                .iter()
                .any(|name| path.starts_with(&format!("optimizer.params[{name}]")))
            || path.strip_prefix("scheduler.params[").is_some_and(|rest| rest.starts_with(char::is_lowercase));
        // Aliases of listed keys need no entry.
        if key.status != Status::Alias
            && !is_section
            && !own
            && !path.starts_with("autotuning.sweep.")
            && !listed.contains(&plain)
        {
            all.push(path.to_string());
        }
    });
    assert!(all.is_empty(), "neither in the list of DeepSpeed's keys nor in that of ours: {all:?}");
}
