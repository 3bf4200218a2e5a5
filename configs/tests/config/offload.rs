//! `offload_param`, `offload_optimizer`, `aio` and `training.memory_limit`: defaults, valid combinations, and
//! messages for invalid ones.

use std::path::Path;

use zero_config::{Aio, Config, Error, ErrorKind, OffloadDevice, OffloadOptimizer, OffloadParam, Origin};

use crate::texts::{only_error, overridden, paths, round_trip, spots};

const HEAD: &str = "train_micro_batch_size_per_gpu: 1\n";

fn with(text: &str) -> Config {
    round_trip(&format!("{HEAD}{text}"))
}

fn only(text: &str) -> Error {
    only_error(Config::parse("ds.yaml", format!("{HEAD}{text}")))
}

fn warned(config: &Config) -> Vec<&str> {
    config.warnings.iter().map(|warning| warning.place.path.as_str()).collect()
}

#[test]
fn nothing_is_offloaded_by_default() {
    let optimizer = OffloadOptimizer {
        device: OffloadDevice::None,
        nvme_path: None,
        buffer_count: 4,
        pipeline_read: true,
        pipeline_write: true,
        ratio: 1.0,
    };
    let param = OffloadParam { device: OffloadDevice::None, nvme_path: None, buffer_count: 5, max_in_cpu: 0 };
    let aio =
        Aio { block_size: 1 << 20, queue_depth: 8, single_submit: true, overlap_events: true, intra_op_parallelism: 1 };
    for text in [
        "",
        "zero_optimization: {stage: 0, offload_param: {device: none}, offload_optimizer: {device: none}}",
        "zero_optimization: {offload_param: null, offload_optimizer: false, sub_group_size: auto}\naio: {}",
        "zero_optimization: {offload_optimizer: {device: auto, buffer_count: auto, pipeline_read: auto}}",
        "aio: {block_size: auto, queue_depth: auto, single_submit: auto, use_gds: false}",
    ] {
        let config = with(text);
        assert_eq!((&config.zero.offload_optimizer, &config.zero.offload_param), (&optimizer, &param), "{text}");
        assert_eq!((&config.aio, config.zero.sub_group_size, config.training.memory_limit), (&aio, None, None));
        assert_eq!(config.warnings, [], "{text}");
    }
}

#[test]
fn every_key_is_resolved() {
    let config = with(
        "\
zero_optimization:
  stage: 3
  sub_group_size: 1e9
  offload_optimizer: {device: nvme, nvme_path: /a b/ü, buffer_count: 64, pipeline_read: false, pipeline_write: false}
  offload_param: {device: nvme, nvme_path: local, buffer_count: 1, max_in_cpu: 1e9}
aio: {block_size: 4096, queue_depth: 1024, single_submit: true, overlap_events: false, intra_op_parallelism: 2}
training: {memory_limit: 1.5 GiB}
",
    );
    let optimizer = OffloadOptimizer {
        device: OffloadDevice::Nvme,
        nvme_path: Some(Path::new("/a b/ü").to_path_buf()),
        buffer_count: 64,
        pipeline_read: false,
        pipeline_write: false,
        ratio: 1.0,
    };
    let param = OffloadParam {
        device: OffloadDevice::Nvme,
        nvme_path: Some(Path::new("local").to_path_buf()),
        buffer_count: 1,
        max_in_cpu: 1_000_000_000,
    };
    let aio = Aio {
        block_size: 4096,
        queue_depth: 1024,
        single_submit: true,
        overlap_events: false,
        intra_op_parallelism: 2,
    };
    assert_eq!((config.zero.offload_optimizer, config.zero.offload_param, config.aio), (optimizer, param, aio));
    assert_eq!((config.zero.sub_group_size, config.training.memory_limit), (Some(1_000_000_000), Some(3 << 29)));
    assert_eq!(config.origins.get("zero_optimization.offload_param.max_in_cpu"), Origin::Line(6));
    assert_eq!(config.origins.get("aio.block_size"), Origin::Line(7));
}

#[test]
fn offload_to_host_memory_is_accepted_with_sharded_state() {
    for (stage, section) in
        [(1, "offload_optimizer"), (2, "offload_optimizer"), (3, "offload_optimizer"), (3, "offload_param")]
    {
        let config =
            with(&format!("zero_optimization: {{stage: {stage}, {section}: {{device: cpu, pin_memory: true}}}}"));
        let devices = [config.zero.offload_optimizer.device, config.zero.offload_param.device];
        assert_eq!(
            devices.map(|device| device == OffloadDevice::Cpu),
            [section == "offload_optimizer", section == "offload_param"]
        );
        assert_eq!(config.warnings, []);
    }
}

