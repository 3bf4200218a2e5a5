//! Keys and values that DeepSpeed accepts in several forms: names without the prefix `stage3_`, the value 0, older
//! forms, ignored keys.

use zero_config::{Config, Error, ErrorKind, OffloadDevice, Source, load};

use crate::texts::{only_error, overridden, valid};

const HEAD: &str = "train_micro_batch_size_per_gpu: 1\n";

fn parse(text: &str) -> Result<Config, zero_config::Errors> {
    Config::parse("ds.yaml", format!("{HEAD}{text}"))
}

fn with(text: &str) -> Config {
    valid(&format!("{HEAD}{text}"))
}

fn only(text: &str) -> Error {
    only_error(parse(text))
}

fn warnings(text: &str) -> Vec<String> {
    with(text).warnings.into_iter().map(|warning| warning.message).collect()
}

#[test]
fn unknown_keys_at_the_top_can_be_ignored_with_a_warning_that_lists_them() {
    let typed =
        |text: &str, set: &[String]| load(Source { name: "ds.json".into(), text: text.into() }, set).expect("YAML");
    let text = "comms_config: {verbose: false}\ntrain_batch_size: 8\nmonitor_config: {enabled: true}\n_comment: x\n";
    let errors = typed(text, &[]).resolve(None).expect_err("three unknown keys");
    assert_eq!(errors.count(), 3);
    let flag = |error: &Error| {
        error.help.as_ref().is_some_and(|help| help.ends_with("`--ignore-unknown-keys` turns it into a warning"))
    };
    assert!(errors.iter().all(flag), "{errors}");
    assert_eq!(typed(text, &[]).unknown_keys(), ["comms_config", "monitor_config", "_comment"]);
    let config = typed(text, &[]).ignore_unknown_keys().resolve(None).unwrap_or_else(|errors| panic!("{errors}"));
    assert_eq!(config, Config::parse("ds.json", "train_batch_size: 8").expect("the same configuration"));
    let told: Vec<String> = config.warnings.iter().map(ToString::to_string).collect();
    assert_eq!(told.len(), 1);
    assert!(
        told[0].starts_with("warning: unknown keys are ignored: `comms_config`, `monitor_config`, `_comment`\n"),
        "{told:?}"
    );
    assert!(told[0].contains("ds.json:1:1"), "{told:?}");
    assert_eq!(config.for_world_size(2).expect("resolved for 2 ranks").warnings, config.warnings);
    // Unknown keys are ignored only at the top of a file. A required key that was mistyped is still reported as
    // missing.
    for (text, set) in [
        ("train_batch_size: 8\nzero_optimization: {stagee: 3}", None),
        ("train_batch_size: 8", Some("comms_config=1")),
        ("train_batch_sizee: 8", None),
    ] {
        let set: Vec<String> = set.into_iter().map(String::from).collect();
        let errors = typed(text, &set).ignore_unknown_keys().resolve(None).expect_err(text);
        assert_eq!(errors.count(), 1, "{errors}");
    }
    let error = typed("train_batch_sizee: 8", &[]).resolve(None).expect_err("a typo").to_string();
    assert!(error.contains("did you mean `train_batch_size`? `--ignore-unknown-keys` turns"), "{error}");
}

const STAGE3: [(&str, &str); 9] = [
    ("prefetch_bucket_size", "7"),
    ("param_persistence_threshold", "7"),
    ("model_persistence_threshold", "7"),
    ("max_live_parameters", "7"),
    ("max_reuse_distance", "7"),
    ("gather_16bit_weights_on_model_save", "true"),
    ("module_granularity_threshold", "7"),
    ("use_all_reduce_for_fetch_params", "true"),
    ("allgather_sequential", "false"),
];

