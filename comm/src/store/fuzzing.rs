//! Both ends of a store's connection, held against anything that the other may send.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::client::{Protocol, StoreClient, greet};
use super::server::{Shared, requests};
use crate::auth::Key;
use crate::fuzzing::peer_that_sends;

/// Requests of a client that has proven itself.
pub(crate) fn server(bytes: &[u8]) {
    let (mut stream, _peer) = peer_that_sends(bytes);
    let shared = Shared::default();
    // Nobody waits for a key that nobody will set.
    shared.closing.store(true, Ordering::SeqCst);
    let _ = requests(&mut stream, &shared);
}

/// A server's answers to `get`, which are values of at most what was sent, and to `set`.
pub(crate) fn client(bytes: &[u8]) {
    for protocol in [Protocol::Ours, Protocol::Torch] {
        let (stream, _peer) = peer_that_sends(bytes);
        let mut client = StoreClient { stream, address: "fuzz".into(), protocol };
        let deadline = Instant::now() + Duration::from_secs(1);
        while let Ok(value) = client.get("key", deadline) {
            assert!(value.len() < bytes.len(), "{} bytes of {}", value.len(), bytes.len());
        }
        let _ = client.set("key", b"value");
    }
}

/// What a server says first.
pub(crate) fn greeting(bytes: &[u8]) {
    let (mut stream, _peer) = peer_that_sends(bytes);
    let _ = greet(&mut stream, &Key::new(None));
}
