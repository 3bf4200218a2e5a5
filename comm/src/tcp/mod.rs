//! Ranks as processes of several hosts: streams as TCP connections.

mod address;
mod hub;
mod wires;

pub use address::bind_address;
pub(crate) use hub::{Hub, Identity, Purpose};
pub use wires::CHUNK;
pub(crate) use wires::TcpWires;
