//! `training.param_groups`: the parameters that a group selects, the settings that it changes, and its own optimizer.

use zero_config::{Config, Errors};

/// Asserts that the result is a single error with all of these texts.
fn assert_refused(parsed: Result<Config, Errors>, expected: &[&str]) {
    let errors = parsed.expect_err(&format!("an error: {expected:?}"));
    assert_eq!(errors.count(), 1, "{expected:?}: {errors}");
    let error = errors.to_string();
    assert!(expected.iter().all(|expected| error.contains(expected)), "{expected:?}: {error}");
}

#[test]
fn parameter_groups_must_select_and_change_something() {
    let text =
        |groups: &str, more: &str| format!("train_batch_size: 1\ntraining: {{param_groups: [{groups}]}}\n{more}");
    let parse = |groups: &str, more: &str| Config::parse("ds.yaml", text(groups, more));
    let config = parse("{params: a.*, lr: 1}, {kinds: [norm], layers: [0, 3], betas: [0.8, 0.9]}", "").unwrap();
    let yaml = config.to_yaml();
    assert_eq!(Config::parse("again", yaml.as_str()).expect(&yaml).training, config.training);
    let groups = config.training.param_groups.expect("groups");
    assert_eq!((groups[0].params.as_deref(), groups[0].lr), (Some(&["a.*".to_string()][..]), Some(1.0)));
    assert_eq!((groups[1].layers.as_deref(), groups[1].betas), (Some(&[0, 3][..]), Some([0.8, 0.9])));
    let clipping = |group: &str, more: &str| {
        let config = parse(&format!("{{kinds: norm, {group}}}"), more).unwrap_or_else(|errors| panic!("{errors}"));
        config.training.param_groups.unwrap()[0].clipping()
    };
    assert_eq!(clipping("lr: 1", ""), None);
    assert_eq!(clipping("gradient_clipping: 0.5", "gradient_clipping_value: 2"), Some((0.5, 0.0)));
    assert_eq!(clipping("gradient_clipping: 0, gradient_clipping_value: 0.5", ""), Some((0.0, 0.5)));
    let sgd = "optimizer: {type: SGD, params: {lr: 0.1}}";
    for (groups, more, expected) in [
        ("{lr: 1}", "", "the group selects no parameters"),
        ("{kinds: norm}", "", "the group changes nothing"),
        (
            "{kinds: norm, gradient_clipping: 1, gradient_clipping_value: 1}",
            "",
            "`gradient_clipping` and `gradient_clipping_value` both clip the gradient of the group",
        ),
        ("{kinds: norms, lr: 1}", "", "`norms` is not a kind of parameter"),
        ("{kinds: norm, lr: 1, lr_scale: 2}", "", "`lr` and `lr_scale` both set the learning rate"),
        ("{kinds: norm, lr: 1}", "optimizer: {type: AdamW, params: {lr: 0}}", "the optimizer's `lr` must not be 0"),
        ("{kinds: norm, betas: [0.9, 0.99]}", sgd, "the optimizer has no betas"),
        (
            "{kinds: norm, betas: [0.9, 0.99]}",
            "scheduler: {type: OneCycle, params: {cycle_min_lr: 0.1, cycle_max_lr: 1}}",
            "OneCycle sets the betas",
        ),
        (
            "{kinds: norm, lr: 1}",
            "scheduler: {type: WarmupLR, params: {warmup_max_lr: 0.1}}",
            "must be the schedule's largest learning rate",
        ),
        (
            "{kinds: norm, lr_scale: 2}",
            "optimizer: {type: Muon, params: {muon_lr: 0, adam_lr: 1}}",
            "the learning rate of the matrices must not be 0",
        ),
    ] {
        assert_refused(parse(groups, more), &[expected]);
    }
}

