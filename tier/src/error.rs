//! What can go wrong between a rank and its disk, with where it happened and what to do about it.

use std::path::{Path, PathBuf};

/// Why a swap file could not be made, or a request on it failed. The text is one line; [`help`](DiskError::help) is another.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// There is nothing at the path.
    #[error("{}: there is no such folder", folder.display())]
    Missing {
        /// Where the swap file was to be.
        folder: PathBuf,
    },
    /// The path leads to something else.
    #[error("{}: this is no folder", folder.display())]
    NotAFolder {
        /// Where the swap file was to be.
        folder: PathBuf,
    },
    /// The folder lets no file be made in it.
    #[error("{}: no file can be made in this folder: {reason}", folder.display())]
    NotWritable {
        /// Where the swap file was to be.
        folder: PathBuf,
        /// The system's words.
        reason: String,
    },
    /// The disk has not the space, which is found before anything is written.
    #[error("{}: {} are needed, {} are free", folder.display(), size(*needed), size(*available))]
    NoSpace {
        /// Where the swap file was to be.
        folder: PathBuf,
        /// Bytes that were asked for.
        needed: u64,
        /// Bytes that a program without privileges may still use.
        available: u64,
    },
    /// The system refused a step of making the file.
    #[error("{}: the system refused to {step}: {reason}", folder.display())]
    Refused {
        /// Where the swap file was to be.
        folder: PathBuf,
        /// What was tried.
        step: String,
        /// The system's words.
        reason: String,
    },
    /// The file is shorter than it was made: someone truncated it, or the disk lost a part of it.
    #[error("{}: the swap file ends at {end}, {bytes} bytes were expected at {at}: it was cut short", folder.display())]
    CutShort {
        /// Where the swap file is.
        folder: PathBuf,
        /// Its length now.
        end: u64,
        /// The offset of what was to be read or written.
        at: u64,
        /// The bytes of it.
        bytes: u64,
    },
    /// The disk filled up under the file, in spite of the reservation: a quota, a thin volume, a snapshot.
    #[error("{}: no space was left when {bytes} bytes were written at {at} of the swap file", folder.display())]
    Full {
        /// Where the swap file is.
        folder: PathBuf,
        /// The offset of what was to be written.
        at: u64,
        /// The bytes of it.
        bytes: u64,
    },
    /// The disk could not read.
    #[error("{}: {bytes} bytes at {at} of the swap file could not be read: {reason}", folder.display())]
    Read {
        /// Where the swap file is.
        folder: PathBuf,
        /// The offset.
        at: u64,
        /// How many bytes.
        bytes: u64,
        /// The system's words.
        reason: String,
    },
    /// The disk could not write.
    #[error("{}: {bytes} bytes at {at} of the swap file could not be written: {reason}", folder.display())]
    Write {
        /// Where the swap file is.
        folder: PathBuf,
        /// The offset.
        at: u64,
        /// How many bytes.
        bytes: u64,
        /// The system's words.
        reason: String,
    },
    /// The arguments of a request, or the options, contradict what this crate asks for. Nothing was done.
    #[error("the swap file in {}: {detail}", folder.display())]
    Invalid {
        /// Where the swap file is.
        folder: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// The file was dropped, or the thread that served it ended, before the request was carried out.
    #[error("{}: the swap file is closed: {reason}", folder.display())]
    Closed {
        /// Where the swap file was.
        folder: PathBuf,
        /// Why.
        reason: String,
    },
    /// The system has no memory for a buffer.
    #[error("no memory for a buffer of {}", size(*bytes))]
    Memory {
        /// How large it was to be.
        bytes: u64,
    },
}

impl DiskError {
    /// What its reader can do about it.
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

/// Bytes for people: whole up to a megabyte, then with one decimal.
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
