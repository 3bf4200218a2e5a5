//! `pipeline`: defaults, its effect on ranks and batch sizes, and messages for invalid combinations.

use zero_config::{Config, Error, ErrorKind, Origin, PartitionMethod, Pipeline, PipelineSchedule, load};

use crate::texts::{only_error, paths, source, spots, valid};

const HEAD: &str = "train_micro_batch_size_per_gpu: 2\n";

fn with(text: &str) -> Config {
    valid(&format!("{HEAD}{text}"))
}

fn pipeline(inside: &str) -> Pipeline {
    with(&format!("pipeline: {{{inside}}}")).pipeline
}

/// Returns the only error of a text, for a number of ranks.
fn only(text: &str, ranks: Option<usize>) -> Error {
    only_error(load(source(text), &[]).and_then(|typed| typed.resolve(ranks)))
}

#[test]
fn without_the_section_there_is_one_stage() {
    let expected = Pipeline {
        stages: 1,
        partition_method: PartitionMethod::Parameters,
        schedule: PipelineSchedule::OneFOneB,
        virtual_stages: 1,
        keep_gathered: None,
    };
    let config = with("launcher: {num_processes: 3}");
    assert_eq!((&config.pipeline, config.world_size, config.data_parallel_size()), (&expected, 3, 3));
    let autos = "stages: auto, partition_method: auto, schedule: auto, virtual_stages: auto, keep_gathered: auto";
    assert_eq!(pipeline(autos), expected);
    assert_eq!(pipeline("stages: null, partition: best"), expected);
}

#[test]
fn the_number_of_stages_is_the_only_required_key() {
    let config = with("pipeline: {stages: 4}");
    assert_eq!((config.world_size, config.launcher.num_processes, config.data_parallel_size()), (4, 4, 1));
    assert_eq!(config.train_batch_size, 2);
    assert_eq!(with("pipeline: {stages: 4}\nlauncher: {num_processes: auto}"), config);
    let yaml = config.to_yaml();
    assert!(
        yaml.contains("\npipeline:\n  stages: 4\n  partition_method: parameters\n  schedule: \"1f1b\"\n"),
        "{yaml}"
    );
    assert!(yaml.contains("\n  virtual_stages: 1\n  keep_gathered: auto\n"), "{yaml}");
    assert_eq!(Config::parse("resolved.yaml", yaml).expect("the output is valid"), config);
}

#[test]
fn batch_sizes_count_data_parallel_ranks() {
    let stages = "pipeline: {stages: 2}\n";
    let cases = [
        ("train_batch_size: 24\ntrain_micro_batch_size_per_gpu: 2", (24, 2, 4)),
        ("train_batch_size: 24\ngradient_accumulation_steps: 4", (24, 2, 4)),
        ("train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: 4", (24, 2, 4)),
        ("train_batch_size: 24", (24, 8, 1)),
        ("train_micro_batch_size_per_gpu: 2", (6, 2, 1)),
        ("train_batch_size: 24\ntrain_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: 4", (24, 2, 4)),
    ];
    for (text, expected) in cases {
        let text = format!("{stages}{text}");
        let started = Config::with_world_size("ds.yaml", text.as_str(), 6).unwrap_or_else(|errors| panic!("{errors}"));
        let written = Config::parse("ds.yaml", format!("{text}\nlauncher: {{num_processes: 6}}")).expect("valid");
        // Without a number of ranks, the configuration resolves for one pipeline instead of three, with a third of the
        // batch.
        let alone = Config::parse("ds.yaml", text.replace("24", "8")).expect("one rank a stage");
        assert_eq!((alone.world_size, alone.data_parallel_size()), (2, 1));
        for config in [&started, &written] {
            assert_eq!((config.world_size, config.data_parallel_size()), (6, 3), "{text}");
            let sizes =
                (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps);
            assert_eq!(sizes, expected, "{text}");
            assert_eq!(&Config::parse("resolved.yaml", config.to_yaml()).expect("the output is valid"), config);
        }
        assert_eq!(started.origins.get("launcher.num_processes"), Origin::Launch);
    }
}

