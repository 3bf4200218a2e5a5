//! The client of the store, for this crate's server and PyTorch's.

use std::io::{self, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::server::OURS;
use super::torch;
use super::{GET, MAX_KEY, MAX_VALUE, SET, StoreError, read_string, string};
use crate::auth::{self, HELLO_BYTES, Key, PROOF_TIME, Refusal, read_by};

/// A connection to a store.
pub struct StoreClient {
    pub(super) stream: TcpStream,
    pub(super) address: String,
    pub(super) protocol: Protocol,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Protocol {
    Ours,
    Torch,
}

/// Delay between two attempts to reach a server that does not listen yet.
const RETRY: Duration = Duration::from_millis(20);

impl StoreClient {
    /// Connects to a store. The server may start later than its clients, so this retries until the deadline.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`] or [`StoreError::Unauthorized`].
    pub fn connect(address: &str, token: Option<&str>, deadline: Instant) -> Result<StoreClient, StoreError> {
        StoreClient::connect_any(&[address], token, deadline)
    }

    /// Tries the addresses in order until the deadline, and connects to the first one that answers.
    pub(crate) fn connect_any(
        addresses: &[&str],
        token: Option<&str>,
        deadline: Instant,
    ) -> Result<StoreClient, StoreError> {
        let key = Key::new(token);
        for address in addresses.iter().cycle() {
            let error = match attempt(address, &key, deadline) {
                Ok((stream, protocol)) => {
                    return Ok(StoreClient { stream, address: address.to_string(), protocol });
                }
                Err(Refusal::Proof) => return Err(StoreError::Unauthorized { address: address.to_string() }),
                Err(Refusal::Io(error)) => error,
                Err(Refusal::Protocol | Refusal::Verdict(_)) => {
                    let detail = "the server at this address is neither zero-train's store nor PyTorch's".into();
                    return Err(StoreError::Unreachable { address: address.to_string(), detail });
                }
            };
            if Instant::now() + RETRY >= deadline {
                return Err(StoreError::Unreachable { address: address.to_string(), detail: error.to_string() });
            }
            std::thread::sleep(RETRY);
        }
        Err(StoreError::Unreachable { address: String::new(), detail: "no address to connect to".into() })
    }

    /// Sets a key.
    ///
    /// # Errors
    /// [`StoreError::TooLong`] or [`StoreError::Unreachable`].
    pub fn set(&mut self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        check_length("a key", key.len(), MAX_KEY)?;
        check_length("a value", value.len(), MAX_VALUE)?;
        let done = match self.protocol {
            Protocol::Torch => torch::set(&mut self.stream, key, value),
            Protocol::Ours => self.set_ours(key, value),
        };
        done.map_err(|error| self.unreachable(&error))
    }

    fn set_ours(&mut self, key: &str, value: &[u8]) -> io::Result<()> {
        self.stream.write_all(&[&[SET], &string(key.as_bytes())[..], &string(value)].concat())?;
        read_by(&mut self.stream, &mut [0], Instant::now() + PROOF_TIME)
    }

    /// Waits until a key is set and returns its value.
    ///
    /// # Errors
    /// [`StoreError::Missing`] if no client has set the key by the deadline, [`StoreError::TooLong`] or
    /// [`StoreError::Unreachable`].
    pub fn get(&mut self, key: &str, deadline: Instant) -> Result<Vec<u8>, StoreError> {
        check_length("a key", key.len(), MAX_KEY)?;
        let value = match self.protocol {
            Protocol::Torch => torch::get(&mut self.stream, key, deadline, MAX_VALUE),
            Protocol::Ours => self.get_ours(key, deadline),
        };
        match value {
            Ok(Some(value)) => Ok(value),
            Ok(None) => Err(StoreError::Missing { address: self.address.clone(), key: key.into() }),
            Err(error) => Err(self.unreachable(&error)),
        }
    }

    fn get_ours(&mut self, key: &str, deadline: Instant) -> io::Result<Option<Vec<u8>>> {
        let patience = deadline.saturating_duration_since(Instant::now()).as_millis();
        let patience = u32::try_from(patience).unwrap_or(u32::MAX).to_le_bytes();
        self.stream.write_all(&[&[GET], &string(key.as_bytes())[..], &patience].concat())?;
        let deadline = deadline + PROOF_TIME;
        let mut found = [0];
        read_by(&mut self.stream, &mut found, deadline)?;
        if found[0] == 0 {
            return Ok(None);
        }
        Ok(Some(read_string(&mut self.stream, MAX_VALUE, deadline)?))
    }

    fn unreachable(&self, error: &io::Error) -> StoreError {
        StoreError::Unreachable { address: self.address.clone(), detail: error.to_string() }
    }
}

fn attempt(address: &str, key: &Key, deadline: Instant) -> Result<(TcpStream, Protocol), Refusal> {
    let mut last = io::Error::other("the host name does not resolve to an address");
    for address in address.to_socket_addrs()? {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        match TcpStream::connect_timeout(&address, left.min(Duration::from_secs(5))) {
            Err(error) => last = error,
            // If the server's port is in the ephemeral range and no server listens on it yet, a connection to this port
            // can connect to itself.
            Ok(stream) if stream.local_addr().ok() == stream.peer_addr().ok() => {
                last = io::ErrorKind::ConnectionRefused.into();
            }
            Ok(mut stream) => {
                stream.set_nodelay(true)?;
                return greet(&mut stream, key).map(|protocol| (stream, protocol));
            }
        }
    }
    Err(last.into())
}

/// Determines the server's protocol and proves the token to a server of this crate.
pub(super) fn greet(stream: &mut TcpStream, key: &Key) -> Result<Protocol, Refusal> {
    // The number for the ping. Any number works that differs from the answer of this crate's server.
    let number = (std::process::id()).to_le_bytes();
    stream.write_all(&torch::hello(u32::from_le_bytes(number)))?;
    let mut answer = [0; 4];
    read_by(stream, &mut answer, Instant::now() + PROOF_TIME)?;
    if answer == OURS {
        auth::prove(stream, key, &[0; HELLO_BYTES])?;
        return Ok(Protocol::Ours);
    }
    if answer == number {
        return Ok(Protocol::Torch);
    }
    Err(Refusal::Protocol)
}

fn check_length(what: &'static str, bytes: usize, limit: usize) -> Result<(), StoreError> {
    if bytes > limit {
        return Err(StoreError::TooLong { what, bytes, limit });
    }
    Ok(())
}
