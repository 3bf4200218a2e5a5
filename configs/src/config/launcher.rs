//! `launcher`: how ranks are started and how they talk.

use serde::Serialize;

use crate::choice::choice;
use crate::reader::Resolver;

/// `launcher`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Launcher {
    /// Ranks to start on this machine; one a stage of the pipeline when not given. In a resolved configuration this is the world size.
    pub num_processes: usize,
    /// What carries messages between ranks.
    pub transport: Transport,
    /// Network interface or address to bind; `None` is loopback.
    pub interface: Option<String>,
    /// Seconds without a sign of a peer before it counts as lost.
    pub timeout_seconds: f64,
    /// Compute threads of each rank; `None` is `auto`: the cores divided by the ranks on this machine.
    #[serde(serialize_with = "crate::yaml_out::auto")]
    pub threads_per_rank: Option<usize>,
    /// Bind each rank to cores of its own where there are enough.
    pub bind_cores_to_rank: bool,
    /// The cores of this machine that ranks may use, as `0-27,32-59`; `None`: those that the process may.
    pub bind_core_list: Option<String>,
}

choice! {
    /// What carries messages between ranks.
    pub enum Transport {
        /// Shared memory when all ranks are on one machine, else TCP.
        Auto = "auto",
        /// Processes on one machine.
        SharedMemory = "shared_memory",
        /// Processes on any machines.
        Tcp = "tcp",
        /// Ranks as threads of one process.
        Threads = "threads",
    }
}

impl Launcher {
    pub(crate) fn read(resolver: &mut Resolver<'_>, world_size: usize) -> Self {
        let mut keys = resolver.section("launcher");
        Self {
            num_processes: world_size,
            transport: keys.choice("transport", Transport::Auto),
            interface: keys.optional_text("interface"),
            timeout_seconds: keys.float("timeout_seconds"),
            threads_per_rank: keys.optional_int("threads_per_rank"),
            bind_cores_to_rank: keys.bool("bind_cores_to_rank"),
            bind_core_list: keys.optional_text("bind_core_list"),
        }
    }
}
