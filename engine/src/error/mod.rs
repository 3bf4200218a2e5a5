//! The error type of a run, and the exit status of each error.

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

/// Why a run failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation needs the weights while the averaged weights replace them.
    #[error(
        "{what} needs the weights, but the averaged weights have replaced them: `Engine::with_averages` has not returned, or it failed"
    )]
    Exchanged {
        /// What needs the weights.
        what: String,
    },
    /// The configuration is invalid. Lists all of its errors.
    #[error(transparent)]
    Config(#[from] zero_config::Errors),
    /// A value in the configuration does not match the model, the data or the machine.
    #[error("{message}\n  in: {key}\n  help: {help}")]
    Setting {
        /// Path of the key.
        key: String,
        /// What is wrong.
        message: String,
        /// How to fix it.
        help: String,
    },
    /// A file given by a key or an option cannot be read or written.
    #[error("{source}\n  in: {key}\n  help: {help}")]
    Named {
        /// Path of the key, or the option.
        key: String,
        /// The error of the file.
        source: Box<Error>,
        /// How to fix it.
        help: String,
    },
    /// The model cannot be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The step program does not validate, which is a bug of this library.
    #[error("internal error: the step program is invalid: {0}")]
    Program(#[from] Violation),
    /// The caller's batch does not match the model or the configuration.
    #[error("invalid batch: {0}")]
    Batch(String),
    /// An evaluation changed a module buffer, such as the running statistics of a BatchNorm in training mode.
    #[error(
        "the evaluation changed the buffer `{name}`: a module normalizes with the micro-batch's statistics\n  \
         help: use `ops::BatchNorm`, or pass the training flag of the pass: `norm.forward_t(x, pass.training)` in `Layer::run`"
    )]
    ChangedBuffer {
        /// Its full name.
        name: String,
    },
    /// A signal stopped a command that prepares or reads data.
    #[error("stopped by {}; no unfinished file remains", signal_name(*signal))]
    Interrupted {
        /// The number of the signal.
        signal: i32,
    },
    /// A parameter does not exist.
    #[error("the model has no parameter `{0}`")]
    NoParameter(String),
    /// A candle operation failed.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
    /// An instruction of the program failed.
    #[error(transparent)]
    Zero(ZeroError),
    /// A rank or a connection was lost.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The launchers on several hosts lost contact with each other.
    #[error("{0}")]
    Hosts(String),
    /// A launcher could not start, restart or watch its ranks.
    #[error("{0}")]
    Launch(String),
    /// The job's token is missing or cannot be read.
    #[error("{0}\n  help: {help}", help = .0.help())]
    Token(#[from] TokenError),
    /// The disk with offloaded state or parameters failed.
    #[error("{0}\n  help: {help}", help = .0.help())]
    Disk(DiskError),
    /// The plan needs more memory than is available, or a step exceeded its limit.
    #[error("{0}")]
    Memory(String),
    /// A checkpoint could not be written or read.
    #[error(transparent)]
    Checkpoint(CheckpointError),
    /// Data could not be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A custom data set failed.
    #[error("the data set failed: {0}")]
    Dataset(Box<dyn std::error::Error + Send + Sync>),
    /// `--verify` found a difference.
    #[error("the losses of the first {steps} steps differ from those of one process at ZeRO stage 0")]
    NotVerified {
        /// Number of steps compared.
        steps: u64,
    },
    /// The loss or the gradient norm became infinite, NaN or too large.
    #[error("training diverged: {reason}")]
    Diverged {
        /// The quantity, its value and the step.
        reason: String,
    },
    /// A run file could not be written.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
}

