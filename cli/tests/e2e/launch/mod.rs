//! Starting and losing ranks: processes, hosts, networks, and the launchers of other systems.

mod bad_steps;
mod cable;
pub(crate) mod hosts;
mod launchers;
pub(crate) mod namespaces;
mod network;
mod notice;
mod processes;
pub(crate) mod ranks;
mod same_settings;
mod traffic;