#[test]
fn a_stage_that_shards_too_little_is_an_error_that_names_both_keys() {
    let cases = [
        (0, "offload_optimizer", "cpu", "set `stage: 1` or more, or remove `device`"),
        (0, "offload_optimizer", "nvme, nvme_path: x", "set `stage: 1` or more, or remove `device`"),
        (0, "offload_param", "cpu", "set `stage: 3`, or remove `device`"),
        (2, "offload_param", "nvme, nvme_path: x", "set `stage: 3`, or remove `device`"),
    ];
    for (stage, section, device, help) in cases {
        let error = only(&format!("zero_optimization:\n  stage: {stage}\n  {section}: {{device: {device}}}"));
        assert_eq!((error.kind, error.help.as_deref()), (ErrorKind::Contradiction, Some(help)));
        assert_eq!(paths(&error), [format!("zero_optimization.{section}.device").as_str(), "zero_optimization.stage"]);
        assert_eq!(spots(&error)[0].0, 4, "{error}");
    }
    // An invalid stage is the only error.
    let error = only("zero_optimization: {stage: 4, offload_param: {device: cpu}}");
    assert_eq!((error.kind, paths(&error)), (ErrorKind::Value, vec!["zero_optimization.stage"]));
}

#[test]
fn nvme_offload_needs_a_path_in_each_section() {
    for (section, other) in [("offload_param", "offload_optimizer"), ("offload_optimizer", "offload_param")] {
        let error = only(&format!(
            "zero_optimization:\n  stage: 3\n  {section}:\n    device: nvme\n  {other}: {{device: nvme, nvme_path: /x}}"
        ));
        assert_eq!((error.kind, spots(&error)[0]), (ErrorKind::Missing, (5, 13)), "{error}");
        assert_eq!(paths(&error), [format!("zero_optimization.{section}.nvme_path")]);
        assert!(error.help.is_some_and(|help| help.contains("each section has its own")));
        // An invalid `device` is not also reported as missing.
        for (written, kind) in [
            ("nvme_pat: /x", ErrorKind::UnknownKey),
            ("nvme_path: \"\"", ErrorKind::Value),
            ("nvme_path: 5", ErrorKind::Value),
            ("nvme_path: [/x]", ErrorKind::Value),
        ] {
            let error = only(&format!("zero_optimization: {{stage: 3, {section}: {{device: nvme, {written}}}}}"));
            assert_eq!(error.kind, kind, "{error}");
        }
    }
}

#[test]
fn all_errors_about_offload_are_reported_together() {
    let text = "\
zero_optimization:
  stage: 2
  sub_group_size: -1
  offload_param: {device: nvme, buffer_count: 65}
  offload_optimizer: {device: nvm, ratio: 1.5, super_offload: true, max_in_cpu: 1}
aio: {block_size: 5000, queue_depth: 1025, thread_count: 2, use_gds: true}
training: {memory_limit: 6G}
";
    let errors = Config::parse("ds.yaml", format!("{HEAD}{text}")).expect_err("many errors");
    let found: Vec<_> = errors.iter().map(|error| (error.kind, error.places[0].path.as_str())).collect();
    use ErrorKind::{Contradiction, Missing, Rejected, UnknownKey, Value};
    let expected = [
        (Value, "zero_optimization.sub_group_size"),
        (Contradiction, "zero_optimization.offload_param.device"),
        (Missing, "zero_optimization.offload_param.nvme_path"),
        (Value, "zero_optimization.offload_param.buffer_count"),
        (Value, "zero_optimization.offload_optimizer.device"),
        (Value, "zero_optimization.offload_optimizer.ratio"),
        (Rejected, "zero_optimization.offload_optimizer.super_offload"),
        (UnknownKey, "zero_optimization.offload_optimizer.max_in_cpu"),
        (Value, "aio.block_size"),
        (Value, "aio.queue_depth"),
        (Rejected, "aio.use_gds"),
        (Value, "training.memory_limit"),
    ];
    assert_eq!(found, expected, "{errors}");
    let text = errors.to_string();
    for advice in [
        "expected an integer of at least 0, or `auto`, found `-1`",
        "did you mean `nvme`?",
        "expected an integer from 0 to 64, found `65`",
        "expected a multiple of 4096, at most 1073741824, found `5000`",
        "the next multiple is 8192",
        "use `6GiB` or `6GB`",
    ] {
        assert!(text.contains(advice), "{advice}\n{text}");
    }
}

#[test]
fn block_sizes_are_multiples_of_4096() {
    for size in ["0", "1", "4095", "4097", "-4096", "1048577", "1e6", "1.5", "2147483648", "big"] {
        let error = only(&format!("aio: {{block_size: {size}}}"));
        assert_eq!((error.kind, paths(&error)), (ErrorKind::Value, vec!["aio.block_size"]), "{error}");
    }
    for (size, bytes) in [("4096", 4096), ("1048576.0", 1 << 20), ("1073741824", 1 << 30)] {
        assert_eq!(with(&format!("aio: {{block_size: {size}}}")).aio.block_size, bytes);
    }
}

#[test]
fn pipelined_offload_needs_a_second_buffer() {
    let text = |inside: &str| {
        format!(
            "zero_optimization: {{stage: 1, offload_optimizer: {{device: nvme, nvme_path: x, buffer_count: 1{inside}}}}}"
        )
    };
    for (inside, key) in [
        ("", "pipeline_read"),
        (", pipeline_write: false", "pipeline_read"),
        (", pipeline_read: false", "pipeline_write"),
    ] {
        let error = only(&text(inside));
        assert_eq!(error.kind, ErrorKind::Contradiction);
        let section = "zero_optimization.offload_optimizer";
        assert_eq!(paths(&error), [format!("{section}.buffer_count"), format!("{section}.{key}")]);
    }
    let config = with(&text(", pipeline_read: false, pipeline_write: false"));
    assert_eq!(config.zero.offload_optimizer.buffer_count, 1);
    // Offload to memory has no tiles in flight.
    with("zero_optimization: {stage: 1, offload_optimizer: {device: cpu, buffer_count: 1}}");
}

