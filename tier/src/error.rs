//! Errors of the disk tier, each with the folder it concerns and advice on how to fix it.

use std::path::{Path, PathBuf};

/// Why a swap file could not be created, or a request on it failed. The text is one line; [`help`](DiskError::help)
/// returns another.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// The folder does not exist.
    #[error("{}: there is no such folder", folder.display())]
    Missing {
        /// The folder chosen for the swap file.
        folder: PathBuf,
    },
    /// The path exists but is not a folder.
    #[error("{}: this is no folder", folder.display())]
    NotAFolder {
        /// The path chosen for the swap file.
        folder: PathBuf,
    },
    /// The folder permits no new file.
    #[error("{}: no file can be made in this folder: {reason}", folder.display())]
    NotWritable {
        /// The folder chosen for the swap file.
        folder: PathBuf,
        /// The system's error text.
        reason: String,
    },
    /// The disk has too little free space. This is detected before anything is written.
    #[error("{}: {} are needed, {} are free", folder.display(), size(*needed), size(*available))]
    NoSpace {
        /// The folder chosen for the swap file.
        folder: PathBuf,
        /// Requested bytes.
        needed: u64,
        /// Bytes still available to an unprivileged process.
        available: u64,
    },
    /// The system refused an operation while the file was being created.
    #[error("{}: the system refused to {step}: {reason}", folder.display())]
    Refused {
        /// The folder chosen for the swap file.
        folder: PathBuf,
        /// The operation that failed.
        step: String,
        /// The system's error text.
        reason: String,
    },
    /// The file is shorter than when it was created: another process truncated it, or the disk lost a part of it.
    #[error("{}: the swap file ends at {end}, {bytes} bytes were expected at {at}: it was cut short", folder.display())]
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
    #[error("{}: no space was left when {bytes} bytes were written at {at} of the swap file", folder.display())]
    Full {
        /// The folder of the swap file.
        folder: PathBuf,
        /// File offset of the write, in bytes.
        at: u64,
        /// Length of the write in bytes.
        bytes: u64,
    },
    /// A read failed.
    #[error("{}: {bytes} bytes at {at} of the swap file could not be read: {reason}", folder.display())]
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
    #[error("{}: {bytes} bytes at {at} of the swap file could not be written: {reason}", folder.display())]
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
    #[error("the swap file in {}: {detail}", folder.display())]
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
    #[error("no memory for a buffer of {}", size(*bytes))]
    Memory {
        /// Requested size in bytes.
        bytes: u64,
    },
}

impl DiskError {
    /// Returns advice on how to fix the error.
    pub fn help(&self) -> &'static str {
        match self {
            DiskError::Missing { .. } => "make the folder on a local disk, or let `nvme_path` name another",
            DiskError::NotAFolder { .. } => "let `nvme_path` name a folder on a local disk",
            DiskError::NotWritable { .. } => "let `nvme_path` name a folder that this user may write to",
            DiskError::NoSpace { .. } => {
                "make room, let `nvme_path` name a folder on a larger disk, or offload less: all ranks of a host share it"
            }
            DiskError::Refused { .. } => {
                "let `nvme_path` name a folder on a local disk; `ulimit -a` and quotas may limit files too"
            }
            DiskError::CutShort { .. } => "nothing may touch the file during a run; resume from the last checkpoint",
            DiskError::Full { .. } => {
                "the space was reserved at the start: look for a quota or a thin volume, then resume from the last checkpoint"
            }
            DiskError::Read { .. } | DiskError::Write { .. } => {
                "`dmesg` has the disk's own words; resume from the last checkpoint, with `nvme_path` on another disk if they are bad"
            }
            DiskError::Invalid { .. } => {
                "offsets, lengths and block sizes are multiples of 4096 within the file and the buffer"
            }
            DiskError::Closed { .. } => "the first error of this rank says why",
            DiskError::Memory { .. } => {
                "lower `buffer_count`, `sub_group_size` or `aio.block_size`, or raise the limit on memory"
            }
        }
    }

    pub(crate) fn refused(folder: &Path, step: impl Into<String>, reason: impl ToString) -> DiskError {
        DiskError::Refused { folder: folder.into(), step: step.into(), reason: reason.to_string() }
    }
}

/// Formats a size for display: exact below a megabyte, then with one decimal.
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
        assert_eq!(error.to_string(), "/mnt/nvme0: 21.0 GB are needed, 37.5 MB are free");
        let error = DiskError::CutShort { folder, end: 4096, at: 8192, bytes: 1000 };
        assert_eq!(
            error.to_string(),
            "/mnt/nvme0: the swap file ends at 4096, 1000 bytes were expected at 8192: it was cut short"
        );
        assert!(!error.help().contains('\n'));
    }
}