#[test]
fn keys_of_stage_3_do_not_need_their_prefix() {
    for (name, value) in STAGE3 {
        let [short, long] =
            ["", "stage3_"].map(|prefix| format!("zero_optimization: {{stage: 3, {prefix}{name}: {value}}}"));
        assert_eq!(with(&short), with(&long), "{name}");
        assert_eq!(warnings(&short), warnings(&long), "{name}");
        let error = only(&format!("zero_optimization:\n  {name}: {value}\n  stage3_{name}: {value}\n"));
        assert_eq!(error.kind, ErrorKind::DuplicateKey);
        let both = ["", "stage3_"].map(|prefix| format!("zero_optimization.{prefix}{name}"));
        assert_eq!(error.message, format!("`{}` and `{}` are aliases of the same key", both[0], both[1]));
        assert_eq!(error.places.iter().map(|place| place.path.as_str()).collect::<Vec<_>>(), [&both[1], &both[0]]);
    }
    // An override or a later file takes precedence under either name of the key.
    let text = format!("{HEAD}zero_optimization: {{max_live_parameters: 7}}");
    let set = ["zero_optimization.stage3_max_live_parameters=8"];
    let config = overridden(&text, &set).expect("both names are the same key");
    assert_eq!(config.zero.stage3_max_live_parameters, 8);
}

#[test]
fn sizes_may_be_zero() {
    let config = with(
        "zero_optimization: {stage: 3, reduce_bucket_size: 0, allgather_bucket_size: 0, sub_group_size: 0, \
         prefetch_bucket_size: 0, param_persistence_threshold: 0, model_persistence_threshold: 0, \
         max_live_parameters: 0, max_reuse_distance: 0, zero_hpz_partition_size: 0, \
         offload_param: {device: cpu, buffer_count: 0, buffer_size: 1e8, max_in_cpu: 0}}",
    );
    let zero = &config.zero;
    assert_eq!([zero.reduce_bucket_size, zero.allgather_bucket_size, zero.sub_group_size], [Some(0); 3]);
    let sizes = [
        zero.stage3_prefetch_bucket_size,
        zero.stage3_param_persistence_threshold,
        zero.stage3_model_persistence_threshold,
        zero.stage3_max_live_parameters,
        zero.stage3_max_reuse_distance,
        zero.offload_param.buffer_count,
    ];
    assert_eq!(sizes, [0; 6]);
    assert_eq!(Config::parse("resolved.yaml", config.to_yaml()).expect("the output is valid"), config);
    for section in ["offload_param", "offload_optimizer"] {
        let error = only(&format!(
            "zero_optimization: {{stage: 3, {section}: {{device: nvme, nvme_path: x, buffer_count: 0}}}}"
        ));
        assert_eq!(error.kind, ErrorKind::Contradiction);
        assert!(error.message.contains("leaves no memory into which"), "{error}");
    }
}

#[test]
fn older_forms_are_converted_with_a_warning() {
    let cases = [
        ("cpu_offload: true", "offload_optimizer: {device: cpu}"),
        ("cpu_offload_param: true", "offload_param: {device: cpu}"),
        ("cpu_offload_params: true", "offload_param: {device: cpu}"),
    ];
    for (old, today) in cases {
        let config = with(&format!("zero_optimization: {{stage: 3, {old}}}"));
        assert_eq!(config, with(&format!("zero_optimization: {{stage: 3, {today}}}")), "{old}");
        assert_eq!(
            warnings(&format!("zero_optimization: {{stage: 3, {old}}}")),
            [format!("`zero_optimization.{old}` is deprecated; use `{today}`")]
        );
        let (name, section) = (old.split(':').next().expect("a name"), today.split(':').next().expect("a name"));
        let off = format!("zero_optimization: {{stage: 3, {name}: false, {section}: {{device: none}}}}");
        assert_eq!(warnings(&off), [format!("`zero_optimization.{name}: false` is deprecated; remove it")]);
        // DeepSpeed also rejects the combination of both forms.
        let error = only(&format!("zero_optimization: {{stage: 3, {today}, {old}}}"));
        assert_eq!(error.kind, ErrorKind::DuplicateKey);
        assert!(
            error.message.contains(&format!("`zero_optimization.{section}` and `zero_optimization.{name}`")),
            "{error}"
        );
        let error = only(&format!("zero_optimization: {{stage: 3, {name}: cpu}}"));
        assert!(error.message.ends_with("expected true or false, found the string \"cpu\""), "{error}");
    }
    // Errors about the current form apply to the old form as well.
    let error = only("zero_optimization: {stage: 0, cpu_offload: true}");
    assert_eq!(
        (error.kind, error.places[0].path.as_str()),
        (ErrorKind::Contradiction, "zero_optimization.offload_optimizer.device")
    );
    assert_eq!(
        with("zero_optimization: {stage: 1, cpu_offload: true}").zero.offload_optimizer.device,
        OffloadDevice::Cpu
    );
    let name = "stage3_gather_fp16_weights_on_model_save";
    let told = warnings(&format!("zero_optimization: {{stage: 3, {name}: true}}"));
    assert_eq!(
        told[0],
        format!("`zero_optimization.{name}` is deprecated; use `stage3_gather_16bit_weights_on_model_save`")
    );
    assert!(told[1].starts_with("`zero_optimization.stage3_gather_16bit_weights_on_model_save` has no effect"));
}

