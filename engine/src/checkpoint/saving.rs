//! Saves and loads checkpoints of an engine, in the foreground or in the background.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use zero_checkpoint::{Background, CheckpointError, LossScale, Manifest, Progress, Retention, RunLock, Save, Snapshot};
use zero_comm::Communicator;
use zero_config::Config;
use zero_optim::{LossScaleState, LossScaler};
use zero_partition::ShardedState;

use crate::checkpoint::export::add_base;
use crate::checkpoint::start::same_keys;
use crate::engine::Engine;
use crate::error::Error;

/// The state of an engine's checkpoint saves.
#[derive(Default)]
pub(crate) struct Saving {
    /// The save in flight.
    background: Option<Background>,
    /// Result of the last background save, until [`Engine::ended_save`] takes it.
    ended: Option<Ended>,
    /// The memory to which background saves copy the state.
    memory: Snapshot,
    lock: Option<Arc<RunLock>>,
    /// The step that the caller passed to [`Engine::keep_checkpoint`].
    kept: Option<u64>,
}

/// The result of a background save.
#[derive(Debug)]
pub struct Ended {
    /// The step that was saved.
    pub step: u64,
    /// The checkpoint's folder, or the error; the result is the same on all ranks.
    pub result: Result<PathBuf, Error>,
}

impl Saving {
    /// Reserves the memory for the copy of the state if `training.save_async` is set.
    pub(crate) fn new(config: &Config, zero: &mut ShardedState) -> Self {
        let memory = if config.training.save_async { Snapshot::of(zero) } else { Snapshot::default() };
        zero.count_copy(memory.bytes());
        Self { memory, ..Self::default() }
    }
}

impl Engine {
    /// Makes every save check the lock of the run's folder before it commits.
    pub fn hold(&mut self, lock: RunLock) {
        self.saving.lock = Some(Arc::new(lock));
    }

    /// Protects the checkpoint of `step` from removal by later saves. Replaces the step of an earlier call.
    pub fn keep_checkpoint(&mut self, step: Option<u64>) {
        self.saving.kept = step;
    }

    /// Returns which checkpoints a save keeps.
    #[must_use]
    pub fn retention(&self) -> Retention {
        let training = &self.config.training;
        let (keep_last, keep_every) = (training.keep_last, training.keep_every as u64);
        Retention { keep_last, keep_every, keep_step: self.saving.kept }
    }

    fn save(&self, state: Value) -> Save {
        Save {
            step: self.step,
            samples: self.samples,
            loss_scale: self.scaler.filter(LossScaler::is_dynamic).map(|scaler| saved(scaler.state())),
            zero_stage: self.settings.layout.zero_stage.number(),
            engine: state,
            config: crate::checkpoint::export::recorded(&self.config),
            retention: self.retention(),
            lock: self.saving.lock.clone(),
        }
    }

    /// Writes `root/step-…`. Collective. The checkpoint also stores `state`, which [`Engine::load_checkpoint`] returns.
    /// Waits for a background save first.
    ///
    /// # Errors
    /// Fails on every rank if one rank cannot write. Older checkpoints in the folder stay valid.
    pub fn save_checkpoint_with(&mut self, root: impl AsRef<Path>, state: Value) -> Result<PathBuf, Error> {
        self.has_own_weights("a checkpoint")?;
        self.has_equal_replicates("a checkpoint")?;
        self.finish_save()?;
        Ok(zero_checkpoint::save(root.as_ref(), &self.zero, &*self.comm, &self.save(state))?)
    }

    /// Writes `root/step-…` without caller state. Collective.
    ///
    /// # Errors
    /// Fails in the same cases as [`Engine::save_checkpoint_with`].
    pub fn save_checkpoint(&mut self, root: impl AsRef<Path>) -> Result<PathBuf, Error> {
        self.save_checkpoint_with(root, Value::Null)
    }

    /// Copies the state, and writes `root/step-…` while the next steps train. Collective. Returns how long this rank
    /// waited for the copy, and for the previous background save if it was still in flight. [`Engine::ended_save`]
    /// returns the result.
    ///
    /// The copy takes 4 bytes per element that this rank saves: its shard of the parameters and of each optimizer
    /// state. With `training.save_async` this memory is reserved from the start, and plans include it.
    ///
    /// # Errors
    /// Fails on every rank if the folder cannot be created or the previous save failed.
    pub fn save_checkpoint_in_background(&mut self, root: impl AsRef<Path>, state: Value) -> Result<Duration, Error> {
        let started = std::time::Instant::now();
        if self.zero.outer().is_some() {
            let message = "saving in the background is not implemented for local steps";
            return Err(Error::setting("training.local_steps", message, "use `Engine::save_checkpoint_with`"));
        }
        self.has_own_weights("a checkpoint")?;
        self.has_equal_replicates("a checkpoint")?;
        self.finish_save()?;
        let memory = std::mem::take(&mut self.saving.memory);
        let (save, comm) = (self.save(state), self.comm.clone());
        let background = Background::begin(root.as_ref(), &self.zero, &*comm, save, memory)?;
        self.saving.background = Some(background);
        Ok(started.elapsed())
    }

    /// Returns the result of a background save that ended since the last call. Call it after each step.
    pub fn ended_save(&mut self) -> Option<Ended> {
        self.saving.ended.take()
    }

