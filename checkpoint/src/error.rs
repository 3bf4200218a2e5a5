//! Errors of writing and reading checkpoints.

use std::path::{Path, PathBuf};

use zero_comm::CommError;
use zero_partition::ZeroError;

/// Why a checkpoint could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file operation failed.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file does not match its manifest.
    #[error("{path} is damaged: {reason}", path = path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The mismatch.
        reason: String,
    },
    /// The checkpoint belongs to another model or optimizer.
    #[error("{path} is incompatible: {reason}", path = path.display())]
    Mismatch {
        /// The manifest.
        path: PathBuf,
        /// The mismatch.
        reason: String,
    },
    /// Another run is writing the folder, or has taken it over.
    #[error("{folder} is in use by {holder}\n  help: only one run at a time can write to a folder; choose another one with `--out` or `training.output_dir`", folder = folder.display())]
    Locked {
        /// The run's folder.
        folder: PathBuf,
        /// The process that holds the lock.
        holder: String,
    },
    /// The file or folder may be intact, but this library does not accept it.
    #[error("{path}: {reason}", path = path.display())]
    Refused {
        /// The file or folder.
        path: PathBuf,
        /// The reason, and advice.
        reason: String,
    },
    /// Another rank failed to write or read its part.
    #[error("rank {rank}: {reason}")]
    OtherRank {
        /// The lowest rank that failed.
        rank: usize,
        /// Its error text.
        reason: String,
    },
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A range of the sharded state could not be read or written.
    #[error(transparent)]
    Zero(#[from] ZeroError),
}

impl CheckpointError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + use<> {
        let path = path.to_path_buf();
        move |source| Self::Io { path, source }
    }

    pub(crate) fn damaged(path: &Path, reason: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_path_buf(), reason: reason.into() }
    }

    pub(crate) fn mismatch(path: &Path, reason: impl Into<String>) -> Self {
        Self::Mismatch { path: path.to_path_buf(), reason: reason.into() }
    }

    pub(crate) fn refused(path: &Path, reason: impl Into<String>) -> Self {
        Self::Refused { path: path.to_path_buf(), reason: reason.into() }
    }
}
