//! Writes a checkpoint, either while the ranks wait or in the background.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use zero_comm::Communicator;
use zero_partition::ShardedState;

use crate::commit::{self, commit, exchange, unfinished};
use crate::error::CheckpointError;
use crate::folders::name;
use crate::layout::{Shard, entries};
use crate::local;
use crate::lock::RunLock;
use crate::manifest::{FORMAT, LossScale, Manifest, ScheduleFreeSums, VERSION};
use crate::retention::Retention;
use crate::shard::{self, State, Written};
use crate::snapshot::Snapshot;
use crate::together::{any, patiently, together};

/// Metadata of a checkpoint, and the retention policy for older ones.
#[derive(Debug, Clone)]
pub struct Save {
    /// Number of optimizer steps of the run, including skipped ones.
    pub step: u64,
    /// Number of samples trained on.
    pub samples: u64,
    /// State of the dynamic loss scale in f16 training.
    pub loss_scale: Option<LossScale>,
    /// ZeRO stage of this run.
    pub zero_stage: u8,
    /// Other state of the engine.
    pub engine: serde_json::Value,
    /// Model and tokenizer settings of the configuration, used by an export.
    pub config: serde_json::Value,
    /// Decides which older checkpoints remain.
    pub retention: Retention,
    /// Lock of the run's folder, checked before the checkpoint gets its final name.
    pub lock: Option<Arc<RunLock>>,
}

/// Writes `root/step-…` atomically and returns its path. Collective: every rank must call it.
///
/// # Errors
/// Fails on every rank if one rank fails. The folder `step-…` has then not been created, unless only a later operation
/// failed, such as removing an old checkpoint.
pub fn save(
    root: &Path,
    zero: &ShardedState,
    comm: &dyn Communicator,
    save: &Save,
) -> Result<PathBuf, CheckpointError> {
    let (manifest, shard) = begin(root, zero, comm, save)?;
    let unfinished = unfinished(root, save.step);
    let written = patiently(comm, || shard::write(&unfinished, &shard, &mut State::of(zero)))?;
    let manifest = conclude(root, comm, written, manifest)?;
    let committed = patiently(comm, || if comm.rank() == 0 { commit(root, &manifest, save) } else { Ok(()) })?;
    together(comm, committed)?;
    Ok(folder(root, save))
}

/// Creates the temporary folder and returns its planned contents. The manifest still lacks checksums and shards.
/// Collective.
fn begin(
    root: &Path,
    zero: &ShardedState,
    comm: &dyn Communicator,
    save: &Save,
) -> Result<(Manifest, Shard), CheckpointError> {
    let made = if comm.rank() == 0 { commit::begin(root, &unfinished(root, save.step)) } else { Ok(()) };
    together(comm, made)?;
    let parameters = entries(zero);
    let shard = Shard::of(zero, &parameters, (comm.rank(), comm.size()));
    let manifest = Manifest {
        format: FORMAT.into(),
        version: VERSION,
        step: save.step,
        updates: zero.updates(),
        samples: save.samples,
        loss_scale: save.loss_scale,
        schedule_free: ScheduleFreeSums::of(&zero.state_names(), zero.average_sums()),
        local_steps: local::of(zero, comm)?,
        world_size: comm.size(),
        zero_stage: save.zero_stage,
        states: zero.state_names().iter().map(ToString::to_string).collect(),
        engine: save.engine.clone(),
        config: save.config.clone(),
        buffers: zero.model().buffers().iter().map(|buffer| (buffer.name().to_string(), buffer.values())).collect(),
        shards: vec![],
        parameters,
    };
    Ok((manifest, shard))
}

/// Completes the manifest once all shards are written. If a rank failed, rank 0 removes the temporary folder.
/// Collective.
fn conclude(
    root: &Path,
    comm: &dyn Communicator,
    written: Result<Written, CheckpointError>,
    mut manifest: Manifest,
) -> Result<Manifest, CheckpointError> {
    let all = together(comm, written).and_then(|written| exchange(comm, &written, &mut manifest));
    if all.is_err() && comm.rank() == 0 {
        // Free the space in case the disk is full. The next save of that step removes any leftovers.
        let _ = commit::remove(&unfinished(root, manifest.step));
    }
    all.map(|()| manifest)
}

/// A save that runs while the ranks train.
///
/// Each rank writes a copy of its state on a thread. [`poll`](Background::poll) detects when all ranks have finished;
/// rank 0 then commits, also on a thread.
#[derive(Debug)]
pub struct Background {
    root: PathBuf,
    save: Box<Save>,
    stage: Stage,
    stall: Duration,
}

/// The current phase, the same on all ranks.
#[derive(Debug)]
enum Stage {
    Writing(JoinHandle<(Result<Written, CheckpointError>, Snapshot)>, Box<Manifest>),
    /// Rank 0 commits; the other ranks hold `None`.
    Committing(Option<JoinHandle<Result<(), CheckpointError>>>),
}

/// Progress of a background save.
#[derive(Debug)]
pub enum Progress {
    /// The save is still running.
    Saving(Background),
    /// The save has ended: the checkpoint's folder or the error, the same on all ranks.
    Over(Result<PathBuf, CheckpointError>),
}

