//! The server of the store.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::torch::{self, HELLO_BYTES};
use super::{GET, MAX_KEY, MAX_KEYS, MAX_VALUE, SET, StoreError, read_number, read_string, string};
use crate::auth::{self, Key, PROOF_TIME, WELCOME, read_by};
use crate::doorkeeper::{Doorkeeper, Pending};
use crate::health::SLICE;
use crate::lock::lock;

/// A key-value server that runs until it is dropped.
pub struct StoreServer {
    // Dropped first, so that no new connection is accepted.
    door: Doorkeeper,
    shared: Arc<Shared>,
}

#[derive(Default)]
pub(super) struct Shared {
    values: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
    pub(super) closing: AtomicBool,
}

/// The server's answer to a client's first message, which tells the client that this is not PyTorch's store.
pub(super) const OURS: [u8; 4] = *b"ZRO?";

impl StoreServer {
    /// Listens on an address, such as `("127.0.0.1", 0)` for a free port of this host. With a token, serves only
    /// clients that know the token. Without a token, serves every client that reaches the port.
    ///
    /// # Errors
    /// [`StoreError::Bind`] if the server cannot listen on the address.
    pub fn bind(address: impl ToSocketAddrs + std::fmt::Debug, token: Option<&str>) -> Result<StoreServer, StoreError> {
        let failed = |error: io::Error| StoreError::Bind {
            address: format!("{address:?}"),
            detail: error.to_string(),
            in_use: error.kind() == io::ErrorKind::AddrInUse,
        };
        let listener = TcpListener::bind(&address).map_err(failed)?;
        let (shared, key) = (Arc::new(Shared::default()), Key::new(token));
        let served = Arc::clone(&shared);
        let door = Doorkeeper::start(listener, "store", move |mut stream, pending| {
            // The client notices any failure itself.
            let _ = serve(&mut stream, pending, &key, &served);
            let _ = stream.shutdown(Shutdown::Both);
        });
        Ok(StoreServer { door: door.map_err(failed)?, shared })
    }

    /// Returns the address that the server listens on.
    pub fn address(&self) -> SocketAddr {
        self.door.address
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        self.shared.changed.notify_all();
    }
}

fn serve(stream: &mut TcpStream, pending: Pending, key: &Key, shared: &Shared) -> io::Result<()> {
    let mut hello = [0; HELLO_BYTES];
    read_by(stream, &mut hello, Instant::now() + PROOF_TIME)?;
    if !torch::is_hello(&hello) {
        return Ok(());
    }
    stream.set_nodelay(true)?;
    stream.write_all(&OURS)?;
    if auth::demand(stream, key, |_| WELCOME).is_err() {
        return Ok(());
    }
    drop(pending);
    requests(stream, shared)
}

/// Answers requests of an authenticated client until it disconnects.
pub(super) fn requests(stream: &mut TcpStream, shared: &Shared) -> io::Result<()> {
    loop {
        let Some(code) = next_code(stream, shared)? else { return Ok(()) };
        match code {
            SET => {
                let (key, value) = (read_key(stream)?, read_string(stream, MAX_VALUE, soon())?);
                let mut values = lock(&shared.values);
                if values.len() >= MAX_KEYS {
                    return Err(io::Error::other("too many keys"));
                }
                values.insert(key, value);
                drop(values);
                shared.changed.notify_all();
                stream.write_all(&[0])?;
            }
            GET => {
                let key = read_key(stream)?;
                let patience = Duration::from_millis(read_number(stream, soon())?.into());
                match shared.wait_for(&key, patience) {
                    None => stream.write_all(&[0])?,
                    Some(value) => {
                        stream.write_all(&[&[1], &string(&value)[..]].concat())?;
                    }
                }
            }
            _ => return Err(io::Error::other("unknown request")),
        }
    }
}

impl Shared {
    fn wait_for(&self, key: &str, patience: Duration) -> Option<Vec<u8>> {
        let deadline = Instant::now() + patience;
        let mut values = lock(&self.values);
        loop {
            if let Some(value) = values.get(key) {
                return Some(value.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.closing.load(Ordering::SeqCst) {
                return None;
            }
            values = self.changed.wait_timeout(values, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Returns the code of the next request; `None` if the client has disconnected or the server is closing.
fn next_code(stream: &mut TcpStream, shared: &Shared) -> io::Result<Option<u8>> {
    // A client may stay idle for any length of time. The read therefore times out regularly, to check whether the
    // server is closing.
    stream.set_read_timeout(Some(2 * SLICE))?;
    let mut code = [0];
    loop {
        match stream.read(&mut code) {
            Ok(0) => return Ok(None),
            Ok(_) => return Ok(Some(code[0])),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                if shared.closing.load(Ordering::SeqCst) {
                    return Ok(None);
                }
            }
            Err(error) => return Err(error),
        }
    }
}

/// The deadline for the rest of a request.
fn soon() -> Instant {
    Instant::now() + PROOF_TIME
}

fn read_key(stream: &mut TcpStream) -> io::Result<String> {
    String::from_utf8(read_string(stream, MAX_KEY, soon())?).map_err(io::Error::other)
}