impl Error {
    /// Returns the exit status of the process: 2 for user input, 3 for data and checkpoints, 4 for a lost rank, 5 for
    /// divergence, 128 + N for a command that signal N stopped, 1 for everything else.
    #[must_use]
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::Config(_) | Self::Setting { .. } | Self::Build(_) | Self::Memory(_) => 2,
            Self::Batch(_) | Self::ChangedBuffer { .. } | Self::NoParameter(_) | Self::Token(_) => 2,
            Self::Comm(CommError::Disagreement { .. }) => 2,
            Self::Checkpoint(CheckpointError::Locked { .. }) => 2,
            Self::Checkpoint(_) | Self::Data(_) | Self::Dataset(_) => 3,
            Self::Named { source, .. } => source.exit_status(),
            Self::Comm(_) | Self::Hosts(_) => 4,
            // These errors occur at the start, and the user can fix them in the configuration.
            Self::Disk(DiskError::Missing { .. } | DiskError::NotAFolder { .. } | DiskError::NotWritable { .. }) => 2,
            Self::Disk(DiskError::NoSpace { .. } | DiskError::Invalid { .. }) => 2,
            Self::Diverged { .. } => 5,
            Self::Interrupted { signal } => 128 + u8::try_from(*signal).unwrap_or(0),
            Self::Program(_) | Self::NotVerified { .. } | Self::Tensor(_) | Self::Exchanged { .. } => 1,
            Self::Zero(_) | Self::Disk(_) | Self::Io { .. } | Self::Launch(_) => 1,
        }
    }

    /// Wraps an error about a file as a whole, for example a missing or unreadable file, in [`Error::Named`], which
    /// adds the key or option that names the file and a help text (`wanted`). Other errors, such as an invalid line of
    /// a readable file, are returned unchanged.
    #[must_use]
    pub fn named(self, key: &str, wanted: &str) -> Self {
        let source = match &self {
            Self::Io { source, .. } => Some(source),
            Self::Checkpoint(CheckpointError::Io { source, .. }) => Some(source),
            Self::Data(DataError::Io { source, .. } | DataError::Cache { source, .. }) => Some(source),
            Self::Checkpoint(CheckpointError::Refused { .. }) => None,
            Self::Data(DataError::Directory { .. } | DataError::NoMatch { .. } | DataError::Pattern { .. }) => None,
            Self::Data(DataError::Tokenizer { .. } | DataError::Address { .. } | DataError::Binary { .. }) => None,
            Self::Data(DataError::Store { .. } | DataError::NoSplit { .. } | DataError::Slice { .. }) => None,
            _ => return self,
        };
        let is_missing = source.is_some_and(|source| source.kind() == std::io::ErrorKind::NotFound)
            || matches!(self, Self::Data(DataError::NoMatch { .. }));
        let begins = if is_missing { zero_config::relative_paths_begin() } else { String::new() };
        let wanted = match &self {
            Self::Data(error) => error.help().unwrap_or(wanted),
            _ => wanted,
        };
        let help = format!("{wanted}{begins}");
        Self::Named { key: key.into(), source: Box::new(self), help }
    }

    /// Returns whether this is a failed write of a file. Training can continue without the file.
    pub fn is_only_a_file(&self) -> bool {
        matches!(
            self,
            Self::Io { .. } | Self::Checkpoint(CheckpointError::Io { .. } | CheckpointError::OtherRank { .. })
        )
    }

    /// Returns whether this error is a damaged or unreadable checkpoint, on this rank or another, rather than a
    /// checkpoint of another model.
    pub fn is_damage(&self) -> bool {
        use CheckpointError::{Damaged, Io, OtherRank};
        matches!(self, Self::Checkpoint(Damaged { .. } | Io { .. } | OtherRank { .. }))
    }

    /// Wraps an error from a data set. Returns an error of this crate unchanged.
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

    /// Returns a function that adds the path to an I/O error.
    pub fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }

    /// Creates the error for a key with an unsuitable value.
    pub fn setting(key: &str, message: impl Into<String>, help: impl Into<String>) -> Self {
        Self::Setting { key: key.into(), message: message.into(), help: help.into() }
    }
}

/// Returns the name of a signal that stops a command, or its number.
fn signal_name(signal: i32) -> String {
    match signal {
        2 => "SIGINT".into(),
        15 => "SIGTERM".into(),
        other => format!("signal {other}"),
    }
}

/// Keeps the variant and the exit status of a communication or disk error, wherever it is detected.
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
