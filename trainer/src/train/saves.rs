//! When a run saves, and what it says about it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::progress::Progress;
use zero_engine::Ended;
use zero_engine::Engine;
use zero_engine::Error;
use zero_engine::format::bytes;

/// The checkpoints of a run.
pub(super) struct Saves {
    root: PathBuf,
    /// When the save that is under way began.
    begun: Option<Instant>,
    newest: Option<u64>,
}

impl Saves {
    /// Those of the run in folder `out`, which goes on from a checkpoint of a step, or from none.
    pub(super) fn new(out: &Path, from: Option<u64>) -> Self {
        Self { root: out.join("checkpoints"), begun: None, newest: from }
    }

    /// Saves, on the way: a disk that is full does not end training. A collective.
    pub(super) fn on_the_way(&mut self, engine: &mut Engine, state: Value, progress: &Progress) -> Result<(), Error> {
        let (step, began) = (engine.steps(), Instant::now());
        if engine.config().training.save_async {
            // Now, while it is known when that save began.
            engine.finish_save()?;
            self.look(engine, progress)?;
            match engine.save_checkpoint_in_background(&self.root, state) {
                Ok(_) => {
                    self.begun = Some(began);
                    progress.say(&format!("saving step {step} in the background: waited {}", time(began.elapsed())));
                    Ok(())
                }
                Err(error) => self.ended(Ended { step, result: Err(error) }, began, progress),
            }
        } else {
            let result = engine.save_checkpoint_with(&self.root, state);
            self.ended(Ended { step, result }, began, progress)
        }
    }

    /// Says how a save in the background ended, if one has.
    pub(super) fn look(&mut self, engine: &mut Engine, progress: &Progress) -> Result<(), Error> {
        let Some(ended) = engine.ended_save() else { return Ok(()) };
        let began = self.begun.take().unwrap_or_else(Instant::now);
        self.ended(ended, began, progress)
    }

    /// Saves, at the end: without this checkpoint the run would be lost. A collective.
    pub(super) fn last(&mut self, engine: &mut Engine, state: Value, progress: &Progress) -> Result<PathBuf, Error> {
        engine.finish_save()?;
        self.look(engine, progress)?;
        engine.save_checkpoint_with(&self.root, state).inspect_err(|_| {
            if let Some(newest) = self.newest {
                progress.warn(&format!("the last step is not saved; --resume auto goes on after step {newest}"));
            }
        })
    }

    fn ended(&mut self, ended: Ended, began: Instant, progress: &Progress) -> Result<(), Error> {
        match ended.result {
            Ok(folder) => {
                self.newest = Some(ended.step);
                progress.say(&format!("saved {} in {}", folder.display(), time(began.elapsed())));
                Ok(())
            }
            Err(error) if error.is_only_a_file() => {
                let newest = self.newest.map_or("there is none".into(), |step| format!("the newest is step {step}"));
                progress.warn(&format!("step {} is not saved: {error}; training goes on, {newest}", ended.step));
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// What a signal would cost: the bytes of a checkpoint, and how long writing them takes, going by how fast this rank writes a few
    /// of them now.
    pub(super) fn foretell(&self, engine: &Engine) -> String {
        let elements = engine.model().elements() * engine.zero().kinds().len();
        let total = (elements * size_of::<f32>()) as u64;
        match zero_checkpoint::write_rate(&self.root, total) {
            Ok(rate) => format!(
                "checkpoint: {}; SIGTERM or Ctrl-C saves one after the current step, in about {}, and stops",
                bytes(total),
                time(Duration::from_secs_f64(total as f64 / rate))
            ),
            Err(error) => format!("checkpoint: {}; its folder cannot be written now: {error}", bytes(total)),
        }
    }
}

fn time(duration: Duration) -> String {
    match duration.as_secs_f64() {
        seconds if seconds < 1e-3 => "1 ms".into(),
        seconds if seconds < 1.0 => format!("{:.0} ms", seconds * 1e3),
        seconds => format!("{seconds:.1} s"),
    }
}
