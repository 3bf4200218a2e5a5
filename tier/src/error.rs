//! Errors of the disk tier, each with the folder it concerns and advice on how to fix it.

use std::path::{Path, PathBuf};

/// Why a swap file could not be created, or a request on it failed. The text of the error is one line;
/// [`help`](DiskError::help) returns a line of advice.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// The folder does not exist.
    #[error("{}: no such folder", folder.display())]
    Missing {
        /// The folder chosen for the swap file.
        folder: PathBuf,
    },
    /// The path exists but is not a folder.
    #[error("{}: not a folder", folder.display())]
    NotAFolder {
        /// The path chosen for the swap file.
        folder: PathBuf,
    },
    /// The folder permits no new file.
    #[error("{}: cannot create a file in this folder: {reason}", folder.display())]
    NotWritable {
        /// The folder chosen for the swap file.
        folder: PathBuf,
        /// The system's error text.
        reason: String,
    },
    /// The disk has too little free space. This is detected before anything is written.
    #[error("{}: the swap file needs {}, but only {} are free", folder.display(), size(*needed), size(*available))]
    NoSpace {
        /// The folder chosen for the swap file.
        folder: PathBuf,
        /// Requested bytes.
        needed: u64,
        /// Bytes still available to an unprivileged process.
        available: u64,
    },
    /// The system refused an operation while the file was being created.
    #[error("{}: cannot {step}: {reason}", folder.display())]
    Refused {
        /// The folder chosen for the swap file.
        folder: PathBuf,
        /// The operation that failed.
        step: String,
        /// The system's error text.
        reason: String,
    },
    /// The file is shorter than when it was created: another process truncated it, or the disk lost a part of it.
    #[error("{}: the swap file was truncated: it ends at byte {end}, but {bytes} bytes were expected at offset {at}", folder.display())]
    CutShort {
        /// The folder of the swap file.
        folder: PathBuf,
        /// Current length of the file in bytes.
        end: u64,
        /// File offset of the transfer, in bytes.
        at: u64,
        /// Length of the transfer in bytes.
        bytes: u64,
    },
    /// The disk filled up despite the reservation, because of a quota, a thin volume or a snapshot.
    #[error("{}: no space left to write {bytes} bytes at offset {at} of the swap file", folder.display())]
    Full {
        /// The folder of the swap file.
        folder: PathBuf,
        /// File offset of the write, in bytes.
        at: u64,
        /// Length of the write in bytes.
        bytes: u64,
    },
    /// A read failed.
    #[error("{}: cannot read {bytes} bytes at offset {at} of the swap file: {reason}", folder.display())]
    Read {
        /// The folder of the swap file.
        folder: PathBuf,
        /// File offset in bytes.
        at: u64,
        /// Length in bytes.
        bytes: u64,
        /// The system's error text.
        reason: String,
    },
    /// A write failed.
    #[error("{}: cannot write {bytes} bytes at offset {at} of the swap file: {reason}", folder.display())]
    Write {
        /// The folder of the swap file.
        folder: PathBuf,
        /// File offset in bytes.
        at: u64,
        /// Length in bytes.
        bytes: u64,
        /// The system's error text.
        reason: String,
    },
    /// The options, or the arguments of a request, are out of range. No I/O took place.
    #[error("swap file in {}: {detail}", folder.display())]
    Invalid {
        /// The folder of the swap file.
        folder: PathBuf,
        /// The violated requirement.
        detail: String,
    },
    /// The file was dropped, or its service thread ended, before the request completed.
    #[error("{}: the swap file is closed: {reason}", folder.display())]
    Closed {
        /// The folder of the swap file.
        folder: PathBuf,
        /// Why the file is closed.
        reason: String,
    },
    /// The system is out of memory for a buffer.
    #[error("out of memory: cannot allocate a buffer of {}", size(*bytes))]
    Memory {
        /// Requested size in bytes.
        bytes: u64,
    },
}

impl DiskError {
    /// Returns advice on how to fix the error.
    pub fn help(&self) -> &'static str {
        match self {
            DiskError::Missing { .. } => "create the folder on a local disk, or set `nvme_path` to another one",
            DiskError::NotAFolder { .. } => "set `nvme_path` to a folder on a local disk",
            DiskError::NotWritable { .. } => "set `nvme_path` to a folder that this user can write to",
            DiskError::NoSpace { .. } => {
                "free some space, set `nvme_path` to a folder on a larger disk, or offload less; all ranks of a host share the disk"
            }
            DiskError::Refused { .. } => {
                "set `nvme_path` to a folder on a local disk; also check `ulimit -a` and quotas"
            }
            DiskError::CutShort { .. } => {
                "no other program may change the file during a run; resume from the last checkpoint"
            }
            DiskError::Full { .. } => {
                "the space was reserved at the start, so check quotas and thin volumes; then resume from the last checkpoint"
            }
            DiskError::Read { .. } | DiskError::Write { .. } => {
                "check `dmesg` for disk errors; resume from the last checkpoint, with `nvme_path` on another disk if this one is failing"
            }
            DiskError::Invalid { .. } => {
                "use multiples of 4096 for offsets, lengths and block sizes, within the file and the buffer"
            }
            DiskError::Closed { .. } => "see the first error of this rank",
            DiskError::Memory { .. } => {
                "lower `buffer_count`, `sub_group_size` or `aio.block_size`, or raise the memory limit"
            }
        }
    }

    pub(crate) fn refused(folder: &Path, step: impl Into<String>, reason: impl ToString) -> DiskError {
        DiskError::Refused { folder: folder.into(), step: step.into(), reason: reason.to_string() }
    }
}

/// Formats a size for display: exact below a megabyte, with one decimal from there on.
fn size(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{bytes} bytes"),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.1} GB", bytes as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_one_line_with_the_place() {
        let folder = PathBuf::from("/mnt/nvme0");
        let error = DiskError::NoSpace { folder: folder.clone(), needed: 21_000_000_000, available: 37_500_000 };
        assert_eq!(error.to_string(), "/mnt/nvme0: the swap file needs 21.0 GB, but only 37.5 MB are free");
        let error = DiskError::CutShort { folder, end: 4096, at: 8192, bytes: 1000 };
        assert_eq!(
            error.to_string(),
            "/mnt/nvme0: the swap file was truncated: it ends at byte 4096, but 1000 bytes were expected at offset 8192"
        );
        assert!(!error.help().contains('\n'));
    }
}
