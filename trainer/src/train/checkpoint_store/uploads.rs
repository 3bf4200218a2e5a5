//! Copies the checkpoints of a run to a store on a separate thread while the run trains. Only rank 0 does this.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use zero_checkpoint::{MANIFEST, Retention};
use zero_config::Config;
use zero_engine::{DataError, Error};

use super::super::saves::time;
use super::{CheckpointStore, HELP, KEY, failed};
use crate::data::Watch;
use crate::data::remote::{Download, waiting};
use crate::train::output::progress::Progress;

/// Prefix of the folders with the files to upload. They keep these files even if the run removes the checkpoint.
const KEPT: &str = ".uploading-";

/// The checkpoints that are being uploaded or wait for their upload.
pub(in super::super) struct Uploads {
    address: String,
    root: PathBuf,
    /// The channel to the thread. The thread ends when the channel is dropped.
    jobs: Option<Sender<Job>>,
    said: Receiver<Said>,
    thread: JoinHandle<()>,
    /// The newest checkpoint in the store.
    newest: Option<u64>,
    /// The error of the last upload, if it failed.
    failure: Option<zero_store::Error>,
}

/// A folder to upload.
struct Job {
    step: u64,
    folder: PathBuf,
    /// Decides which other checkpoints remain in the store.
    retention: Retention,
}

/// A message from the thread.
enum Said {
    Waits(String),
    Uploaded { step: u64, took: Duration },
    Left { step: u64 },
    Failed { step: u64, error: zero_store::Error },
}

/// How a run began.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Begun<'a> {
    /// Whether the run continues in its own folder.
    pub(in super::super) goes_on: bool,
    /// The address from which the run resumed, if it resumed from a store.
    pub(in super::super) address: Option<&'a str>,
    /// Number of steps that the run has completed.
    pub(in super::super) steps: u64,
}

impl Uploads {
    /// Starts copying the checkpoints of a run in the folder `out` to the configured store. First uploads the
    /// configuration, so that an unwritable store is detected before the run trains.
    ///
    /// # Errors
    /// Fails if another run has checkpoints in the store, if the store fails, if a file cannot be written, or if
    /// `watch` stops the upload.
    pub(in super::super) fn begin(
        config: &Config,
        retention: Retention,
        out: &Path,
        begun: Begun<'_>,
        progress: &Progress,
        watch: &dyn Watch,
    ) -> Result<Self, Error> {
        let address = config.training.checkpoint_store.as_deref().unwrap_or_default();
        let (store, download) = (CheckpointStore::new(address)?, Download::of(watch));
        let root = out.join("checkpoints");
        let listed = store.list(&download).map_err(failed(KEY))?;
        let steps = listed.complete();
        let is_own = begun.goes_on || begun.address.is_some_and(|from| store.holds(from));
        if let Some(&step) = steps.last()
            && !is_own
        {
            let message = format!("{} already exists", store.at(&zero_checkpoint::name(step)));
            let help = format!("choose another URL, or continue that run with --resume {}", store.address);
            return Err(Error::setting(KEY, message, help));
        }
        for aside in store.set_back(listed, begun.steps, &download).map_err(failed(KEY))? {
            progress.say(&format!("moved a checkpoint of a later step to {aside}"));
        }
        let resolved = out.join("resolved.yaml");
        store.stores.upload(&resolved, &store.at("resolved.yaml"), &download).map_err(failed(KEY))?;
        // Removes folders that a killed process left behind.
        for entry in fs::read_dir(&root).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(KEPT) {
                fs::remove_dir_all(entry.path()).map_err(Error::io(&entry.path()))?;
            }
        }
        let ((jobs, taken), (say, said)) = (mpsc::channel(), mpsc::channel());
        let worker = Worker { store: store.clone(), say };
        let thread = thread::Builder::new().name("upload".into()).spawn(move || worker.run(&taken));
        let thread = thread.map_err(Error::io(&root))?;
        let newest = steps.into_iter().rfind(|&step| step <= begun.steps);
        let mut uploads = Self { address: store.address, root, jobs: Some(jobs), said, thread, newest, failure: None };
        // An earlier attempt may have ended before it uploaded its checkpoint.
        let folder = uploads.root.join(zero_checkpoint::name(begun.steps));
        if newest != Some(begun.steps) && folder.join(MANIFEST).is_file() {
            uploads.add(begun.steps, &folder, retention, progress);
        }
        Ok(uploads)
    }

    /// Uploads a checkpoint in the background.
    pub(in super::super) fn add(&mut self, step: u64, folder: &Path, retention: Retention, progress: &Progress) {
        self.look(progress);
        let kept = self.root.join(format!("{KEPT}{}", zero_checkpoint::name(step)));
        match keep(folder, &kept) {
            Ok(()) => drop(self.jobs.as_ref().map(|jobs| jobs.send(Job { step, folder: kept, retention }))),
            Err(source) => {
                let error = zero_store::Error::Local { path: kept, source };
                self.heard(Said::Failed { step, error }, progress);
            }
        }
    }

    /// Shows the messages since the last call.
    pub(in super::super) fn look(&mut self, progress: &Progress) {
        while let Ok(said) = self.said.try_recv() {
            self.heard(said, progress);
        }
    }

    /// Waits until all checkpoints are in the store.
    ///
    /// # Errors
    /// Fails if the last checkpoint could not be uploaded.
    pub(in super::super) fn finish(mut self, progress: &Progress) -> Result<(), Error> {
        self.look(progress);
        self.jobs = None;
        if !self.thread.is_finished() {
            progress.say(&format!(
                "copying the last checkpoint to {}; a signal ends the run without this copy",
                self.address
            ));
        }
        while let Ok(said) = self.said.recv() {
            match said {
                Said::Failed { error, .. } => self.failure = Some(error),
                said => self.heard(said, progress),
            }
        }
        let Some(error) = self.failure.take() else { return Ok(()) };
        let message = format!("the last checkpoint in {} was not copied: {error}", self.root.display());
        let help = "when the store is available again, start the run with --resume auto, which copies the checkpoint";
        Err(Error::from(DataError::Store { message, help: Some(help) }).named(KEY, HELP))
    }

    fn heard(&mut self, said: Said, progress: &Progress) {
        match said {
            Said::Waits(warning) => progress.warn(&warning),
            Said::Uploaded { step, took } => {
                (self.newest, self.failure) = (Some(step), None);
                let name = zero_checkpoint::name(step);
                progress.say(&format!("copied {}/{name} in {}", self.address, time(took)));
            }
            Said::Left { step } => progress.say(&format!("step {step} was not copied: newer checkpoints were ready")),
            Said::Failed { step, error } => {
                let newest = self.newest.map_or("the store has no checkpoint yet".into(), |step| {
                    format!("the newest checkpoint in the store is step {step}")
                });
                progress.warn(&format!("cannot copy step {step}: {error}; training continues, {newest}"));
                self.failure = Some(error);
            }
        }
    }
}

