//! Anonymous memory files, which other processes of the same user can open.
//!
//! The file never has a name in any file system, so it cannot be left behind. Other processes open it through its
//! owner's entry in `/proc`, which the kernel permits only to processes of the same user. It is sealed against
//! shrinking, so a process that has mapped it can keep using the mapping even after the owner has ended.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

/// The data that another process needs to open a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticket {
    process: u32,
    descriptor: i32,
    /// Random number that is also stored in the first word of the file. A process compares the two to verify that the
    /// entry in `/proc` is the right file.
    pub(crate) nonce: u64,
}

impl Ticket {
    /// Size of an encoded ticket in bytes.
    pub(crate) const BYTES: usize = 16;

    pub(crate) fn new(file: &File, nonce: u64) -> Ticket {
        Ticket { process: std::process::id(), descriptor: file.as_raw_fd(), nonce }
    }

    pub(crate) fn encode(&self) -> [u8; Ticket::BYTES] {
        let mut bytes = [0; Ticket::BYTES];
        bytes[..4].copy_from_slice(&self.process.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.descriptor.to_le_bytes());
        bytes[8..].copy_from_slice(&self.nonce.to_le_bytes());
        bytes
    }

    /// Returns `None` for zeros, which a process without a file sends.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Ticket> {
        let (process, rest) = bytes.split_first_chunk()?;
        let (descriptor, rest) = rest.split_first_chunk()?;
        let (nonce, _) = rest.split_first_chunk()?;
        let process = u32::from_le_bytes(*process);
        let (descriptor, nonce) = (i32::from_le_bytes(*descriptor), u64::from_le_bytes(*nonce));
        (process != 0).then_some(Ticket { process, descriptor, nonce })
    }

    pub(crate) fn open(&self) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).open(self.path())
    }

    pub(crate) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", self.process, self.descriptor)
    }
}

/// Checks whether processes of this host can share memory, by creating a memory file and opening it through its entry
/// in `/proc`.
///
/// # Errors
/// Returns the error of the kernel.
pub fn shared_memory() -> Result<(), String> {
    let words = |error: io::Error| error.to_string();
    let file = create("zero-train-probe", 4096).map_err(words)?;
    Ticket::new(&file, 0).open().map(drop).map_err(words)
}

/// Creates a file of `bytes` zeros, of which only touched pages are resident. Child processes do not inherit it.
pub(crate) fn create(name: &str, bytes: u64) -> io::Result<File> {
    let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    file.set_permissions(Permissions::from_mode(0o600))?;
    file.set_len(bytes)?;
    // If the file could be truncated, a process could crash the others that have mapped it.
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}
