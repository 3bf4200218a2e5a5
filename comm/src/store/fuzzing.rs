//! Feeds arbitrary bytes to both ends of a store's connection.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::client::{Protocol, StoreClient, greet};
use super::server::{Shared, requests};
use crate::auth::Key;
use crate::fuzzing::peer_that_sends;

/// Feeds `bytes` to the server as the requests of an authenticated client.
pub(crate) fn server(bytes: &[u8]) {
    let (mut stream, _peer) = peer_that_sends(bytes);
    let shared = Shared::default();
    // The server is marked as closing: it then does not wait for keys that the input never sets.
    shared.closing.store(true, Ordering::SeqCst);
    let _ = requests(&mut stream, &shared);
}

/// Feeds `bytes` to the client as the server's answers to `get` and `set`. A value must be shorter than the input.
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

/// Feeds `bytes` to the client as a server's greeting.
pub(crate) fn greeting(bytes: &[u8]) {
    let (mut stream, _peer) = peer_that_sends(bytes);
    let _ = greet(&mut stream, &Key::new(None));
}
