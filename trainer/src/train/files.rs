//! The files that rank 0 writes during training: the run's folder and the monitors.

use std::path::Path;

use zero_checkpoint::RunLock;

use super::folder::Folder;
use super::output::progress::Progress;
use super::restart::Restarts;
use crate::monitor::Monitors;
use zero_engine::Engine;
use zero_engine::Error;
use zero_engine::format::counted;

/// The run's folder and its monitors, on rank 0.
pub(super) struct Files {
    pub(super) folder: Folder,
    pub(super) monitors: Monitors,
    /// Number of consecutive steps, up to the latest step, that could not be logged.
    missing: u64,
}

impl Files {
    /// Opens the run's folder. With `goes_on`, the run continues in the folder; otherwise an earlier run there is moved
    /// aside. Takes the folder's lock, which the engine's saves use too. `logged` tells whether the run resumed or
    /// continues in its folder. In these cases, the monitors already have the run's earlier samples.
    pub(super) fn open(
        engine: &mut Engine,
        out: &Path,
        (job, restarts): (Option<&str>, &Restarts),
        goes_on: bool,
        logged: bool,
        progress: &Progress,
    ) -> Result<Self, Error> {
        let unusable = |error: Error| error.named("training.output_dir", "set this key or --out to a writable folder");
        let mut lock = RunLock::take(out).map_err(|error| unusable(error.into()))?;
        let folder = if goes_on {
            for aside in zero_checkpoint::set_back(&out.join("checkpoints"), engine.steps())? {
                progress.say(&format!("moved a checkpoint of a later step to {}", aside.display()));
            }
            Folder::resume(out, engine.steps())?
        } else {
            let (folder, moved) = Folder::new(out).map_err(unusable)?;
            if let Some(moved) = moved {
                progress.say(&format!("moved an earlier run to {}", moved.display()));
                // The lock file was moved together with the folder, so the new folder needs a new lock.
                lock = RunLock::take(out)?;
            }
            folder
        };
        engine.hold(lock);
        folder.mark(job, restarts)?;
        folder.resolved(engine.config())?;
        let mut monitors = Monitors::start(engine.config(), out, logged.then(|| engine.samples()));
        monitors.said().iter().for_each(|line| progress.say(line));
        Ok(Self { folder, monitors, missing: 0 })
    }

    /// Handles the result of logging a step. A full disk does not end training. One warning reports the first lost
    /// line, and a second warning reports that logging works again.
    pub(super) fn log(&mut self, step: u64, written: Result<(), Error>, progress: &Progress) -> Result<(), Error> {
        match written {
            Ok(()) if self.missing > 0 => {
                let missing = counted(self.missing as usize, "step is", "steps are");
                progress.warn(&format!("metrics.jsonl is writable again from step {step}; {missing} missing"));
                self.missing = 0;
            }
            Ok(()) => {}
            Err(error) if error.is_only_a_file() => {
                if self.missing == 0 {
                    progress.warn(&format!("cannot write step {step} to metrics.jsonl: {error}; training continues"));
                }
                self.missing += 1;
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }
}
