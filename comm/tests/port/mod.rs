//! Ports for tests that pass a port number to programs before anything listens on the port.
#![allow(unreachable_pub)] // shared by tests of several crates

use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};

/// Returns a free port of the loopback interface. Never returns the same port twice in a program. The port is below the
/// system's range of ephemeral ports, so no connection takes it before it is used.
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
