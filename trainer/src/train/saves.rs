//! Saves checkpoints during and after a run, and reports them.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;
use zero_checkpoint::patiently;

use super::checkpoint_store::Uploads;
use super::evaluation::Evaluation;
use super::output::progress::Progress;
use super::stopping::best::Best;
use crate::process::signals::Requests;
use zero_engine::Ended;
use zero_engine::Engine;
use zero_engine::Error;
use zero_engine::format::bytes;

/// The checkpoints of a run.
pub(super) struct Saves {
    root: PathBuf,
    /// When the current background save began.
    begun: Option<Instant>,
    newest: Option<u64>,
    pub(super) best: Best,
    /// Copies the checkpoints to a store, on rank 0.
    uploads: Option<Uploads>,
}

impl Saves {
    /// Creates the state for a run in the folder `out`. `from` is the step of the checkpoint from which the run
    /// resumes, if it resumes.
    pub(super) fn new(out: &Path, from: Option<u64>, best: Best, uploads: Option<Uploads>) -> Self {
        Self { root: out.join("checkpoints"), begun: None, newest: from, best, uploads }
    }

    /// Takes an evaluation, and returns whether a checkpoint must be saved because the evaluation is the best so far. A
    /// collective.
    pub(super) fn improves(
        &mut self,
        engine: &mut Engine,
        evaluation: &Evaluation,
        progress: &Progress,
    ) -> Result<bool, Error> {
        // The save for the last better evaluation may still fail. Until it has ended, the best evaluation is not known.
        if self.best.is_unsaved() {
            engine.finish_save()?;
            self.look(engine, progress)?;
        }
        let improves = self.best.improves(evaluation);
        engine.keep_checkpoint(self.best.step());
        Ok(improves)
    }

    /// Saves a checkpoint during training. A full disk causes a warning and does not end training. A collective.
    pub(super) fn on_the_way(&mut self, engine: &mut Engine, state: Value, progress: &Progress) -> Result<(), Error> {
        let (step, began) = (engine.steps(), Instant::now());
        if engine.config().training.save_async {
            // Finishes the earlier save first, because its start time is about to be overwritten.
            engine.finish_save()?;
            self.look(engine, progress)?;
            match engine.save_checkpoint_in_background(&self.root, state) {
                Ok(_) => {
                    self.begun = Some(began);
                    progress.say(&format!(
                        "saving step {step} in the background; training waited {}",
                        time(began.elapsed())
                    ));
                    Ok(())
                }
                Err(error) => self.ended(engine, Ended { step, result: Err(error) }, began, progress),
            }
        } else {
            let result = engine.save_checkpoint_with(&self.root, state);
            self.ended(engine, Ended { step, result }, began, progress)
        }
    }

    /// Reports completed background saves and uploads.
    pub(super) fn look(&mut self, engine: &mut Engine, progress: &Progress) -> Result<(), Error> {
        if let Some(uploads) = &mut self.uploads {
            uploads.look(progress);
        }
        let Some(ended) = engine.ended_save() else { return Ok(()) };
        let began = self.begun.take().unwrap_or_else(Instant::now);
        self.ended(engine, ended, began, progress)
    }

    /// Saves the final checkpoint. An error ends the run, because its result would be lost. A collective.
    pub(super) fn last(&mut self, engine: &mut Engine, state: Value, progress: &Progress) -> Result<PathBuf, Error> {
        engine.finish_save()?;
        self.look(engine, progress)?;
        let folder = engine.save_checkpoint_with(&self.root, state).inspect_err(|_| {
            if let Some(newest) = self.newest {
                progress.warn(&format!("the last step was not saved; --resume auto continues after step {newest}"));
            }
        })?;
        self.saved(engine, engine.steps(), &folder, progress);
        Ok(folder)
    }

    /// Handles a written checkpoint: links it if it is the best, and starts its upload.
    fn saved(&mut self, engine: &Engine, step: u64, folder: &Path, progress: &Progress) {
        self.newest = Some(step);
        if self.best.ended(step, true)
            && engine.communicator().rank() == 0
            && let Err(error) = self.best.link(step)
        {
            progress
                .warn(&format!("cannot link the best checkpoint, {}: {error}; training continues", folder.display()));
        }
        if let Some(uploads) = &mut self.uploads {
            uploads.add(step, folder, engine.retention(), progress);
        }
    }

    /// Waits until the checkpoints are in the store, if there is one. A signal ends the wait and the process. This is
    /// safe, because all checkpoints are on disk. A collective.
    pub(super) fn finish(&mut self, engine: &Engine, requests: &Requests, progress: &Progress) -> Result<(), Error> {
        if engine.config().training.checkpoint_store.is_none() {
            return Ok(());
        }
        requests.end_at_once();
        let uploads = self.uploads.take();
        patiently(&**engine.communicator(), || uploads.map_or(Ok(()), |uploads| uploads.finish(progress)))?
    }

    fn ended(&mut self, engine: &mut Engine, ended: Ended, began: Instant, progress: &Progress) -> Result<(), Error> {
        match ended.result {
            Ok(folder) => {
                progress.say(&format!("saved {} in {}", folder.display(), time(began.elapsed())));
                self.saved(engine, ended.step, &folder, progress);
                Ok(())
            }
            Err(error) if error.is_only_a_file() => {
                self.best.ended(ended.step, false);
                engine.keep_checkpoint(self.best.step());
                let newest = self.newest.map_or("the run has no checkpoint yet".into(), |step| {
                    format!("the newest checkpoint is step {step}")
                });
                progress.warn(&format!("cannot save step {}: {error}; training continues, {newest}", ended.step));
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Describes the cost of stopping by a signal: the bytes of a checkpoint, and the time to write it. The time is
    /// estimated from a small test write of this rank.
    pub(super) fn foretell(&self, engine: &Engine) -> String {
        let (layout, widths) = (engine.zero().layout(), engine.zero().widths());
        let total = layout.checkpoint_bytes(&widths);
        match zero_checkpoint::write_rate(&self.root, total) {
            Ok(rate) => format!(
                "checkpoint: {}; on SIGTERM or Ctrl-C, the run saves a checkpoint after the {}, in about {}, and stops",
                bytes(total),
                if engine.zero().outer().is_some() { "next outer step" } else { "current step" },
                time(Duration::from_secs_f64(total as f64 / rate))
            ),
            Err(error) => format!("checkpoint: {}; warning: its folder is not writable: {error}", bytes(total)),
        }
    }

    /// Returns a warning if the disk has less free space than a checkpoint needs. A save writes the new checkpoint
    /// before it removes an old one.
    pub(super) fn lack_of_space(&self, engine: &Engine) -> Option<String> {
        let total = engine.zero().layout().checkpoint_bytes(&engine.zero().widths());
        let free = zero_checkpoint::free_bytes(&self.root).ok().filter(|free| *free < total)?;
        let root = self.root.display();
        let (free, total) = (bytes(free), bytes(total));
        Some(format!("{root}: only {free} are free, but a checkpoint needs {total}; free some space, or set --out"))
    }
}

pub(super) fn time(duration: Duration) -> String {
    match duration.as_secs_f64() {
        seconds if seconds < 1e-3 => "1 ms".into(),
        seconds if seconds < 1.0 => format!("{:.0} ms", seconds * 1e3),
        seconds => format!("{seconds:.1} s"),
    }
}
