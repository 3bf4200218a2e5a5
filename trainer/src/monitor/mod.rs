//! Monitors: what a run tells while it trains, each on a thread of its own, under DeepSpeed's names.

mod csv;
mod gpu;
mod machine;
pub(crate) mod metric;
mod mlflow;
mod prometheus;
mod tensorboard;
mod worker;

use std::path::{Path, PathBuf};
use std::time::Duration;

use machine::{Machine, News};
use metric::{Record, Scalar};
pub(crate) use worker::RunStatus;
use worker::{SLICE, Worker};

use zero_config::Config;
use zero_engine::Error;

/// So many times the end of a run waits for its monitors, all together: five seconds.
const SLICES: u32 = (5_000 / SLICE.as_millis()) as u32;

/// The monitors that are switched on. Dropped before their [end](Self::finish), they are told that the run has failed.
pub(crate) struct Monitors {
    workers: Vec<Worker>,
    machine: Option<Machine>,
    /// What was found at the start.
    said: Vec<String>,
    /// What is wrong with the machine's watch, not said yet.
    words: Vec<String>,
    has_ended: bool,
}

impl Monitors {
    /// Starts what the configuration asks for; never fails: what cannot be written is said later. An empty `output_path` is a folder in
    /// `run`. `resumed` are the samples after which the run goes on, if it does.
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
            workers.push(Worker::start("csv_monitor", csv::Csv::new(folder(csv, "csv_monitor"), resumed)));
        }
        if tensorboard.enabled {
            let sink = tensorboard::TensorBoard::new(folder(tensorboard, "tensorboard"), resumed);
            workers.push(Worker::start("tensorboard", sink));
        }
        // What is wrong with the address was said before.
        if let Ok(Some(uri)) = mlflow::tracking_uri(&config.mlflow) {
            let params = serde_json::to_value(config).map(|config| mlflow::flattened(&config)).unwrap_or_default();
            let sink = mlflow::Mlflow::new(&config.mlflow, uri, run.to_path_buf(), resumed.is_some(), params);
            workers.push(Worker::start("mlflow", sink));
        }
        if config.prometheus.enabled {
            let mut sink = prometheus::Prometheus::new(&config.prometheus, info(config));
            // Tried again later, if it cannot.
            if let Ok(address) = sink.listen() {
                said.push(format!("metrics: http://{address}/metrics"));
            }
            workers.push(Worker::start("prometheus", sink));
        }
        let interval = Duration::from_secs_f64(config.machine_monitor.interval_seconds);
        let machine = config.machine_monitor.enabled.then(|| Machine::start(interval));
        let machine = machine.and_then(|machine| {
            machine.map_err(|error| said.push(format!("`machine_monitor` has no thread: {error}"))).ok()
        });
        Self { workers, machine, said, words: vec![], has_ended: false }
    }

    /// What is to be said at the start.
    pub(crate) fn said(&self) -> &[String] {
        &self.said
    }

    /// What the machine did lately, if it is watched, and lines to be said of that; nothing where there is nothing new.
    pub(crate) fn of_machine(&mut self) -> (Vec<Scalar>, Vec<String>) {
        let News { sample, lines, words } = self.machine.as_ref().map(Machine::take).unwrap_or_default();
        self.words.extend(words);
        (sample, lines)
    }

    /// Hands a step to all; never waits for any. Gives back what there is to say of them.
    pub(crate) fn give(&mut self, record: &Record) -> Vec<String> {
        self.workers.iter().for_each(|worker| worker.give(record));
        self.words()
    }

    /// Ends all, and waits a few seconds for them. Gives back what there is to say of them.
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

/// What can be known to be wrong before a run begins.
///
/// # Errors
/// An address of a server that nothing can be written to.
pub(crate) fn check(config: &Config) -> Result<(), Error> {
    mlflow::tracking_uri(&config.mlflow).map(drop)
}

/// What tells runs apart.
fn info(config: &Config) -> Vec<(&'static str, String)> {
    vec![
        ("version", env!("CARGO_PKG_VERSION").to_string()),
        ("world_size", config.world_size.to_string()),
        ("zero_stage", u8::from(config.zero.stage).to_string()),
        ("dtype", config.working_dtype().to_string()),
        ("config", config.name.clone()),
    ]
}

impl Drop for Monitors {
    fn drop(&mut self) {
        if !self.has_ended {
            self.finish(RunStatus::Failed).iter().for_each(|word| eprintln!("warning: {word}"));
        }
    }
}
