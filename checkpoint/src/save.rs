//! Writing a checkpoint: while the ranks wait, or while they train on.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use zero_comm::Communicator;
use zero_partition::ShardedState;

use crate::commit::{self, commit, exchange, unfinished};
use crate::error::CheckpointError;
use crate::layout::{Shard, entries};
use crate::lock::RunLock;
use crate::manifest::{FORMAT, LossScale, Manifest, VERSION};
use crate::shard::{self, State, Written};
use crate::snapshot::Snapshot;
use crate::together::{any, patiently, together};

/// What a checkpoint records besides parameters and optimizer state, and which others stay.
#[derive(Debug, Clone)]
pub struct Save {
    /// Optimizer steps of the run, skipped ones included.
    pub step: u64,
    /// Samples that the run has trained on.
    pub samples: u64,
    /// Of training in f16 with a loss scale that follows the gradients.
    pub loss_scale: Option<LossScale>,
    /// ZeRO stage, for the record.
    pub zero_stage: u8,
    /// What the engine keeps besides.
    pub engine: serde_json::Value,
    /// What the configuration says of model and tokenizer, for an export.
    pub config: serde_json::Value,
    /// How many checkpoints stay; 0 keeps all.
    pub keep_last: usize,
    /// Those of every so many steps stay in any case; 0 none.
    pub keep_every: u64,
    /// The lock of the run's folder, which is looked at before the checkpoint gets its name.
    pub lock: Option<Arc<RunLock>>,
}

/// Writes `root/step-…` and returns its path; a collective. It is there whole or not at all.
///
/// # Errors
/// On every rank if one of them fails; then no folder named `step-…` has appeared.
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

/// Makes the folder, and says what is to be in it; a collective. Checksums and shards of the manifest are still to come.
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

/// The whole manifest, when all shards are written; a collective. If one is not, rank 0 removes the others.
fn conclude(
    root: &Path,
    comm: &dyn Communicator,
    written: Result<Written, CheckpointError>,
    mut manifest: Manifest,
) -> Result<Manifest, CheckpointError> {
    let all = together(comm, written).and_then(|written| exchange(comm, &written, &mut manifest));
    if all.is_err() && comm.rank() == 0 {
        // So that a full disk is not full of it. What cannot be removed now, the next save of that step removes.
        let _ = commit::remove(&unfinished(root, manifest.step));
    }
    all.map(|()| manifest)
}

/// A save that goes on while the ranks train.
///
/// Each rank writes a copy of its state on a thread. When all have, which they find out in [`poll`](Background::poll), rank 0
/// commits, on a thread too.
#[derive(Debug)]
pub struct Background {
    root: PathBuf,
    save: Box<Save>,
    stage: Stage,
    stall: Duration,
}

/// What is under way; the same on all ranks.
#[derive(Debug)]
enum Stage {
    Writing(JoinHandle<(Result<Written, CheckpointError>, Snapshot)>, Box<Manifest>),
    /// By rank 0.
    Committing(Option<JoinHandle<Result<(), CheckpointError>>>),
}

/// How far a save in the background is.
#[derive(Debug)]
pub enum Progress {
    /// It goes on.
    Saving(Background),
    /// It is over: the checkpoint's folder, or why there is none; the same on all ranks.
    Over(Result<PathBuf, CheckpointError>),
}

impl Background {
    /// Copies this rank's state and begins to write `root/step-…`; a collective.
    ///
    /// # Errors
    /// On every rank if the folder cannot be made; on one that cannot start a thread.
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

    /// How long this rank waited for its copy.
    #[must_use]
    pub fn stall(&self) -> Duration {
        self.stall
    }

    /// The step that is saved.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.save.step
    }

    /// Looks how far it is, and begins what is next; a collective, that waits for no disk. The memory of the copy is given back when
    /// it is written.
    ///
    /// # Errors
    /// If a rank is lost.
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

    /// Waits until it is over; a collective.
    ///
    /// # Errors
    /// On every rank if one of them fails; if a rank is lost.
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

/// Lets those that compute have the core, which a rank's threads share.
fn step_back() {
    // Where it is refused, the threads share alike.
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), 10);
}

fn folder(root: &Path, save: &Save) -> PathBuf {
    root.join(format!("step-{:08}", save.step))
}

/// Until a thread is over, whose result is taken later.
fn wait<T>(thread: &JoinHandle<T>) {
    while !thread.is_finished() {
        thread::sleep(Duration::from_millis(1));
    }
}

/// When all ranks have written: rank 0 begins to commit; a collective.
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
    CheckpointError::io(at)(std::io::Error::other("internal error: the thread that writes panicked"))
}
