//! Resolves the presets in this folder and compares them with golden files, so that a changed default shows in
//! review. `UPDATE_GOLDEN=1 cargo test -p zero-config` rewrites the golden files.

use std::fs;
use std::path::{Path, PathBuf};

use zero_config::{Config, Origin, Scheduler, Source, Tokenizer, WarmupDecayLr, load};

const PRESETS: [&str; 6] = [
    "quickstart.yaml",
    "gpt2-124m.yaml",
    "llama-tiny.yaml",
    "finetune-lora.yaml",
    "finetune-qlora.yaml",
    "ds_config.json",
];

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn preset(name: &str) -> Config {
    let text = fs::read_to_string(folder().join(name)).expect("the preset is there");
    let text = text.replace("pretrained: DIR", "pretrained: tests/pretrained");
    // The path is relative to the repository, so that the golden file is the same in every checkout.
    match Config::parse(format!("configs/{name}"), text) {
        Ok(config) => config,
        Err(errors) => panic!("{errors}"),
    }
}

fn compare_with_golden(path: &Path, text: &str) {
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(path, text).expect("the golden file can be written");
    }
    let golden = fs::read_to_string(path).unwrap_or_default();
    assert!(golden == text, "{} has changed; if that is meant, run the test with UPDATE_GOLDEN=1", path.display());
}

#[test]
fn every_preset_resolves_as_its_golden_file_says() {
    for name in PRESETS {
        let stem = name.split('.').next().expect("a name");
        compare_with_golden(
            &folder().join("golden").join(format!("{stem}.yaml")),
            &preset(name).to_yaml_with_origins(),
        );
    }
}

#[test]
fn every_preset_of_the_folder_is_tested() {
    for entry in fs::read_dir(folder()).expect("the folder") {
        let name = entry.expect("an entry").file_name().into_string().expect("a name");
        if name.ends_with(".yaml") || name.ends_with(".json") {
            assert!(PRESETS.contains(&name.as_str()), "{name}");
        }
    }
}

#[test]
fn a_resolved_configuration_can_be_used_again() {
    for name in PRESETS {
        let config = preset(name);
        for text in [config.to_yaml(), config.to_yaml_with_origins()] {
            let again =
                Config::parse("resolved.yaml", text.as_str()).unwrap_or_else(|errors| panic!("{errors}\n{text}"));
            assert_eq!(again, config, "{name}");
            assert_eq!(again.to_yaml(), config.to_yaml(), "{name}");
            assert_eq!(again.warnings, [], "{name}");
        }
    }
}

#[test]
fn a_resolved_configuration_keeps_the_number_of_ranks_that_were_started() {
    let source = Source::from_path(folder().join("quickstart.yaml")).expect("the preset");
    let config = load(source, &[]).and_then(|typed| typed.resolve(Some(4))).expect("four ranks");
    assert_eq!((config.world_size, config.launcher.num_processes, config.train_batch_size), (4, 4, 16));
    assert_eq!(config.origins.get("launcher.num_processes"), Origin::Launch);
    let again = Config::parse("resolved.yaml", config.to_yaml()).expect("the output is valid");
    assert_eq!(again, config);
}

#[test]
fn a_configuration_of_hugging_face_is_accepted_unchanged() {
    let config = preset("ds_config.json");
    assert_eq!(config.train_batch_size, 2 * 4 * 2);
    assert_eq!(config.optimizer.lr(), 1e-3);
    assert_eq!(config.origins.get("optimizer.params.betas"), Origin::Auto);
    // As in Hugging Face's Trainer, the maximum learning rate is the optimizer's.
    assert!(
        matches!(config.scheduler, Scheduler::WarmupDecayLR(WarmupDecayLr { warmup_max_lr: 1e-3, .. })),
        "{:?}",
        config.scheduler
    );
    assert_eq!(config.origins.get("train_batch_size"), Origin::Auto);
    assert_eq!(config.origins.get("zero_optimization.stage"), Origin::Line(38));
    assert_eq!(config.zero.stage3_param_persistence_threshold, 10 * 192);
    assert_eq!(config.zero.stage3_prefetch_bucket_size, 192 * 192 * 9 / 10);
    assert_eq!(config.zero.reduce_bucket_size, None);
    assert!(!config.bf16.enabled);
    let paths: Vec<_> = config.warnings.iter().map(|warning| warning.place.path.as_str()).collect();
    assert_eq!(paths, ["zero_optimization.stage3_gather_16bit_weights_on_model_save"]);
}

#[test]
fn the_quickstart_matches_its_comments() {
    let config = preset("quickstart.yaml");
    assert_eq!(config.train_batch_size, 8);
    assert_eq!(config.zero.stage3_param_persistence_threshold, 0);
    let data = config.data.expect("data");
    assert!(matches!(data.tokenizer, Tokenizer::File(_)), "{:?}", data.tokenizer);
    assert_eq!(data.sequence_length, Some(128));
}
