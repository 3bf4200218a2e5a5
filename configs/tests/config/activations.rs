//! `activation_checkpointing`: the section's presence turns it on. Also tests intervals, layer patterns and devices.

use std::path::Path;

use zero_config::{
    ActivationCheckpointing, CheckpointSpacing, Config, Error, ErrorKind, Errors, LayerPattern, OffloadDevice, Origin,
    Spot,
};

use crate::texts::{only_error, overridden, round_trip};

const HEAD: &str = "train_micro_batch_size_per_gpu: 1\n";

fn with(text: &str) -> Config {
    round_trip(&format!("{HEAD}{text}"))
}

/// Returns the resolved section with these keys.
fn section(inside: &str) -> Option<ActivationCheckpointing> {
    with(&format!("activation_checkpointing: {{{inside}}}")).activation_checkpointing
}

fn parse(inside: &str) -> Result<Config, Errors> {
    Config::parse("ds.yaml", format!("{HEAD}activation_checkpointing:\n  {{{inside}}}"))
}

fn only(inside: &str) -> Error {
    only_error(parse(inside))
}

/// Returns the keys of an error, without their section.
fn names(error: &Error) -> Vec<&str> {
    error.places.iter().filter_map(|place| place.path.strip_prefix("activation_checkpointing.")).collect()
}

#[test]
fn the_section_alone_enables_checkpointing() {
    let expected = ActivationCheckpointing {
        spacing: CheckpointSpacing::Interval(1),
        layers: None,
        device: OffloadDevice::None,
        nvme_path: None,
    };
    for inside in [
        "",
        "enabled: true",
        "enabled: auto",
        "interval: 1",
        "number_checkpoints: null, device: none, layers: auto",
        // A section that is common in DeepSpeed configurations.
        "partition_activations: false, cpu_checkpointing: false, contiguous_memory_optimization: false, \
         number_checkpoints: null, synchronize_checkpoint_boundary: false, profile: false",
    ] {
        let config = with(&format!("activation_checkpointing: {{{inside}}}"));
        assert_eq!((config.activation_checkpointing.as_ref(), config.warnings.len()), (Some(&expected), 0), "{inside}");
    }
}

#[test]
fn checkpointing_is_off_if_absent_or_disabled() {
    for text in ["", "activation_checkpointing: null", "activation_checkpointing: false"] {
        assert_eq!(with(text).activation_checkpointing, None, "{text}");
    }
    // In a section that is off, contradictions and unimplemented features are accepted. Invalid values and keys are
    // not.
    for inside in ["interval: 2, number_checkpoints: 3", "partition_activations: true", "device: nvme"] {
        assert_eq!(section(&format!("enabled: false, {inside}")), None);
    }
    assert_eq!(only("enabled: false, interval: 0").kind, ErrorKind::Value);
    assert_eq!(only("enabled: false, intervall: 1").kind, ErrorKind::UnknownKey);
    assert!(with("").to_yaml().contains("\nactivation_checkpointing: null\n"));
}

#[test]
fn checkpoints_are_kept_by_interval_or_by_number() {
    let spacing = |inside: &str| section(inside).map(|section| section.spacing);
    assert_eq!(spacing("interval: 3"), Some(CheckpointSpacing::Interval(3)));
    assert_eq!(spacing("number_checkpoints: 4"), Some(CheckpointSpacing::Number(4)));
    assert_eq!(spacing("number_checkpoints: 4, interval: auto"), Some(CheckpointSpacing::Number(4)));
    let error = only("number_checkpoints: 4, interval: 1");
    assert_eq!((error.kind, names(&error)), (ErrorKind::Contradiction, vec!["interval", "number_checkpoints"]));
    for inside in ["interval: 0", "number_checkpoints: 0", "interval: -1", "interval: 1.5", "number_checkpoints: all"] {
        assert_eq!(only(inside).kind, ErrorKind::Value, "{inside}");
    }
}

#[test]
fn layers_are_chosen_by_name() {
    let layers =
        section("layers: ['^h[.]\\d+$', mlp, \"é \\\"#\"]").and_then(|section| section.layers).expect("layers are set");
    assert_eq!(layers.iter().map(LayerPattern::as_str).collect::<Vec<_>>(), ["^h[.]\\d+$", "mlp", "é \"#"]);
    let chosen = |name: &str| layers.iter().any(|layer| layer.matches(name));
    assert_eq!(["h.0", "H.11", "wte", "h.x", "block.MLP"].map(chosen), [true, true, false, false, true]);
}