    /// Waits for a background save. Collective. [`Engine::ended_save`] then returns its result.
    ///
    /// # Errors
    /// Fails if a rank is lost.
    pub fn finish_save(&mut self) -> Result<(), Error> {
        let Some(background) = self.saving.background.take() else { return Ok(()) };
        let step = background.step();
        let result = background.finish(&*self.comm, &mut self.saving.memory);
        self.end(step, result)
    }

    /// Advances a background save. Called after each step.
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

    /// Bytes that this rank writes to a checkpoint: its shard of the parameters and of each optimizer state, in f32.
    #[must_use]
    pub fn checkpoint_bytes(&self) -> u64 {
        (Snapshot::elements(&self.zero) * size_of::<f32>()) as u64
    }

    /// Compares parameters and optimizer state that are replicated on several ranks. Collective, between steps.
    /// Replicates that train independently (`training.local_steps`) are compared with each other only directly after an
    /// outer step.
    ///
    /// # Errors
    /// Fails if a rank differs; the error names the rank and the tensor.
    pub fn compare_replicas(&self) -> Result<(), Error> {
        Ok(self.zero.compare_replicas(self.replicates_are_equal())?)
    }

    /// Continues from a checkpoint folder (`…/step-00000100`), written under any layout. Collective. Returns the state
    /// that was saved with it.
    ///
    /// # Errors
    /// Fails on every rank if one rank cannot read the checkpoint, because the checkpoint is missing, is damaged or
    /// belongs to another model.
    pub fn load_checkpoint(&mut self, folder: impl AsRef<Path>) -> Result<Value, Error> {
        self.load_with(folder.as_ref(), zero_checkpoint::load)
    }

    /// Loads the weights of a checkpoint to evaluate them. The configuration may set a different optimizer than the
    /// saved run, such as that of [`Config::for_evaluation`](zero_config::Config::for_evaluation), which has no states.
    /// Collective.
    ///
    /// # Errors
    /// Fails in the same cases as [`Engine::load_checkpoint`], except those of the optimizer.
    pub fn load_weights(&mut self, folder: impl AsRef<Path>) -> Result<Value, Error> {
        self.load_with(folder.as_ref(), zero_checkpoint::load_to_evaluate)
    }

    fn load_with(
        &mut self,
        folder: &Path,
        load: fn(&Path, &mut ShardedState, &dyn Communicator) -> Result<Manifest, CheckpointError>,
    ) -> Result<Value, Error> {
        self.finish_save()?;
        // If the manifest cannot be read, the collective call below returns the error.
        if let Ok(Manifest { config: saved, .. }) = Manifest::read(folder) {
            // A checkpoint without adapters has other parameters, so the load below rejects it.
            if let Some(adapter) = self.config.adapter.as_ref().filter(|_| !saved["adapter"].is_null()) {
                same_keys(adapter, &saved["adapter"], &folder.join("manifest.json"))?;
            }
            if !saved.is_null() && !has_same_base(&self.config, &saved) {
                let message = format!("the checkpoint {} was trained with another base model", folder.display());
                let help = match saved["mup"].is_null() {
                    true => "remove the section: the checkpoint has no `mup` section",
                    false => "use the checkpoint's `mup` section",
                };
                return Err(Error::setting("mup", message, help));
            }
        }
        let manifest = load(folder, &mut self.zero, &*self.comm)?;
        (self.step, self.averaged) = (manifest.step, manifest.step);
        self.samples = manifest.samples;
        self.scaler = self.settings.loss_scaling.map(LossScaler::new);
        // The checkpoint of a run in a different dtype has no loss scale. Start with the initial scale.
        if let (Some(scaler), Some(saved)) = (&mut self.scaler, manifest.loss_scale) {
            scaler.restore(restored(saved));
        }
        Ok(manifest.engine)
    }

    /// Continues from the newest checkpoint under `root`, or returns `None` if there is none. Collective.
    ///
    /// # Errors
    /// Fails in the same cases as [`Engine::load_checkpoint`].
    pub fn resume(&mut self, root: impl AsRef<Path>) -> Result<Option<PathBuf>, Error> {
        let Some(folder) = zero_checkpoint::newest(root.as_ref())? else { return Ok(None) };
        self.load_checkpoint(&folder)?;
        Ok(Some(folder))
    }
}

/// Returns whether the `mup` section of a checkpoint describes the configured base model, even if it uses other keys to
/// do so.
fn has_same_base(config: &Config, saved: &Value) -> bool {
    if saved["mup"].is_null() || config.mup.is_none() {
        return saved["mup"].is_null() && config.mup.is_none();
    }
    let mut sections = json!({"train_micro_batch_size_per_gpu": 1, "model": config.model});
    add_base(&mut sections, saved);
    Config::parse("manifest.json", sections.to_string()).is_ok_and(|saved| saved.base_model() == config.base_model())
}

fn saved(state: LossScaleState) -> LossScale {
    let LossScaleState { scale, steps, last_overflow, hysteresis } = state;
    LossScale { scale, steps, last_overflow, hysteresis }
}

fn restored(saved: LossScale) -> LossScaleState {
    let LossScale { scale, steps, last_overflow, hysteresis } = saved;
    LossScaleState { scale, steps, last_overflow, hysteresis }
}
