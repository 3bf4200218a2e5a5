//! Errors and warnings about schedules and optimizers that contradict themselves or the run.

use zero_config::{Config, ErrorKind};

use super::{HEAD, errors, only};

#[test]
fn a_warm_up_longer_than_the_run_is_a_warning() {
    let text = format!("{HEAD}scheduler: {{type: WarmupCosineLR, params: {{total_num_steps: 300}}}}");
    let config = Config::parse("ds.yaml", text).expect("DeepSpeed accepts it too");
    assert_eq!(config.warnings.len(), 1);
    assert!(config.warnings[0].message.contains("1000 steps is longer than the schedule of 300"));
}

#[test]
fn a_schedule_that_contradicts_itself_or_the_run_is_an_error() {
    let cases = [
        ("OneCycle, params: {cycle_min_lr: 0.2, cycle_max_lr: 0.1}", "cycle_min_lr", "above the largest"),
        (
            "OneCycle, params: {cycle_min_lr: 0.1, cycle_max_lr: 0.2, cycle_min_mom: 0.95}",
            "cycle_min_mom",
            "above the largest",
        ),
        (
            "OneCycle, params: {cycle_min_lr: 0, cycle_max_lr: 1, cycle_first_step_size: 10, decay_step_size: 10, \
             decay_mom_rate: 0.02}",
            "decay_mom_rate",
            "reaches 1 before the end",
        ),
        ("cosine_with_min_lr", "min_lr", "needs a smallest learning rate"),
        (
            "cosine_with_min_lr, params: {min_lr: 1.0e-5, min_lr_rate: 0.1}",
            "min_lr",
            "`min_lr` and `min_lr_rate` both set",
        ),
        ("cosine_warmup_with_min_lr, params: {min_lr: 0.5}", "min_lr", "not below the optimizer's 0.001"),
        ("polynomial, params: {lr_end: 0.001}", "lr_end", "not below the optimizer's 0.001"),
        (
            "warmup_stable_decay, params: {num_warmup_steps: 60, num_decay_steps: 50}",
            "num_decay_steps",
            "take 110 steps",
        ),
    ];
    for (text, key, expected) in cases {
        let text = format!("{HEAD}training: {{max_steps: 100}}\nscheduler: {{type: {text}}}");
        let (kind, path, _, _, message, _) = only(&text);
        assert_eq!((kind, path), (ErrorKind::Contradiction, format!("scheduler.params.{key}")), "{text}");
        assert!(message.contains(expected), "{message}");
    }
    for (text, path) in [
        ("{type: RMSprop, params: {centered: true, momentum: 0.9}}", "optimizer.params.centered"),
        (
            "{type: NAdam}\nscheduler: {type: OneCycle, params: {cycle_min_lr: 0.1, cycle_max_lr: 0.2}}",
            "scheduler.params.cycle_momentum",
        ),
        (
            "{type: AdamWScheduleFree}\nscheduler: {type: OneCycle, params: {cycle_min_lr: 0.1, cycle_max_lr: 0.2}}",
            "scheduler.params.cycle_momentum",
        ),
        (
            "{type: AdamWScheduleFree, params: {warmup_steps: 9}}\nscheduler: {type: linear, params: {num_training_steps: 9}}",
            "optimizer.params.warmup_steps",
        ),
        ("{type: AdamWScheduleFree}\ntraining: {ema: {decay: 0.9}}", "training.ema"),
        (
            "{type: AdamWScheduleFree}\nbf16: {enabled: true, bf16_master_weights_and_grads: true}",
            "bf16.bf16_master_weights_and_grads",
        ),
        ("{type: Lion, params: {optim_bits: 16}}", "optimizer.params.optim_bits"),
        ("{type: Lion, params: {min_8bit_size: 512}}", "optimizer.params.min_8bit_size"),
        (
            "{type: AdamW, params: {optim_bits: 8}}\nbf16: {enabled: true, bf16_master_weights_and_grads: true, bf16_optimizer_states: true}",
            "optimizer.params.optim_bits",
        ),
        ("{type: SGD}\ntraining: {param_groups: [{layers: [0], optim_bits: 32}]}", "training.param_groups.0"),
        (
            "{type: AdamW, params: {optim_bits: 8, fp32_optimizer_states: false}}\nbf16: {enabled: true}",
            "optimizer.params.optim_bits",
        ),
        ("{type: SGD}\ntraining: {param_groups: [{layers: [0], optim_bits: 8}]}", "training.param_groups.0.optim_bits"),
    ] {
        let (kind, found, ..) = only(&format!("{HEAD}optimizer: {text}"));
        assert_eq!((kind, found.as_str()), (ErrorKind::Contradiction, path), "{text}");
    }
    let missing = errors(&format!("{HEAD}scheduler: {{type: OneCycle}}")).to_string();
    assert!(missing.contains("cycle_min_lr") && missing.contains("cycle_max_lr"), "{missing}");
}

#[test]
fn a_schedule_that_deviates_from_written_values_is_a_warning() {
    let cycle = "scheduler: {type: OneCycle, params: {cycle_min_lr: 0.1, cycle_max_lr: 0.2}}";
    for (text, path, expected) in [
        (format!("optimizer: {{type: SGD}}\n{cycle}"), "scheduler.params.cycle_momentum", "has no betas"),
        (
            format!("optimizer: {{type: AdamW, params: {{betas: [0.9, 0.95]}}}}\n{cycle}"),
            "optimizer.params.betas",
            "β₂ is 0.99",
        ),
        (
            "scheduler: {type: linear, params: {num_training_steps: 50}}".to_string(),
            "scheduler.params.num_training_steps",
            "ends after 50 steps, but the run has 100 steps",
        ),
        (
            "scheduler: {type: linear, params: {num_warmup_steps: 101}}".to_string(),
            "scheduler.params.num_warmup_steps",
            "101 steps is longer than the schedule of 100",
        ),
    ] {
        let config = Config::parse("ds.yaml", format!("{HEAD}training: {{max_steps: 100}}\n{text}")).unwrap();
        let said: Vec<&str> = config.warnings.iter().map(|warning| warning.message.as_str()).collect();
        assert!(said.len() == 1 && said[0].contains(expected), "{text}: {said:?}");
        assert_eq!(config.warnings[0].place.path, path);
    }
    let fine = format!("{HEAD}training: {{max_steps: 100}}\n{cycle}");
    assert_eq!(Config::parse("ds.yaml", fine).unwrap().warnings, []);
}
