//! Ranks and who starts them: processes, hosts, networks, launchers.

mod alike;
mod hosts;
mod launchers;
pub(crate) mod namespaces;
mod network;
mod notice;
mod processes;
pub(crate) mod ranks;
mod watch;