#[test]
fn another_number_of_ranks_changes_the_data_parallel_ranks_only() {
    let config = with("pipeline: {stages: 2}\ngradient_accumulation_steps: 4");
    let more = config.for_world_size(6).expect("three pipelines");
    assert_eq!((more.pipeline.stages, more.data_parallel_size(), more.train_batch_size), (2, 3, 24));
    let errors = config.for_world_size(5).expect_err("5 ranks do not divide into pipelines of 2");
    assert!(errors.to_string().contains("5 ranks are not a multiple of pipeline.stages 2"), "{errors}");
}

#[test]
fn ranks_not_divisible_by_the_stages_are_one_error() {
    let text = "train_batch_size: 16\npipeline:\n  stages: 4\nlauncher:\n  num_processes: 6\n";
    let error = only(text, None);
    assert_eq!(error.kind, ErrorKind::Contradiction);
    assert_eq!(
        error.to_string(),
        "error: 6 ranks are not a multiple of pipeline.stages 4\n  \
           in: pipeline.stages (ds.yaml:3:11)\n      \
               3 |   stages: 4\n        \
                 |           ^\n  \
           in: launcher.num_processes (ds.yaml:5:18)\n      \
               5 |   num_processes: 6\n        \
                 |                  ^\n  \
         help: each pipeline needs 4 ranks; the next multiple is 8"
    );
    // Fewer ranks than stages, and another number that the stages do not divide. The batch size is not divisible
    // either, but causes no further errors.
    let text = "train_batch_size: 15\npipeline: {stages: 4}\n";
    for (ranks, next) in [(1, 4), (3, 4), (7, 8)] {
        let error = only(text, Some(ranks));
        assert_eq!(paths(&error), ["pipeline.stages", "launcher.num_processes"]);
        assert!(error.to_string().contains(&format!("({ranks} ranks started)")), "{error}");
        assert!(error.help.as_deref().is_some_and(|help| help.ends_with(&next.to_string())), "{error}");
    }
}

#[test]
fn an_invalid_number_of_stages_causes_no_errors_about_ranks() {
    for stages in ["0", "two", "-1", "1.5", "65537", "[2]"] {
        let error = only(&format!("train_batch_size: 15\npipeline: {{stages: {stages}}}"), Some(8));
        assert_eq!((error.kind, paths(&error)), (ErrorKind::Value, vec!["pipeline.stages"]), "{error}");
        assert_eq!(spots(&error), [(2, 20)]);
    }
    let error = only("train_batch_size: 15\npipeline: {stagees: 4}", Some(8));
    assert_eq!((error.kind, error.help.as_deref()), (ErrorKind::UnknownKey, Some("did you mean `stages`?")));
    let error = only("train_batch_size: 15\npipeline: 4", Some(8));
    assert_eq!((error.kind, paths(&error)), (ErrorKind::Value, vec!["pipeline"]));
}

#[test]
fn batch_sizes_that_do_not_divide_name_the_stages() {
    let error = only("train_batch_size: 16\npipeline: {stages: 2}", Some(6));
    assert_eq!(error.message, "train_batch_size 16 is not a multiple of the number of data-parallel ranks 3");
    assert_eq!(paths(&error), ["train_batch_size", "launcher.num_processes", "pipeline.stages"]);
    let text = "train_batch_size: 7\ntrain_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: 3\n";
    let error = only(&format!("{text}pipeline: {{stages: 2}}"), Some(4));
    assert!(error.message.ends_with("× data-parallel ranks = 2 × 3 × 2 = 12"), "{error}");
}

#[test]
fn reproducible_gradients_need_a_power_of_two_of_data_parallel_ranks() {
    let text = format!("{HEAD}training: {{reproducible: true}}\npipeline: {{stages: 3}}");
    for ranks in [3, 6, 12] {
        assert!(Config::with_world_size("ds.yaml", text.as_str(), ranks).is_ok(), "{ranks}");
    }
    let error = only(&text, Some(9));
    assert!(error.message.ends_with("not 3 data-parallel ranks × 1 = 3"), "{error}");
    let expected =
        ["training.reproducible", "gradient_accumulation_steps", "launcher.num_processes", "pipeline.stages"];
    assert_eq!(paths(&error), expected);
}