#[test]
fn each_invalid_layer_pattern_is_located() {
    let errors = parse("layers: [h, 'a(', 5, '', \"b**\"]").expect_err("four patterns are invalid");
    let found: Vec<_> = errors
        .iter()
        .map(|error| match error.places[0].spot {
            Spot::File { line, column, .. } => (line, column, error.help.as_deref().unwrap_or_default()),
            _ => (0, 0, ""),
        })
        .collect();
    let expected = [
        (3, 16, "the regular expression is invalid: unclosed group"),
        (3, 22, "put it in quotes if it is a string"),
        (3, 25, "the regular expression is empty and would match every name"),
    ];
    assert_eq!(found, expected, "{errors}");
    let many = format!("layers: [{}]", "'\\pL{300}', ".repeat(101));
    for inside in ["layers: []", "layers: h", "layers: {h: 1}", many.as_str()] {
        let error = only(inside);
        assert_eq!((error.kind, names(&error)), (ErrorKind::Value, vec!["layers"]));
        assert!(error.message.contains("expected a list of 1 to 100 regular expressions"), "{error}");
    }
}

#[test]
fn checkpoints_are_kept_on_the_host_or_on_disk() {
    let device = |inside: &str| section(inside).map(|section| section.device);
    for inside in ["cpu_checkpointing: true", "device: cpu", "cpu_checkpointing: true, device: cpu"] {
        assert_eq!(device(inside), Some(OffloadDevice::Cpu), "{inside}");
    }
    for inside in ["cpu_checkpointing: false", "cpu_checkpointing: false, device: none", "device: auto"] {
        assert_eq!(device(inside), Some(OffloadDevice::None), "{inside}");
    }
    let files = section("device: nvme, nvme_path: /mnt/nvme, cpu_checkpointing: false").expect("the section is on");
    assert_eq!((files.device, files.nvme_path.as_deref()), (OffloadDevice::Nvme, Some(Path::new("/mnt/nvme"))));
    for inside in [
        "cpu_checkpointing: true, device: none",
        "cpu_checkpointing: true, device: nvme, nvme_path: /x",
        "cpu_checkpointing: false, device: cpu",
    ] {
        let error = only(inside);
        assert_eq!((error.kind, names(&error)), (ErrorKind::Contradiction, vec!["cpu_checkpointing", "device"]));
    }
    let error = only("device: nvme");
    assert_eq!((error.kind, names(&error)), (ErrorKind::Missing, vec!["nvme_path"]));
    assert_eq!(only("device: nvme, nvme_pth: /x").kind, ErrorKind::UnknownKey);
    assert_eq!(only("device: disk").kind, ErrorKind::Value);
}

#[test]
fn unsupported_keys_give_a_reason() {
    let config = with(
        "activation_checkpointing: {partition_activations: true, contiguous_memory_optimization: true, \
         synchronize_checkpoint_boundary: true, profile: true}",
    );
    assert_eq!(config.warnings.len(), 4);
    let told = &config.warnings[0].message;
    assert!(
        told.ends_with(
            "has no effect: between layers, tensor-parallel ranks always hold only slices of the activations"
        ),
        "{told}"
    );
}

#[test]
fn overrides_enable_and_disable_checkpointing() {
    let resolve = |text: &str, set: &str| {
        overridden(&format!("{HEAD}{text}"), &[set]).unwrap_or_else(|errors| panic!("{errors}"))
    };
    let config = resolve("", "activation_checkpointing.interval=2");
    let spacing = config.activation_checkpointing.map(|section| section.spacing);
    assert_eq!(spacing, Some(CheckpointSpacing::Interval(2)));
    assert_eq!(config.origins.get("activation_checkpointing.interval"), Origin::Set);
    assert!(resolve("", "activation_checkpointing={}").activation_checkpointing.is_some());
    let on = "activation_checkpointing: {interval: 2}";
    for set in ["activation_checkpointing=", "activation_checkpointing.enabled=false"] {
        assert_eq!(resolve(on, set).activation_checkpointing, None, "{set}");
    }
}
