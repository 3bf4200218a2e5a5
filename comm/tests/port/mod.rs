//! Ports for tests that tell a port to programs before they listen on it.
#![allow(unreachable_pub)] // shared by tests of several crates

use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};

/// Returns a free port of the loopback interface that no test of this program gets twice. It is below the range from
/// which systems take ports for connections and for port 0, so that no other test takes it before it is used.
pub fn free_port() -> u16 {
    static GIVEN: AtomicU16 = AtomicU16::new(0);
    let first = std::process::id() % 10_000;
    loop {
        let port = 20_000 + (first as u16 + GIVEN.fetch_add(1, Ordering::Relaxed)) % 10_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
