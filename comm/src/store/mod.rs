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

use std::io;
use std::net::TcpStream;
use std::time::Instant;

pub use client::StoreClient;
pub use server::StoreServer;

use crate::auth::read_by;

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

// Requests of this crate's protocol: a code, then strings. `SET key value` is answered with a zero byte. `GET key
// milliseconds` waits for the key and is answered with 1 and the value, or with 0 after the timeout. A message that was
// damaged on its way ends the connection.
pub(crate) const SET: u8 = 1;
pub(crate) const GET: u8 = 2;

/// Returns a string of this crate's protocol: its length as a little-endian u32, its bytes and their CRC-32.
fn string(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u32).to_le_bytes(), bytes, &crc32fast::hash(bytes).to_le_bytes()].concat()
}

fn read_number(stream: &mut TcpStream, deadline: Instant) -> io::Result<u32> {
    let mut number = [0; 4];
    read_by(stream, &mut number, deadline)?;
    Ok(u32::from_le_bytes(number))
}

fn read_string(stream: &mut TcpStream, limit: usize, deadline: Instant) -> io::Result<Vec<u8>> {
    let length = read_number(stream, deadline)? as usize;
    if length > limit {
        return Err(io::Error::other(format!("a string of the store has {length} bytes, more than the limit")));
    }
    let mut bytes = vec![0; length];
    read_by(stream, &mut bytes, deadline)?;
    match read_number(stream, deadline)? == crc32fast::hash(&bytes) {
        true => Ok(bytes),
        false => Err(io::Error::other("a message of the store is damaged: its checksum does not match")),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;
    use std::time::Duration;

    use super::*;

    #[test]
    fn every_flipped_bit_of_a_string_is_detected() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        let address = listener.local_addr().expect("an address");
        let read = |bytes: &[u8]| {
            let mut sender = TcpStream::connect(address).expect("a connection");
            sender.write_all(bytes).expect("sent");
            drop(sender);
            let (mut stream, _) = listener.accept().expect("a connection");
            read_string(&mut stream, 100, Instant::now() + Duration::from_secs(60))
        };
        let whole = string(b"the state of a launcher");
        assert_eq!(read(&whole).expect("whole"), b"the state of a launcher");
        for bit in 0..8 * whole.len() {
            let mut damaged = whole.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(read(&damaged).is_err(), "bit {bit}");
        }
    }
}