/// Keeps the files of a folder under another name. Uses hard links instead of copies if the file system supports them.
fn keep(folder: &Path, kept: &Path) -> io::Result<()> {
    fs::create_dir(kept)?;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let (from, to) = (entry.path(), kept.join(entry.file_name()));
        fs::hard_link(&from, &to).or_else(|_| fs::copy(&from, &to).map(drop))?;
    }
    Ok(())
}

/// The thread that uploads checkpoints.
struct Worker {
    store: CheckpointStore,
    say: Sender<Said>,
}

impl Worker {
    fn run(self, jobs: &Receiver<Job>) {
        while let Ok(job) = jobs.recv() {
            // If uploads are slower than saves, skips the waiting checkpoints that the newest upload would remove from
            // the store.
            let mut waiting = vec![job];
            waiting.extend(jobs.try_iter());
            let steps: Vec<u64> = waiting.iter().map(|job| job.step).collect();
            let old = waiting.last().map_or(vec![], |newest| newest.retention.superfluous(&steps, newest.step));
            for Job { step, folder, retention } in waiting {
                let said = match old.contains(&step) {
                    true => Said::Left { step },
                    false => self.upload(step, &folder, retention),
                };
                // If the run has failed, nobody receives the message.
                let _ = (self.say.send(said), fs::remove_dir_all(&folder));
            }
        }
    }

    fn upload(&self, step: u64, folder: &Path, retention: Retention) -> Said {
        let started = Instant::now();
        match self.store.upload((step, folder), retention, self) {
            Ok(()) => Said::Uploaded { step, took: started.elapsed() },
            Err(error) => Said::Failed { step, error },
        }
    }
}

impl zero_store::Watch for Worker {
    fn progress(&self, _: u64, _: u64) {}

    fn waits(&self, problem: &zero_store::Error, left: Duration) {
        let _ = self.say.send(Said::Waits(waiting(problem, left)));
    }

    fn is_stopped(&self) -> bool {
        false
    }
}
