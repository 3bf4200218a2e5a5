//! A small key-value store through which the ranks of a job exchange their addresses.
//!
//! [`StoreServer`] serves only clients that prove the job token. [`StoreClient`] also speaks the protocol of PyTorch's
//! `TCPStore`, which is the server on `MASTER_PORT` under torchrun and Ray. The client's first message is a valid
//! `TCPStore` ping; from the answer, the client learns which of the two servers it has reached.

mod client;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod server;
mod torch;

pub use client::StoreClient;
pub use server::StoreServer;

/// Why a request to the store failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The server cannot listen on this address.
    #[error("cannot listen on {address}: {detail}")]
    Bind {
        /// The address.
        address: String,
        /// The error of the operating system.
        detail: String,
        /// Whether another process already listens there.
        in_use: bool,
    },
    /// The server did not answer, did not answer in time, or uses an unknown protocol.
    #[error("{address}: {detail}")]
    Unreachable {
        /// The address.
        address: String,
        /// What went wrong.
        detail: String,
    },
    /// The server did not accept the client's token, or could not prove that it knows the token itself.
    #[error("{address}: the job token was not accepted")]
    Unauthorized {
        /// The address.
        address: String,
    },
    /// A key did not appear in time.
    #[error("{address}: no rank has set {key}")]
    Missing {
        /// The address.
        address: String,
        /// The key.
        key: String,
    },
    /// A key or a value is too long.
    #[error("{what} has {bytes} bytes; at most {limit} are allowed")]
    TooLong {
        /// Which of the two is too long: `a key` or `a value`.
        what: &'static str,
        /// Its length in bytes.
        bytes: usize,
        /// The limit in bytes.
        limit: usize,
    },
}

/// Maximum length of a key in bytes, as in PyTorch's store.
pub(crate) const MAX_KEY: usize = 8 * 1024;
/// Maximum length of a value in bytes.
pub(crate) const MAX_VALUE: usize = 64 * 1024;
/// Maximum number of keys of a server. It limits the memory that a faulty client can use, even one that knows the
/// token.
pub(crate) const MAX_KEYS: usize = 1 << 20;

// Requests of this crate's protocol: a code, then strings, each preceded by its length as a little-endian u32. `SET key
// value` is answered with a zero byte. `GET key milliseconds` waits for the key and is answered with 1, the length and
// the value, or with 0 after the timeout.
pub(crate) const SET: u8 = 1;
pub(crate) const GET: u8 = 2;
