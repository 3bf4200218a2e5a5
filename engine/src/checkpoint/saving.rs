//! Checkpoints of an engine: written while the ranks wait or while they train on, and read.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use zero_checkpoint::{Background, LossScale, Progress, RunLock, Save, Snapshot};
use zero_config::Config;
use zero_optim::{LossScaleState, LossScaler};
use zero_partition::ShardedState;

use crate::engine::Engine;
use crate::error::Error;

/// What an engine needs to save.
#[derive(Default)]
pub(crate) struct Saving {
    /// A save that is under way.
    background: Option<Background>,
    /// How the last one in the background ended, until somebody asks.
    ended: Option<Ended>,
    /// Where state is copied to that is saved in the background.
    memory: Snapshot,
    lock: Option<Arc<RunLock>>,
}

/// How a save in the background ended.
#[derive(Debug)]
pub struct Ended {
    /// The step that was to be saved.
    pub step: u64,
    /// The checkpoint's folder, or why there is none; the same on all ranks.
    pub result: Result<PathBuf, Error>,
}

impl Saving {
    /// Reserves what saving will need: the memory of a copy, with `training.save_async`.
    pub(crate) fn new(config: &Config, zero: &mut ShardedState) -> Self {
        let memory = if config.training.save_async { Snapshot::of(zero) } else { Snapshot::default() };
        zero.count_copy(memory.bytes());
        Self { memory, ..Self::default() }
    }
}

impl Engine {
    /// Makes saves look after the lock of a run's folder before they are committed.
    pub fn hold(&mut self, lock: RunLock) {
        self.saving.lock = Some(Arc::new(lock));
    }

    fn save(&self, state: Value) -> Save {
        Save {
            step: self.step,
            samples: self.samples,
            loss_scale: self.scaler.filter(LossScaler::is_dynamic).map(|scaler| saved(scaler.state())),
            zero_stage: self.settings.layout.zero_stage.number(),
            engine: state,
            config: crate::checkpoint::export::recorded(&self.config),
            keep_last: self.config.training.keep_last,
            keep_every: self.config.training.keep_every as u64,
            lock: self.saving.lock.clone(),
        }
    }

    /// Writes `root/step-…`; a collective. `state` is kept with it, for [`Engine::load_checkpoint`] to give back. A save in the
    /// background is waited for first.
    ///
    /// # Errors
    /// On every rank if one cannot write; an older checkpoint of the folder stays.
    pub fn save_checkpoint_with(&mut self, root: impl AsRef<Path>, state: Value) -> Result<PathBuf, Error> {
        self.finish_save()?;
        Ok(zero_checkpoint::save(root.as_ref(), &self.zero, &*self.comm, &self.save(state))?)
    }

    /// Writes `root/step-…`; a collective.
    ///
    /// # Errors
    /// As [`Engine::save_checkpoint_with`].
    pub fn save_checkpoint(&mut self, root: impl AsRef<Path>) -> Result<PathBuf, Error> {
        self.save_checkpoint_with(root, Value::Null)
    }

    /// Copies the state, and writes `root/step-…` while the next steps are trained; a collective. Returns how long this rank
    /// waited: for the copy, and for the save before it if that is still under way. [`Engine::ended_save`] tells how it ended.
    ///
    /// The copy takes 4 bytes for each element that the rank saves: of its shard of the parameters, and of each optimizer state.
    /// With `training.save_async` they are reserved, and planned, from the beginning.
    ///
    /// # Errors
    /// On every rank if the folder cannot be made, or the save before failed.
    pub fn save_checkpoint_in_background(&mut self, root: impl AsRef<Path>, state: Value) -> Result<Duration, Error> {
        let started = std::time::Instant::now();
        self.finish_save()?;
        let memory = std::mem::take(&mut self.saving.memory);
        let (save, comm) = (self.save(state), self.comm.clone());
        let background = Background::begin(root.as_ref(), &self.zero, &*comm, save, memory)?;
        self.saving.background = Some(background);
        Ok(started.elapsed())
    }

    /// How a save in the background ended since the last call: it is asked after each step.
    pub fn ended_save(&mut self) -> Option<Ended> {
        self.saving.ended.take()
    }

    /// Waits for a save in the background; a collective. The result is [`Engine::ended_save`]'s.
    ///
    /// # Errors
    /// If a rank is lost.
    pub fn finish_save(&mut self) -> Result<(), Error> {
        let Some(background) = self.saving.background.take() else { return Ok(()) };
        let step = background.step();
        let result = background.finish(&*self.comm, &mut self.saving.memory);
        self.end(step, result)
    }

    /// Helps a save in the background along, after a step.
    pub(crate) fn look_after_save(&mut self) -> Result<(), Error> {
        let Some(background) = self.saving.background.take() else { return Ok(()) };
        let step = background.step();
        match background.poll(&*self.comm, &mut self.saving.memory)? {
            Progress::Saving(background) => {
                self.saving.background = Some(background);
                Ok(())
            }
            Progress::Over(result) => self.end(step, result),
        }
    }

    fn end(&mut self, step: u64, result: Result<PathBuf, zero_checkpoint::CheckpointError>) -> Result<(), Error> {
        match result.map_err(Error::from) {
            Err(lost @ Error::Comm(_)) => Err(lost),
            result => {
                self.saving.ended = Some(Ended { step, result });
                Ok(())
            }
        }
    }

    /// Bytes of this rank's part of a checkpoint: of its shard of the parameters, and of each optimizer state, in f32.
    #[must_use]
    pub fn checkpoint_bytes(&self) -> u64 {
        (Snapshot::elements(&self.zero) * size_of::<f32>()) as u64
    }

    /// Compares what ranks hold alike, parameters and optimizer state; a collective, between steps.
    ///
    /// # Errors
    /// If a rank differs, by name.
    pub fn compare_replicas(&self) -> Result<(), Error> {
        Ok(self.zero.compare_replicas()?)
    }

    /// Continues from a checkpoint's folder (`…/step-00000100`), written under any layout; a collective. Gives back the state
    /// that was saved with it.
    ///
    /// # Errors
    /// On every rank if one cannot read: missing, damaged, or of another model.
    pub fn load_checkpoint(&mut self, folder: impl AsRef<Path>) -> Result<Value, Error> {
        self.finish_save()?;
        let manifest = zero_checkpoint::load(folder.as_ref(), &mut self.zero, &*self.comm)?;
        self.step = manifest.step;
        self.samples = manifest.samples;
        self.scaler = self.settings.loss_scaling.map(LossScaler::new);
        // One that was trained in another dtype has none: then the scale begins as in a new run.
        if let (Some(scaler), Some(saved)) = (&mut self.scaler, manifest.loss_scale) {
            scaler.restore(restored(saved));
        }
        Ok(manifest.engine)
    }

    /// Continues from the newest checkpoint under `root`, if there is one; a collective.
    ///
    /// # Errors
    /// As [`Engine::load_checkpoint`].
    pub fn resume(&mut self, root: impl AsRef<Path>) -> Result<Option<PathBuf>, Error> {
        let Some(folder) = zero_checkpoint::newest(root.as_ref())? else { return Ok(None) };
        self.load_checkpoint(&folder)?;
        Ok(Some(folder))
    }
}

fn saved(state: LossScaleState) -> LossScale {
    let LossScaleState { scale, steps, last_overflow, hysteresis } = state;
    LossScale { scale, steps, last_overflow, hysteresis }
}

fn restored(saved: LossScale) -> LossScaleState {
    let LossScale { scale, steps, last_overflow, hysteresis } = saved;
    LossScaleState { scale, steps, last_overflow, hysteresis }
}
