//! Starting and losing ranks: processes, hosts, networks, and the launchers of other systems.

mod alike;
mod hosts;
mod launchers;
pub(crate) mod namespaces;
mod network;
mod notice;
mod processes;
pub(crate) mod ranks;
mod traffic;
mod watch;
