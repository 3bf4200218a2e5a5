//! Object stores for zero-train: Amazon S3 and compatible stores, Google Cloud Storage, Azure Blob Storage, the Hugging
//! Face Hub and web servers.
//!
//! [`Stores`] lists the objects that an address or a pattern names, and keeps downloaded objects in a folder that all
//! processes of a host share. No other part of zero-train communicates with a store.
//!
//! | address | names |
//! |---|---|
//! | `s3://bucket/key` | an object in S3 |
//! | `gs://bucket/key` | an object in Google Cloud Storage |
//! | `az://container/key`, `abfss://container@account.dfs.core.windows.net/key` | a blob in Azure |
//! | `hf://owner/name/file`, `hf://datasets/owner/name@revision/file` | a file in a repository of the Hub |
//! | `https://host/file` | a file on a web server, which cannot be listed |

mod cache;
mod client;
mod digest;
mod download;
mod error;
mod files;
mod folder;
mod hub;
mod hub_cache;
mod list;
mod location;
mod profile;
mod upload;

use std::path::PathBuf;
use std::time::Duration;

pub use cache::Local;
pub use client::use_tls;
pub use error::{Error, on_one_line};
pub use folder::complete;
pub use list::Found;
pub use location::check;
pub use upload::check_writable;

use digest::Checksum;
use location::Location;

/// An object of a store, in the state in which it was listed.
#[derive(Debug, Clone)]
pub struct Object {
    /// The address of this object alone.
    pub address: String,
    location: Location,
    key: object_store::path::Path,
    /// Length in bytes.
    pub size: u64,
    /// The store's identifier of this content, such as its `ETag`. It changes when the object is replaced.
    pub version: Option<String>,
    checksum: Option<Checksum>,
    /// The file on this machine, if another program keeps it there.
    local: Option<PathBuf>,
}

impl PartialEq for Object {
    fn eq(&self, other: &Self) -> bool {
        (&self.address, self.size, &self.version) == (&other.address, other.size, &other.version)
    }
}

/// Informs a caller while it waits for a store, and lets the caller end the wait.
pub trait Watch {
    /// Reports that `done` of `total` bytes of an object are on this machine.
    fn progress(&self, done: u64, total: u64);

    /// Reports that a request failed and will be retried for at most the time `left`.
    fn waits(&self, problem: &Error, left: Duration);

    /// Returns whether the wait should end with [`Error::Stopped`]. Called often.
    fn is_stopped(&self) -> bool;
}

/// Access to all stores, with a folder for downloaded objects.
#[derive(Debug, Clone)]
pub struct Stores {
    folder: PathBuf,
    limit: Option<u64>,
    patience: Duration,
}

/// Time without any progress after which a store counts as unreachable.
const PATIENCE: Duration = Duration::from_secs(5 * 60);

impl Stores {
    /// Keeps downloads in `folder`, with at most `limit` bytes. The least recently used objects are removed first.
    pub fn new(folder: impl Into<PathBuf>, limit: Option<u64>) -> Self {
        Self { folder: folder.into(), limit, patience: PATIENCE }
    }

    /// Sets the time without any progress after which a store counts as unreachable. The default is 5 minutes.
    #[must_use]
    pub fn patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }
}