#[test]
fn every_partition_method_round_trips() {
    for (written, resolved) in
        [("parameters", "parameters"), ("best", "parameters"), ("uniform", "uniform"), ("time", "time")]
    {
        for key in ["partition_method", "partition"] {
            let config = with(&format!("pipeline: {{stages: 2, {key}: {written}}}"));
            assert_eq!(config.pipeline.partition_method.to_string(), resolved);
            assert_eq!(config.origins.get("pipeline.partition_method"), Origin::Line(2));
            assert_eq!(Config::parse("resolved.yaml", config.to_yaml()).expect("the output is valid"), config);
        }
    }
    let error = only(&format!("{HEAD}pipeline: {{partition: time,\n  partition_method: time}}"), None);
    assert_eq!((error.kind, spots(&error)), (ErrorKind::DuplicateKey, vec![(3, 3), (2, 12)]));
}

#[test]
fn a_pattern_matches_anywhere_and_ignores_case() {
    let patterns = ["type:block", "type:^h[.]\\d+$", "type:a:b|\"c\" #d", "type:é\\p{L}", "type: "];
    for pattern in patterns {
        let config = with(&format!("pipeline: {{partition_method: {}}}", serde_json::json!(pattern)));
        assert_eq!(config.pipeline.partition_method.to_string(), pattern);
        assert_eq!(Config::parse("resolved.yaml", config.to_yaml()).expect("the output is valid"), config);
    }
    // The value needs no quotes. DeepSpeed's users write it like this.
    let PartitionMethod::Type(pattern) =
        with("pipeline:\n  partition_method: type:h\\.[0-9]\n").pipeline.partition_method
    else {
        panic!("no pattern")
    };
    let names = ["wte", "h.0", "transformer.H.11", "h.x", "lm_head"];
    assert_eq!(names.map(|name| pattern.matches(name)), [false, true, true, false, false]);
}

#[test]
fn an_invalid_partition_method_gives_a_reason() {
    let long = format!("type:{}", "a".repeat(1001));
    let cases = [
        ("parameter", "did you mean `parameters`?"),
        ("Uniform", "did you mean `uniform`?"),
        ("fastest", ""),
        ("type:h(", "the regular expression is invalid: unclosed group"),
        ("type:*", "the regular expression is invalid: repetition operator missing expression"),
        ("type:(?=a)", "look-around, including look-ahead and look-behind, is not supported"),
        ("type:", "give a regular expression after `type:`"),
        ("type:(a{1000}){1000}", "size limit"),
        (long.as_str(), "more than 1000 bytes"),
    ];
    for (written, help) in cases {
        let error = only(&format!("{HEAD}pipeline:\n  partition: {}", serde_json::json!(written)), None);
        assert_eq!((error.kind, paths(&error)), (ErrorKind::Value, vec!["pipeline.partition_method"]));
        assert_eq!(spots(&error), [(3, 14)], "{error}");
        assert!(error.message.contains("expected `parameters`, `uniform`, `time` or `type:REGEX`"), "{error}");
        let found = error.help.unwrap_or_default();
        assert!(found.contains(help) && found.is_empty() == help.is_empty() && !found.contains('\n'), "{found}");
    }
}

