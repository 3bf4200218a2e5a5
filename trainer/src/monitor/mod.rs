//! Monitors export the metrics of a run under DeepSpeed's names while it trains. Each monitor has its own thread.

mod csv;
mod gpu;
mod machine;
pub(crate) mod metric;
mod mlflow;
mod prometheus;
mod server;
mod tensorboard;
mod wandb;
mod worker;

use std::path::{Path, PathBuf};
use std::time::Duration;

use machine::{Machine, News};
use metric::{Record, Scalar};
pub(crate) use worker::RunStatus;
use worker::{SLICE, Worker};

use zero_config::Config;
use zero_engine::Error;
use zero_engine::printed::tell;

/// Number of [`SLICE`]s that a run waits at its end for all monitors together: five seconds.
const SLICES: u32 = (5_000 / SLICE.as_millis()) as u32;

/// The enabled monitors. If dropped before [`finish`](Self::finish), they report that the run has failed.
pub(crate) struct Monitors {
    workers: Vec<Worker>,
    machine: Option<Machine>,
    /// Lines to print that `said` has not returned yet.
    said: Vec<String>,
    /// Warnings about `machine_monitor` that were not printed yet.
    words: Vec<String>,
    has_ended: bool,
}

impl Monitors {
    /// Starts the configured monitors. Never fails: a monitor that cannot write reports this later. An empty
    /// `output_path` selects a folder in `run`. `resumed` is the number of samples at which the run resumes, or `None`
    /// for a new run.
    pub(crate) fn start(config: &Config, run: &Path, resumed: Option<u64>) -> Self {
        let folder = |monitor: &zero_config::Monitor, own: &str| {
            let base = match monitor.output_path.as_str() {
                "" => run.join(own),
                path => PathBuf::from(path),
            };
            base.join(&monitor.job_name)
        };
        let (mut workers, mut said) = (vec![], vec![]);
        let (csv, tensorboard) = (&config.csv_monitor, &config.tensorboard);
        if csv.enabled {
            workers.push(Worker::start(
                "csv_monitor",
                csv::Csv::new(folder(csv, "csv_monitor"), run.to_path_buf(), resumed),
            ));
        }
        if tensorboard.enabled {
            let sink = tensorboard::TensorBoard::new(folder(tensorboard, "tensorboard"), resumed);
            workers.push(Worker::start("tensorboard", sink));
        }
        // [`check`] has already reported an unusable address.
        if let Ok(Some(uri)) = mlflow::tracking_uri(&config.mlflow) {
            let params = serde_json::to_value(config).map(|config| mlflow::flattened(&config)).unwrap_or_default();
            let sink = mlflow::Mlflow::new(&config.mlflow, uri, run.to_path_buf(), resumed.is_some(), params);
            workers.push(Worker::start("mlflow", sink));
        }
        if let Ok(Some(account)) = wandb::account(&config.wandb) {
            let values = serde_json::to_value(config).unwrap_or_default();
            let sink = wandb::Wandb::new(account, run.to_path_buf(), resumed, &values);
            workers.push(Worker::start("wandb", sink));
        }
        if config.prometheus.enabled {
            let mut sink = prometheus::Prometheus::new(&config.prometheus, info(config));
            // If this fails, the monitor's thread tries again later.
            if let Ok(address) = sink.listen() {
                said.push(format!("metrics: http://{address}/metrics"));
            }
            workers.push(Worker::start("prometheus", sink));
        }
        let interval = Duration::from_secs_f64(config.machine_monitor.interval_seconds);
        let machine = config.machine_monitor.enabled.then(|| Machine::start(interval));
        let machine = machine.and_then(|machine| {
            machine.map_err(|error| said.push(format!("`machine_monitor` cannot start its thread: {error}"))).ok()
        });
        Self { workers, machine, said, words: vec![], has_ended: false }
    }

    /// Returns the new lines to print since the last call.
    pub(crate) fn said(&mut self) -> Vec<String> {
        let own = std::mem::take(&mut self.said);
        own.into_iter().chain(self.workers.iter().flat_map(Worker::lines)).collect()
    }

    /// Returns the newest values of `machine_monitor`. Returns none if there are no new values.
    pub(crate) fn of_machine(&mut self) -> Vec<Scalar> {
        let News { sample, lines, words } = self.machine.as_ref().map(Machine::take).unwrap_or_default();
        self.said.extend(lines);
        self.words.extend(words);
        sample
    }

    /// Passes a step to all monitors, without waiting. Returns warnings to print.
    pub(crate) fn give(&mut self, record: &Record) -> Vec<String> {
        self.workers.iter().for_each(|worker| worker.give(record));
        self.words()
    }

    /// Ends all monitors and waits up to five seconds for them. Returns warnings to print.
    pub(crate) fn finish(&mut self, outcome: RunStatus) -> Vec<String> {
        self.has_ended = true;
        self.workers.iter().for_each(|worker| worker.end(outcome));
        let mut slices = SLICES;
        self.workers.iter().for_each(|worker| worker.wait(&mut slices));
        self.words()
    }

    fn words(&mut self) -> Vec<String> {
        let own = std::mem::take(&mut self.words);
        own.into_iter().chain(self.workers.iter().flat_map(Worker::words)).collect()
    }
}

/// Checks the configuration of the monitors before a run begins.
///
/// # Errors
/// Fails if the address of a monitor's server or the API key of its account is missing or unusable.
pub(crate) fn check(config: &Config) -> Result<(), Error> {
    mlflow::tracking_uri(&config.mlflow)?;
    wandb::account(&config.wandb).map(drop)
}

/// Returns the labels that distinguish runs.
fn info(config: &Config) -> Vec<(&'static str, String)> {
    vec![
        ("version", env!("CARGO_PKG_VERSION").to_string()),
        ("world_size", config.world_size.to_string()),
        ("zero_stage", config.zero.stage.number().to_string()),
        ("dtype", config.working_dtype().to_string()),
        ("config", config.name.clone()),
    ]
}

impl Drop for Monitors {
    fn drop(&mut self) {
        if !self.has_ended {
            self.finish(RunStatus::Failed).iter().for_each(|word| tell(&format!("warning: {word}")));
        }
    }
}