#[test]
fn keys_without_effect_are_warnings() {
    let config = with(
        "\
zero_optimization:
  stage: 3
  round_robin_gradients: true
  offload_param: {device: cpu, buffer_size: 1e8, pin_memory: false}
  offload_optimizer: {device: cpu, pin_memory: true, fast_init: true, ratio: 1, super_offload: false}
",
    );
    let zero = [
        "round_robin_gradients",
        "offload_param.buffer_size",
        "offload_param.pin_memory",
        "offload_optimizer.fast_init",
    ];
    assert_eq!(warned(&config), zero.map(|key| format!("zero_optimization.{key}")));
    // A section without a `device` has no effect.
    let config = with("zero_optimization: {stage: 3, offload_param: {nvme_path: /x}}");
    assert_eq!(warned(&config), ["zero_optimization.offload_param"]);
    assert!(config.warnings[0].message.contains("does nothing without `device`"));
}

#[test]
fn a_section_that_is_off_accepts_any_valid_value() {
    let config = with(
        "zero_optimization: {offload_optimizer: {device: none, ratio: 0.3, super_offload: true, buffer_count: 9}}",
    );
    assert_eq!((config.zero.offload_optimizer.buffer_count, warned(&config).len()), (9, 0));
    let off =
        |inside: &str| only(&format!("zero_optimization: {{offload_optimizer: {{device: none, {inside}}}}}")).kind;
    assert_eq!(off("buffer_count: x"), ErrorKind::Value);
    assert_eq!(off("rato: 0.3"), ErrorKind::UnknownKey);
    assert_eq!(only("zero_optimization: {offload_optimizer: true}").kind, ErrorKind::Value);
    assert_eq!(
        only("zero_optimization: {offload_optimizer: {super_offload: true, device: cpu}, stage: 1}").kind,
        ErrorKind::Rejected
    );
}

#[test]
fn a_memory_limit_is_a_number_or_a_string_with_a_unit() {
    let limit = |text: &str| with(&format!("training: {{memory_limit: {text}}}")).training.memory_limit;
    let cases = [
        ("6442450944", 6 << 30),
        ("6GiB", 6 << 30),
        ("\"6 GiB\"", 6 << 30),
        ("800 MB", 800_000_000),
        ("6e9", 6_000_000_000),
        ("0.5 tib", 1 << 39),
        ("1048576", 1 << 20),
    ];
    for (text, bytes) in cases {
        assert_eq!(limit(text), Some(bytes), "{text}");
    }
    assert_eq!(limit("null"), None);
    for (text, help) in [
        ("6g", Some("use `6GiB` or `6GB`")),
        ("0", None),
        ("6", None),
        ("-1", None),
        ("1048575", None),
        ("1 MB", None),
        ("99999999TiB", None),
        ("lots", None),
        (".nan", None),
        ("true", None),
        ("[6GiB]", None),
    ] {
        let error = only(&format!("training:\n  memory_limit: {text}"));
        assert_eq!((error.kind, spots(&error)[0], error.help.as_deref()), (ErrorKind::Value, (3, 17), help), "{error}");
        assert!(error.message.contains("a number of bytes of at least 1048576, or a size like `6GiB`"), "{error}");
    }
}

#[test]
fn overrides_change_keys_of_the_sections() {
    let text = format!("{HEAD}zero_optimization: {{stage: 0, offload_optimizer: {{device: none, buffer_count: 8}}}}");
    let resolve = |sets: &[&str]| overridden(&text, sets);
    let config = resolve(&[
        "zero_optimization.stage=1",
        "zero_optimization.offload_optimizer.device=nvme",
        "zero_optimization.offload_optimizer.nvme_path=/mnt/a=b",
        "training.memory_limit=800 MB",
        "aio.queue_depth=32",
    ])
    .unwrap_or_else(|errors| panic!("{errors}"));
    let offload = &config.zero.offload_optimizer;
    assert_eq!((offload.device, offload.buffer_count), (OffloadDevice::Nvme, 8));
    assert_eq!(offload.nvme_path.as_deref(), Some(Path::new("/mnt/a=b")));
    assert_eq!((config.training.memory_limit, config.aio.queue_depth), (Some(800_000_000), 32));
    assert_eq!(config.origins.get("zero_optimization.offload_optimizer.device"), Origin::Set);
    let errors = resolve(&["zero_optimization.offload_optimizer={device: nvme}"])
        .expect_err("nvme without a folder and without sharding is an error");
    assert_eq!(errors.count(), 2, "{errors}");
    assert!(errors.to_string().contains("--set zero_optimization.offload_optimizer={device: nvme}"), "{errors}");
}