#[test]
fn every_schedule_round_trips() {
    let cases = [
        ("1f1b", PipelineSchedule::OneFOneB, 1),
        ("gpipe", PipelineSchedule::GPipe, 1),
        ("interleaved_1f1b", PipelineSchedule::Interleaved, 2),
        ("zb_h1", PipelineSchedule::ZeroBubble, 1),
    ];
    for (name, schedule, virtual_stages) in cases {
        let config = with(&format!("pipeline: {{stages: 2, schedule: {name}}}"));
        assert_eq!((config.pipeline.schedule, config.pipeline.virtual_stages), (schedule, virtual_stages));
        assert_eq!(Config::parse("resolved.yaml", config.to_yaml()).expect("the output is valid"), config);
    }
    assert_eq!(pipeline("schedule: interleaved_1f1b, virtual_stages: 3").virtual_stages, 3);
    for (written, near) in [("1f1", "1f1b"), ("GPipe", "gpipe"), ("interleaved", "interleaved_1f1b"), ("zbh1", "zb_h1")]
    {
        let error = only(&format!("{HEAD}pipeline:\n  stages: 2\n  schedule: {written}"), None);
        assert_eq!((error.kind, spots(&error)), (ErrorKind::Value, vec![(4, 13)]));
        assert_eq!(error.help, Some(format!("did you mean `{near}`?")));
    }
}

#[test]
fn virtual_stages_and_interleaving_require_each_other() {
    for (schedule, chunks) in [("interleaved_1f1b", 1), ("1f1b", 2), ("gpipe", 3), ("zb_h1", 2)] {
        let error = only(&format!("{HEAD}pipeline:\n  virtual_stages: {chunks}\n  schedule: {schedule}"), None);
        assert_eq!(error.kind, ErrorKind::Contradiction);
        assert_eq!(paths(&error), ["pipeline.virtual_stages", "pipeline.schedule"]);
        assert_eq!(spots(&error), [(3, 19), (4, 13)]);
        assert!(error.message.contains(schedule) && error.message.contains(&chunks.to_string()), "{error}");
    }
    // For a key that is not written, the location says "not in ds.yaml".
    let error = only(&format!("{HEAD}pipeline: {{virtual_stages: 2}}"), None);
    assert!(error.to_string().contains("in: pipeline.schedule (not in ds.yaml)"), "{error}");
    assert_eq!(only(&format!("{HEAD}pipeline: {{virtual_stages: 0}}"), None).kind, ErrorKind::Value);
    // An invalid value of one key is the only error.
    let error = only(&format!("{HEAD}pipeline: {{virtual_stages: 2, schedule: interleave}}"), None);
    assert_eq!((error.kind, paths(&error)), (ErrorKind::Value, vec!["pipeline.schedule"]));
}

#[test]
fn keep_gathered_is_true_false_or_auto() {
    for (written, expected) in [("true", Some(true)), ("false", Some(false)), ("auto", None)] {
        let config = with(&format!("zero_optimization: {{stage: 3}}\npipeline: {{keep_gathered: {written}}}"));
        assert_eq!(config.pipeline.keep_gathered, expected);
        assert!(config.to_yaml().contains(&format!("keep_gathered: {written}")));
        assert_eq!(Config::parse("resolved.yaml", config.to_yaml()).expect("the output is valid"), config);
    }
    let error = only(&format!("{HEAD}pipeline: {{keep_gathered: yes}}"), None);
    assert!(error.message.contains("expected true or false, or `auto`"), "{error}");
    assert_eq!(error.help.as_deref(), Some("use `true`"));
}

#[test]
fn deepspeeds_other_keys_are_accepted_if_they_are_off() {
    let config = with("pipeline: {seed_layers: false, pipe_partitioned: true, activation_checkpoint_interval: 0}");
    assert_eq!(config.warnings, []);
    let config = with("pipeline: {seed_layers: true, pipe_partitioned: false, grad_partitioned: false}");
    let warned: Vec<_> = config.warnings.iter().map(|warning| warning.place.path.as_str()).collect();
    assert_eq!(warned, ["pipeline.seed_layers", "pipeline.pipe_partitioned", "pipeline.grad_partitioned"]);
    let error = only(&format!("{HEAD}pipeline: {{activation_checkpoint_interval: 1}}"), None);
    assert_eq!(error.kind, ErrorKind::Rejected);
    assert!(
        error
            .message
            .ends_with("`activation_checkpointing.interval` sets the interval, with and without pipeline parallelism"),
        "{error}"
    );
}
