//! `training.local_steps`: its defaults, and the settings that cannot be combined with it.

use zero_config::{Config, LocalSteps};

fn with(training: &str, more: &str) -> Result<Config, String> {
    let text = format!(
        "train_micro_batch_size_per_gpu: 2\nmesh: {{data_parallel_replicate_degree: 2}}\n\
         training: {{local_steps: {{steps: 5}}{training}}}\n{more}"
    );
    Config::with_world_size("ds.yaml", text, 4).map_err(|errors| errors.to_string())
}

#[test]
fn the_outer_optimizer_has_the_defaults_of_diloco() {
    let config = with("", "").unwrap();
    let local = LocalSteps { steps: 5, outer_lr: 0.7, outer_momentum: 0.9 };
    assert_eq!(config.training.local_steps, Some(local));
    // Local steps need no sharding, so the mesh is accepted at ZeRO stage 0.
    assert_eq!((config.zero.stage.number(), config.shard_group_size()), (0, 2));
    let again = Config::with_world_size("ds.yaml", config.to_yaml(), 4).unwrap();
    assert_eq!(again.training.local_steps, Some(local));
    assert_eq!(Config::parse("ds.yaml", "train_batch_size: 1").unwrap().training.local_steps, None);
}

#[test]
fn invalid_values_are_errors() {
    for section in [
        "{steps: 0}",
        "{outer_lr: 0.7}",
        "{steps: 5, outer_lr: 0}",
        "{steps: 5, outer_momentum: 1}",
        "{steps: 5, outer_momentum: -0.1}",
        "5",
    ] {
        let text = format!(
            "train_micro_batch_size_per_gpu: 2\nmesh: {{data_parallel_replicate_degree: 2}}\ntraining: {{local_steps: {section}}}"
        );
        assert!(Config::with_world_size("ds.yaml", text, 4).is_err(), "{section}");
    }
}

#[test]
fn local_steps_need_replicates() {
    let text = "train_micro_batch_size_per_gpu: 2\ntraining: {local_steps: {steps: 5}}";
    let errors = Config::with_world_size("ds.yaml", text, 4).unwrap_err().to_string();
    assert!(errors.contains("`training.local_steps` needs several replicates, but the mesh has only one"), "{errors}");
    assert!(errors.contains("set `mesh.data_parallel_replicate_degree`, or remove `local_steps`"), "{errors}");
}

#[test]
fn evaluations_and_checkpoints_follow_outer_steps() {
    assert!(with(", eval_every: 10, save_every: 5", "").is_ok());
    let errors = with(", eval_every: 8, save_every: 5", "").unwrap_err();
    let message = "evaluations need identical replicates, which exist only after an outer step, but \
                   `training.eval_every` 8 is not a multiple of the 5 local steps";
    assert!(errors.contains(message) && errors.contains("use a multiple of 5, such as `eval_every: 10`"), "{errors}");
    let errors = with(", save_every: 7", "").unwrap_err();
    assert!(
        errors.contains("checkpoints need identical replicates") && errors.contains("`save_every: 10`"),
        "{errors}"
    );
}

#[test]
fn settings_that_exclude_local_steps_are_errors() {
    let nvme = |what: &str, stage: u8| {
        format!("zero_optimization: {{stage: {stage}, {what}: {{device: nvme, nvme_path: /tmp}}}}")
    };
    for (training, more, key) in [
        (", reproducible: true", "", "training.reproducible"),
        (", ema: {decay: 0.9}", "", "training.ema"),
        (", spikes: {factor: 5}", "", "training.spikes"),
        ("", "flops_profiler: {enabled: true}", "flops_profiler.enabled"),
        ("", "memory_breakdown: true", "memory_breakdown"),
        (", gradient_noise_scale: {}", "", "training.gradient_noise_scale"),
        (", save_async: true", "", "training.save_async"),
        ("", "optimizer: {type: AdamWScheduleFree}", "optimizer"),
        ("", "fp16: {enabled: true}", "fp16.enabled"),
        ("", "bf16: {enabled: true, bf16_master_weights_and_grads: true}", "bf16.bf16_master_weights_and_grads"),
        ("", &nvme("offload_optimizer", 2), "zero_optimization.offload_optimizer.device"),
        ("", &nvme("offload_param", 3), "zero_optimization.offload_param.device"),
    ] {
        let errors = with(training, more).map(drop).unwrap_err();
        assert!(errors.contains(&format!("`training.local_steps` cannot be combined with `{key}`")), "{errors}");
    }
}
