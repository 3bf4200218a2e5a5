//! A small key-value store, where the ranks of a job leave their addresses for each other.
//!
//! [`StoreServer`] is ours and serves nobody who has not proven the job token. [`StoreClient`] also speaks to PyTorch's
//! `TCPStore`, because under torchrun and Ray that is what listens on `MASTER_PORT`. It knows which of the two it has from the
//! answer to its first message, which is a valid `TCPStore` ping.

mod client;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod server;
mod torch;

pub use client::StoreClient;
pub use server::StoreServer;

/// Why the store did not do what was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The server cannot listen on this address.
    #[error("cannot listen on {address}: {detail}")]
    Bind {
        /// The address.
        address: String,
        /// What the operating system says.
        detail: String,
        /// Whether somebody listens there already.
        in_use: bool,
    },
    /// Nobody answers, or not in time, or not in a language that we know.
    #[error("{address}: {detail}")]
    Unreachable {
        /// The address.
        address: String,
        /// What went wrong.
        detail: String,
    },
    /// The token was not accepted, or the server could not prove that it knows it.
    #[error("{address}: the job token was not accepted")]
    Unauthorized {
        /// The address.
        address: String,
    },
    /// A key did not appear in time.
    #[error("{address}: nobody has set {key}")]
    Missing {
        /// The address.
        address: String,
        /// The key.
        key: String,
    },
    /// A key or a value is too long.
    #[error("{what} of {bytes} bytes; at most {limit} are allowed")]
    TooLong {
        /// Key or value.
        what: &'static str,
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
}

/// Longest key in bytes, as in PyTorch's store.
pub(crate) const MAX_KEY: usize = 8 * 1024;
/// Longest value in bytes.
pub(crate) const MAX_VALUE: usize = 64 * 1024;
/// Most keys of a server: a proven client may still be broken.
pub(crate) const MAX_KEYS: usize = 1 << 20;

// Requests of our protocol: a code, then strings with their length as u32 in little-endian order. `SET key value` is answered
// with a zero byte; `GET key milliseconds` waits for the key and is answered with 1 and the value, or with 0.
pub(crate) const SET: u8 = 1;
pub(crate) const GET: u8 = 2;