#[test]
fn a_group_can_have_an_optimizer_of_its_own() {
    let text = |group: &str, more: &str| {
        format!("train_batch_size: 1\ntraining: {{param_groups: [{{kinds: norm, {group}}}]}}\n{more}")
    };
    let parse = |group: &str, more: &str| Config::parse("ds.yaml", text(group, more));
    let config = parse("optimizer: {type: sgd, params: {lr: 0.1, momentum: 0.9}}", "").unwrap();
    let [(None, all), (Some(0), own)] = config.optimizers()[..] else { panic!("{:?}", config.optimizers()) };
    assert_eq!((all.name(), own.name(), own.lr()), ("AdamW", "SGD", 0.1));
    let yaml = config.to_yaml();
    assert_eq!(Config::parse("again", yaml.as_str()).expect(&yaml).training, config.training);
    for group in
        ["lr_scale: 2, gradient_clipping: 0, optimizer: {type: Muon}", "optimizer: {type: Adagrad}, layers: [0]"]
    {
        let config = parse(group, "").unwrap();
        let yaml = config.to_yaml();
        assert_eq!(Config::parse("again", yaml.as_str()).expect(&yaml).training, config.training);
    }
    parse("optimizer: {type: Adam, params: {adam_w_mode: false}}", "").unwrap();
    let peak = "optimizer: {type: SGD, params: {lr: 0.1}}\nscheduler: {type: WarmupLR, params: {warmup_max_lr: 0.2}}";
    let cycle = "scheduler: {type: OneCycle, params: {cycle_min_lr: 0.0001, cycle_max_lr: 0.001}}";
    parse("optimizer: {type: RMSprop}", &format!("optimizer: {{type: SGD, params: {{lr: 0.001}}}}\n{cycle}")).unwrap();
    let narrow = "bf16: {enabled: true}\noptimizer: {type: AdamW, params: {fp32_optimizer_states: false}}";
    for (group, more, place, expected) in [
        ("optimizer: {type: AdamWScheduleFree}", "", "0.optimizer.type", "averages the weights of all parameters"),
        ("optimizer: {type: Custom}", "", "0.optimizer.type", "a custom optimizer updates all parameters"),
        ("optimizer: {type: MuSGD}", "", "0.optimizer.type", "µP sets the learning rates"),
        ("optimizer: {type: SGD}", "optimizer: {type: AdamWScheduleFree}", "0.optimizer", "averages the weights"),
        ("optimizer: {type: SGD}", "optimizer: {type: Custom}", "0.optimizer", "updates all parameters"),
        ("lr: 1, optimizer: {type: SGD}", "", "0.lr", "`lr` belongs in the `params` of the group's optimizer"),
        ("weight_decay: 0.1, optimizer: {type: SGD}", "", "0.weight_decay", "`weight_decay` belongs in the `params`"),
        ("betas: [0.9, 0.99], optimizer: {type: Lion}", "", "0.betas", "`betas` belongs in the `params`"),
        ("optim_bits: 8, optimizer: {type: Lion}", "", "0.optim_bits", "`optim_bits` belongs in the `params`"),
        ("betas: [0.9, 0.99], optimizer: {type: SGD}", "", "0.betas", "the optimizer has no betas"),
        ("optim_bits: 8, optimizer: {type: SGD}", "", "0.optim_bits", "does not support 8-bit states"),
        (
            "optimizer: {type: SGD}",
            narrow,
            "0.optimizer.type",
            "all optimizers of a run must keep their states in the same data type",
        ),
        ("optimizer: {type: SGD}", "scheduler: {type: LRRangeTest}", "0.optimizer", "use another schedule"),
        ("optimizer: {type: SGD}", "optimizer: {type: SGD, params: {lr: 0}}", "0.optimizer", "must not be 0"),
        ("optimizer: {type: SGD}", peak, "0.optimizer", "must be the schedule's largest learning rate"),
        ("optimizer: {type: Lion}", cycle, "0.optimizer", "OneCycle cycles the betas of one optimizer"),
        ("optimizer: {type: AdamW, params: {adam_w_mode: false}}", "", "0.optimizer.type", "`type: AdamW` means Adam"),
        ("optimizer: {type: SGD, params: {nesterov: true}}", "", "0.optimizer.params.nesterov", "Nesterov momentum"),
        ("optimizer: {type: Lion, params: {min_8bit_size: 9}}", "", "0.optimizer.params.min_8bit_size", "32 bits"),
        (
            "optimizer: {type: Adagrad, params: {fp32_optimizer_states: false}}",
            "bf16: {enabled: true}",
            "0.optimizer.params.fp32_optimizer_states",
            "all optimizers of a run must keep their states in the same data type",
        ),
        (
            "optimizer: {type: Lamb}",
            "bf16: {enabled: true, bf16_master_weights_and_grads: true}",
            "0.optimizer.type",
            "LAMB needs the f32 copy",
        ),
    ] {
        assert_refused(parse(group, more), &[&format!("training.param_groups.{place}"), expected]);
    }
    for (group, expected) in [
        ("optimizer: {params: {lr: 1}}", "`training.param_groups.0.optimizer.type` is missing"),
        (
            "optimizer: {type: SGD, params: {betas: [0, 0]}}",
            "unknown key `training.param_groups.0.optimizer.params.betas`",
        ),
    ] {
        let error = parse(group, "").expect_err(group).to_string();
        assert!(error.contains(expected), "{error}");
    }
}
