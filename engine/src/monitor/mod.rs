//! Monitors: what a run tells while it trains, each on a thread of its own, under DeepSpeed's names.

mod csv;
pub(crate) mod metric;
mod prometheus;
mod tensorboard;
mod worker;

use std::path::{Path, PathBuf};

use metric::Record;
pub(crate) use worker::Outcome;
use worker::{SLICE, Worker};
use zero_config::Config;

/// So many times the end of a run waits for its monitors, all together: five seconds.
const SLICES: u32 = (5_000 / SLICE.as_millis()) as u32;

/// The monitors that are switched on. Dropped before their [end](Self::finish), they are told that the run has failed.
pub(crate) struct Monitors {
    workers: Vec<Worker>,
    /// What was found at the start.
    said: Vec<String>,
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
        if config.prometheus.enabled {
            let mut sink = prometheus::Prometheus::new(&config.prometheus, info(config));
            // Tried again later, if it cannot.
            if let Ok(address) = sink.listen() {
                said.push(format!("metrics: http://{address}/metrics"));
            }
            workers.push(Worker::start("prometheus", sink));
        }
        Self { workers, said, has_ended: false }
    }

    /// What is to be said at the start.
    pub(crate) fn said(&self) -> &[String] {
        &self.said
    }

    /// Hands a step to all; never waits for any. Gives back what there is to say of them.
    pub(crate) fn give(&self, record: &Record) -> Vec<String> {
        self.workers.iter().for_each(|worker| worker.give(record));
        self.words()
    }

    /// Ends all, and waits a few seconds for them. Gives back what there is to say of them.
    pub(crate) fn finish(&mut self, outcome: Outcome) -> Vec<String> {
        self.has_ended = true;
        self.workers.iter().for_each(|worker| worker.end(outcome));
        let mut slices = SLICES;
        self.workers.iter().for_each(|worker| worker.wait(&mut slices));
        self.words()
    }

    fn words(&self) -> Vec<String> {
        self.workers.iter().flat_map(Worker::words).collect()
    }
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
            self.finish(Outcome::Failed).iter().for_each(|word| eprintln!("warning: {word}"));
        }
    }
}
