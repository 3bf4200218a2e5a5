//! Configuration keys that only a training loop applies; an engine alone ignores them.

use std::sync::Once;

use zero_comm::launcher_environment::LauncherEnvironment;
use zero_config::{Config, Nonfinite};

use crate::printed::tell;

/// Keys that count as set whenever the configuration contains them, whatever their value is.
const WRITTEN: [&str; 13] = [
    "training.max_steps",
    "training.epochs",
    "training.eval_batches",
    "training.save_last",
    "training.output_dir",
    "training.ema.evaluate",
    "training.max_skipped_steps",
    "training.compare_replicas_every",
    "training.dataloader_num_workers",
    "training.dataloader_prefetch_factor",
    "steps_per_print",
    "log_level",
    "dataloader_drop_last",
];

/// Returns the keys of the configuration that only a training loop applies.
pub(super) fn set(config: &Config) -> Vec<&'static str> {
    let training = &config.training;
    let active = [
        ("training.eval_every", training.eval_every > 0),
        ("training.save_every", training.save_every > 0),
        ("training.keep_best", training.keep_best.is_some()),
        ("training.early_stopping", training.early_stopping.is_some()),
        ("training.spikes", training.spikes.is_some()),
        ("training.nonfinite", training.nonfinite == Nonfinite::Stop),
        ("training.sample", training.sample.is_some()),
        ("training.checkpoint_store", training.checkpoint_store.is_some()),
        ("training.trace", training.trace),
        ("csv_monitor", config.csv_monitor.enabled),
        ("tensorboard", config.tensorboard.enabled),
        ("mlflow", config.mlflow.enabled),
        ("wandb", config.wandb.enabled),
        ("prometheus", config.prometheus.enabled),
        ("machine_monitor", config.machine_monitor.enabled),
        ("flops_profiler", config.flops_profiler.enabled),
        ("comms_logger", config.comms_logger.enabled),
        ("wall_clock_breakdown", config.wall_clock_breakdown),
        ("memory_breakdown", config.memory_breakdown),
        ("dump_state", config.dump_state),
        ("launcher.max_restarts", config.launcher.max_restarts > 0),
        ("data", config.data.is_some()),
        ("data_efficiency", config.data_efficiency.curriculum().is_some()),
    ];
    let written = WRITTEN.into_iter().filter(|key| config.origins.is_written(key));
    written.chain(active.into_iter().filter(|(_, is_set)| *is_set).map(|(key, _)| key)).collect()
}

/// Warns if the configuration asks for several ranks, but no launcher has started them.
pub(super) fn warn_without_launcher(config: &Config, place: &LauncherEnvironment) {
    let ranks = config.launcher.num_processes;
    if ranks > 1 && config.origins.is_written("launcher.num_processes") && *place == LauncherEnvironment::alone() {
        tell(&format!(
            "warning: the run has 1 rank, although `launcher.num_processes` is {ranks}: `Engine` starts no processes\n  \
             help: start the program with `zero-train launch -n {ranks} PROGRAM`, or use `Trainer`"
        ));
    }
}

/// Warns once, on rank 0, that the engine alone ignores these keys.
pub(super) fn warn(config: &Config, rank: usize) {
    static WARNED: Once = Once::new();
    let keys = set(config);
    if rank == 0 && !keys.is_empty() {
        let keys = keys.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
        WARNED.call_once(|| {
            tell(&format!(
                "warning: `Engine` ignores {keys}: only a training loop can apply them\n  \
                 help: use `Trainer`, or remove the keys that your own training loop does not apply"
            ));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_the_training_loop_are_found_unless_default() {
        let found = |text: &str| set(&Config::parse("ds.yaml", text).unwrap());
        assert_eq!(
            found("train_batch_size: 2\ntraining: {seed: 3, keep_last: 1}\ncsv_monitor: {enabled: false}"),
            [""; 0]
        );
        let text = "train_batch_size: 2\ntraining: {max_steps: 3, save_every: 2}\ncsv_monitor: {enabled: true}";
        assert_eq!(found(text), ["training.max_steps", "training.save_every", "csv_monitor"]);
        let text = "train_batch_size: 2\ntraining: {ema: {decay: 0.9, evaluate: false}}\nlog_level: warning";
        assert_eq!(found(text), ["training.ema.evaluate", "log_level"]);
        let text = "train_batch_size: 2\ntraining: {checkpoint_store: 's3://bucket/run', compare_replicas_every: 5, trace: true}
launcher: {max_restarts: 2}\nwall_clock_breakdown: true\ncomms_logger: {enabled: true}";
        let expected = [
            "training.compare_replicas_every",
            "training.checkpoint_store",
            "training.trace",
            "comms_logger",
            "wall_clock_breakdown",
            "launcher.max_restarts",
        ];
        assert_eq!(found(text), expected);
    }
}