impl Background {
    /// Copies this rank's state and starts writing `root/step-…`. Collective: every rank must call it.
    ///
    /// # Errors
    /// Fails on every rank if the folder cannot be created. If a rank cannot start a thread, fails on that rank only.
    pub fn begin(
        root: &Path,
        zero: &ShardedState,
        comm: &dyn Communicator,
        save: Save,
        mut snapshot: Snapshot,
    ) -> Result<Self, CheckpointError> {
        let started = Instant::now();
        let (manifest, shard) = begin(root, zero, comm, &save)?;
        let copied = snapshot.take(zero, &shard);
        let folder = unfinished(root, save.step);
        let writer = thread::Builder::new().name("checkpoint".into()).spawn(move || {
            step_back();
            let written = copied.and_then(|()| shard::write(&folder, &shard, &mut snapshot.values()));
            (written, snapshot)
        });
        let stage = Stage::Writing(writer.map_err(CheckpointError::io(root))?, Box::new(manifest));
        Ok(Self { root: root.to_path_buf(), save: Box::new(save), stage, stall: started.elapsed() })
    }

    /// Returns how long this rank was blocked by the copy.
    #[must_use]
    pub fn stall(&self) -> Duration {
        self.stall
    }

    /// Returns the step being saved.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.save.step
    }

    /// Checks the progress and starts the next phase. Never waits for a disk. Once the copy is written, puts its memory
    /// into `memory` for the next save. Collective: every rank must call it.
    ///
    /// # Errors
    /// Fails if a rank is lost.
    pub fn poll(mut self, comm: &dyn Communicator, memory: &mut Snapshot) -> Result<Progress, CheckpointError> {
        let works = match &self.stage {
            Stage::Writing(writer, _) => !writer.is_finished(),
            Stage::Committing(committer) => committer.as_ref().is_some_and(|committer| !committer.is_finished()),
        };
        if any(comm, works)? {
            return Ok(Progress::Saving(self));
        }
        match self.stage {
            Stage::Writing(writer, manifest) => {
                match written(&self.root, comm, writer, *manifest, &self.save, memory) {
                    Err(CheckpointError::Comm(lost)) => Err(lost.into()),
                    Err(error) => Ok(Progress::Over(Err(error))),
                    Ok(committing) => {
                        self.stage = Stage::Committing(committing);
                        Ok(Progress::Saving(self))
                    }
                }
            }
            Stage::Committing(committer) => match together(comm, committer.map_or(Ok(()), joined)) {
                Err(CheckpointError::Comm(lost)) => Err(lost.into()),
                other => Ok(Progress::Over(other.map(|()| folder(&self.root, &self.save)))),
            },
        }
    }

    /// Waits until the save has ended. Collective: every rank must call it.
    ///
    /// # Errors
    /// Fails on every rank if one rank fails or is lost.
    pub fn finish(self, comm: &dyn Communicator, memory: &mut Snapshot) -> Result<PathBuf, CheckpointError> {
        let committer = match self.stage {
            Stage::Writing(writer, manifest) => {
                patiently(comm, || wait(&writer))?;
                written(&self.root, comm, writer, *manifest, &self.save, memory)?
            }
            Stage::Committing(committer) => committer,
        };
        let committed = patiently(comm, || committer.map_or(Ok(()), joined))?;
        together(comm, committed)?;
        Ok(folder(&self.root, &self.save))
    }
}

/// Lowers this thread's priority in favor of the compute threads, which share the rank's cores.
fn step_back() {
    // If the system refuses, the threads share the cores equally.
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), 10);
}

fn folder(root: &Path, save: &Save) -> PathBuf {
    root.join(name(save.step))
}

/// Waits until a thread has ended. Does not take its result.
fn wait<T>(thread: &JoinHandle<T>) {
    while !thread.is_finished() {
        thread::sleep(Duration::from_millis(1));
    }
}

/// Collects the results once all ranks have written, and starts the commit on rank 0. Collective.
fn written(
    root: &Path,
    comm: &dyn Communicator,
    writer: JoinHandle<(Result<Written, CheckpointError>, Snapshot)>,
    manifest: Manifest,
    save: &Save,
    memory: &mut Snapshot,
) -> Result<Option<JoinHandle<Result<(), CheckpointError>>>, CheckpointError> {
    let (written, snapshot) = writer.join().unwrap_or_else(|_| (Err(panicked(root)), Snapshot::default()));
    *memory = snapshot;
    let manifest = conclude(root, comm, written, manifest)?;
    let begun = if comm.rank() == 0 {
        let (root, save) = (root.to_path_buf(), save.clone());
        let thread = thread::Builder::new().name("commit".into());
        thread.spawn(move || commit(&root, &manifest, &save)).map(Some)
    } else {
        Ok(None)
    };
    together(comm, begun.map_err(CheckpointError::io(root)))
}

fn joined(committer: JoinHandle<Result<(), CheckpointError>>) -> Result<(), CheckpointError> {
    committer.join().unwrap_or_else(|_| Err(panicked(Path::new("the commit"))))
}

fn panicked(at: &Path) -> CheckpointError {
    CheckpointError::io(at)(std::io::Error::other("internal error: the writer thread panicked"))
}
