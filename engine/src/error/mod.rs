//! Every way in which a run can fail, and the exit status that says which.

mod data;

use std::path::PathBuf;

use zero_checkpoint::CheckpointError;
use zero_comm::CommError;
use zero_comm::token::TokenError;
use zero_model::BuildError;
use zero_partition::ZeroError;
use zero_pipeline::Violation;
use zero_tier::DiskError;

pub use data::{At, DataError};

/// Why a run ended before its time.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration is wrong: all of its errors.
    #[error("{0}")]
    Config(#[from] zero_config::Errors),
    /// A value of the configuration does not fit the model, the data or the machine.
    #[error("{message}\n  in: {key}\n  help: {help}")]
    Setting {
        /// Path of the key.
        key: String,
        /// What is wrong.
        message: String,
        /// What to do.
        help: String,
    },
    /// A file that a key or an option names cannot be read or written.
    #[error("{source}\n  in: {key}\n  help: {help}")]
    Named {
        /// Path of the key, or the option.
        key: String,
        /// The file, and what is wrong.
        source: Box<Error>,
        /// What to do.
        help: String,
    },
    /// The model cannot be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The step's program must not run: a defect of this library.
    #[error("internal error: the step program is invalid: {0}")]
    Program(#[from] Violation),
    /// The caller's batch does not fit the configuration.
    #[error("the batch does not fit: {0}")]
    Batch(String),
    /// A parameter that does not exist.
    #[error("the model has no parameter `{0}`")]
    NoParameter(String),
    /// candle refused an operation.
    #[error("{0}")]
    Tensor(#[from] candle_core::Error),
    /// An instruction of the program failed.
    #[error(transparent)]
    Zero(ZeroError),
    /// A rank or a connection was lost.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The launchers of several hosts lost each other.
    #[error("{0}")]
    Hosts(String),
    /// The job's token cannot be had.
    #[error("{0}\n  help: {help}", help = .0.help())]
    Token(#[from] TokenError),
    /// The disk on which state or parameters live.
    #[error("{0}\n  help: {help}", help = .0.help())]
    Disk(DiskError),
    /// The plan needs more memory than there is, or a step took more.
    #[error("{0}")]
    Memory(String),
    /// A checkpoint could not be written or read.
    #[error(transparent)]
    Checkpoint(CheckpointError),
    /// Data could not be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A data set of the program's own failed.
    #[error("the data set failed: {0}")]
    Dataset(Box<dyn std::error::Error + Send + Sync>),
    /// `--verify` found a difference.
    #[error("the first {steps} steps differ from those of one process at ZeRO stage 0")]
    NotVerified {
        /// Steps that were compared.
        steps: u64,
    },
    /// Loss or gradients stopped being finite, or grew.
    #[error("training diverged: {reason}")]
    Diverged {
        /// What, and when.
        reason: String,
    },
    /// A file of the run could not be written.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

impl Error {
    /// The process's exit status: 2 the user's input, 3 data or checkpoint, 4 a lost rank, 5 diverged, 1 the rest.
    #[must_use]
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::Config(_) | Self::Setting { .. } | Self::Build(_) | Self::Memory(_) => 2,
            Self::Batch(_) | Self::NoParameter(_) | Self::Token(_) => 2,
            Self::Comm(CommError::Disagreement { .. }) => 2,
            Self::Checkpoint(CheckpointError::Locked { .. }) => 2,
            Self::Checkpoint(_) | Self::Data(_) | Self::Dataset(_) => 3,
            Self::Named { source, .. } => source.exit_status(),
            Self::Comm(_) | Self::Hosts(_) => 4,
            // What is so at the start is the user's to say otherwise.
            Self::Disk(DiskError::Missing { .. } | DiskError::NotAFolder { .. } | DiskError::NotWritable { .. }) => 2,
            Self::Disk(DiskError::NoSpace { .. } | DiskError::Invalid { .. }) => 2,
            Self::Diverged { .. } => 5,
            Self::Program(_) | Self::NotVerified { .. } | Self::Tensor(_) => 1,
            Self::Zero(_) | Self::Disk(_) | Self::Io { .. } => 1,
        }
    }

    /// The error of a file with the key or the option that names it, and with what is to be named there. What is in a file that can be read,
    /// and what is no error of a file, stays as it is.
    #[must_use]
    pub fn named(self, key: &str, wanted: &str) -> Self {
        let source = match &self {
            Self::Io { source, .. } => Some(source),
            Self::Checkpoint(CheckpointError::Io { source, .. }) | Self::Data(DataError::Io { source, .. }) => {
                Some(source)
            }
            Self::Checkpoint(CheckpointError::Refused { .. }) => None,
            Self::Data(DataError::Directory { .. } | DataError::NoMatch { .. } | DataError::Pattern { .. }) => None,
            Self::Data(DataError::Tokenizer { .. }) => None,
            _ => return self,
        };
        let is_missing = source.is_some_and(|source| source.kind() == std::io::ErrorKind::NotFound)
            || matches!(self, Self::Data(DataError::NoMatch { .. }));
        let begins = if is_missing { zero_config::relative_paths_begin() } else { String::new() };
        Self::Named { key: key.into(), source: Box::new(self), help: format!("{wanted}{begins}") }
    }

    /// Whether a file could not be written, which training can do without.
    pub fn is_only_a_file(&self) -> bool {
        matches!(
            self,
            Self::Io { .. } | Self::Checkpoint(CheckpointError::Io { .. } | CheckpointError::OtherRank { .. })
        )
    }

    /// Whether a checkpoint cannot be read, here or on another rank, though it may be of this model.
    pub fn is_damage(&self) -> bool {
        use CheckpointError::{Damaged, Io, OtherRank};
        matches!(self, Self::Checkpoint(Damaged { .. } | Io { .. } | OtherRank { .. }))
    }

    /// The error of a data set: one of ours stays what it is.
    #[must_use]
    pub fn of_dataset(error: Box<dyn std::error::Error + Send + Sync>) -> Self {
        let error = match error.downcast::<Self>() {
            Ok(own) => return *own,
            Err(error) => error,
        };
        match error.downcast::<DataError>() {
            Ok(data) => Self::Data(*data),
            Err(error) => Self::Dataset(error),
        }
    }

    /// Makes an error of a file of what the system said.
    pub fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }

    /// The error of a key whose value does not fit.
    pub fn setting(key: &str, message: impl Into<String>, help: impl Into<String>) -> Self {
        Self::Setting { key: key.into(), message: message.into(), help: help.into() }
    }
}

/// A lost rank is a lost rank, wherever it is noticed.
impl From<ZeroError> for Error {
    fn from(error: ZeroError) -> Self {
        match error {
            ZeroError::Comm(error) => Self::Comm(error),
            ZeroError::Disk(error) => Self::Disk(error),
            other => Self::Zero(other),
        }
    }
}

impl From<CheckpointError> for Error {
    fn from(error: CheckpointError) -> Self {
        match error {
            CheckpointError::Comm(error) => Self::Comm(error),
            other => Self::Checkpoint(other),
        }
    }
}