#[test]
fn keys_without_effect_are_warnings() {
    let cases = [
        "disable_allgather: true",
        "activation_checkpointing: {partition_activations: true}",
        "zero_optimization: {elastic_checkpoint: true}",
        "zero_optimization: {cpu_offload_use_pin_memory: true}",
        "aio: {thread_count: 4}",
        "compile: {deepcompile: true}",
        "compile: {backend: inductor}",
        // Keys that need several ranks of a kind.
        "tensor_parallel: {tp_overlap_comm: true}",
        "pipeline: {schedule: zb_h1}",
    ];
    for text in cases {
        let told = warnings(text);
        assert!(told.len() == 1 && told[0].contains("has no effect: "), "{text}: {told:?}");
    }
}

#[test]
fn removed_keys_are_accepted_if_they_are_off() {
    for text in [
        "amp: {enabled: false, opt_level: O1}",
        "amp: {enabled: auto, opt_level: auto}",
        "sparse_gradients: false",
        "compression_training: {}",
        "elasticity: {enabled: false}",
        "zero_optimization: {mics_shard_size: -1}",
        "zero_optimization: {mics_hierarchical_params_gather: false}",
    ] {
        let told = warnings(text);
        assert!(
            told.len() == 1 && told[0].ends_with("was removed from DeepSpeed, and is disabled here; delete it"),
            "{told:?}"
        );
    }
    for text in ["amp: {opt_level: O1}", "compression_training: {weight_quantization: {}}"] {
        assert_eq!(only(text).kind, ErrorKind::Rejected, "{text}");
    }
    assert!(warnings("zero_optimization: {legacy_stage1: false, cpu_offload: auto}").is_empty());
}

#[test]
fn unknown_keys_are_reported_even_if_the_type_is_missing() {
    let found = |text: &str| -> Vec<String> {
        parse(text).expect_err(text).iter().map(|error| error.message.clone()).collect()
    };
    assert_eq!(found("optimizer: {lr: 1.0e-3}"), ["`optimizer.type` is missing", "unknown key `optimizer.lr`"]);
    assert_eq!(
        found("optimizer: {params: {lr: 1.0e-3, beta: 1}}"),
        ["`optimizer.type` is missing", "unknown key `optimizer.params.beta`"]
    );
    assert_eq!(found("model: {n_layer: 2, n_layers: 3}"), ["`model.type` is missing", "unknown key `model.n_layers`"]);
    // A mistyped `type` is a single error.
    let error = only("model: {typ: gpt2, n_layer: 2}");
    assert_eq!(
        (error.message.as_str(), error.help.as_deref()),
        ("unknown key `model.typ`", Some("did you mean `type`?"))
    );
    assert_eq!(only("optimizer: {params: {lr: 1.0e-3, momentum: 0.9}}").message, "`optimizer.type` is missing");
}
