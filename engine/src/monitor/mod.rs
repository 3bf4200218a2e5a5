//! DeepSpeed's monitors: the same tags and file names, over the number of samples seen.

mod csv;
mod tensorboard;

use std::path::{Path, PathBuf};

use crate::error::Error;

/// One value of a step, under DeepSpeed's tag.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scalar {
    /// For example `Train/Samples/train_loss`.
    pub tag: &'static str,
    /// Samples seen so far.
    pub samples: u64,
    /// The value.
    pub value: f64,
}

/// Writers of the monitors that are switched on.
#[derive(Debug, Default)]
pub struct Monitors {
    csv: Option<csv::Writer>,
    tensorboard: Option<tensorboard::Writer>,
}

impl Monitors {
    /// Opens what the configuration asks for. An empty `output_path` is a folder in `run`.
    ///
    /// # Errors
    /// If a file cannot be created.
    pub fn open(config: &zero_config::Config, run: &Path) -> Result<Self, Error> {
        let folder = |monitor: &zero_config::Monitor, own: &str| {
            let base = match monitor.output_path.as_str() {
                "" => run.join(own),
                path => PathBuf::from(path),
            };
            base.join(&monitor.job_name)
        };
        let csv = &config.csv_monitor;
        let tensorboard = &config.tensorboard;
        Ok(Self {
            csv: csv.enabled.then(|| csv::Writer::open(folder(csv, "csv_monitor"))).transpose()?,
            tensorboard: tensorboard
                .enabled
                .then(|| tensorboard::Writer::open(folder(tensorboard, "tensorboard")))
                .transpose()?,
        })
    }

    /// Writes the values of one step.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn write(&mut self, scalars: &[Scalar]) -> Result<(), Error> {
        if let Some(csv) = &mut self.csv {
            csv.write(scalars)?;
        }
        if let Some(tensorboard) = &mut self.tensorboard {
            tensorboard.write(scalars)?;
        }
        Ok(())
    }
}
