//! `launcher`: how ranks are started and how they communicate.

use serde::Serialize;

use crate::choice::choice;
use crate::reader::Resolver;

/// `launcher`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Launcher {
    /// Ranks to start on this machine; one per pipeline stage if not given. In a resolved configuration this is the
    /// world size.
    pub num_processes: usize,
    /// Transport for messages between ranks.
    pub transport: Transport,
    /// Transport for values between GPUs.
    pub gpu_transport: GpuTransport,
    /// Network interface or address to bind to; `None` is loopback.
    pub interface: Option<String>,
    /// Seconds without a sign of life after which a peer counts as lost.
    pub timeout_seconds: f64,
    /// Compute threads per rank; `None` is `auto`: the number of cores divided by the number of ranks on this
    /// machine.
    #[serde(serialize_with = "crate::yaml_out::auto")]
    pub threads_per_rank: Option<usize>,
    /// Instruction set of the kernels; `auto` is the widest that the processor supports.
    pub instruction_set: InstructionSet,
    /// Bind each rank to its own cores if there are enough cores.
    pub bind_cores_to_rank: bool,
    /// Maximum number of times that the launcher restarts all ranks after one has died.
    pub max_restarts: usize,
    /// Minimum number of ranks of a restart. `None` restarts with the original number of ranks.
    pub min_ranks: Option<usize>,
    /// Cores of this machine that ranks may use, for example `0-27,32-59`. `None` uses the cores allowed to the
    /// process.
    pub bind_core_list: Option<String>,
}

choice! {
    /// Transport for messages between ranks.
    pub enum Transport {
        /// Shared memory when all ranks are on one machine, else TCP.
        Auto = "auto",
        /// For processes on one machine.
        SharedMemory = "shared_memory",
        /// For processes on any machines.
        Tcp = "tcp",
        /// For ranks that are threads of one process.
        Threads = "threads",
    }
}

choice! {
    /// Transport for values between GPUs.
    pub enum GpuTransport {
        /// NCCL if it is available and every rank has its own GPU, else the host.
        Auto = "auto",
        /// NCCL.
        Nccl = "nccl",
        /// Host memory, with the ranks' own transport.
        Host = "host",
    }
}

choice! {
    /// Instruction set of the kernels.
    pub enum InstructionSet {
        /// The widest that the processor supports.
        Auto = "auto",
        /// Scalar code.
        Baseline = "baseline",
        /// aarch64's vectors.
        Neon = "neon",
        /// AVX2 and FMA.
        Avx2 = "avx2",
        /// AVX-512 F, BW, DQ and VL.
        Avx512 = "avx512",
        /// AVX-512, and AMX for bf16 matrix products.
        Amx = "amx",
    }
}

impl Launcher {
    pub(crate) fn read(resolver: &mut Resolver<'_>, world_size: usize) -> Self {
        let mut keys = resolver.section("launcher");
        Self {
            num_processes: world_size,
            transport: keys.choice("transport", Transport::Auto),
            gpu_transport: keys.choice("gpu_transport", GpuTransport::Auto),
            interface: keys.optional_text("interface"),
            timeout_seconds: keys.float("timeout_seconds"),
            threads_per_rank: keys.optional_int("threads_per_rank"),
            instruction_set: keys.choice("instruction_set", InstructionSet::Auto),
            bind_cores_to_rank: keys.bool("bind_cores_to_rank"),
            max_restarts: keys.optional_int("max_restarts").unwrap_or(0),
            min_ranks: keys.optional_int("min_ranks"),
            bind_core_list: keys.optional_text("bind_core_list"),
        }
    }

    /// Checks the keys about restarts against each other.
    pub(crate) fn check(&self, resolver: &mut Resolver<'_>) {
        const RESTARTS: &str = "launcher.max_restarts";
        const MIN_RANKS: &str = "launcher.min_ranks";
        if self.max_restarts > 0 && self.transport == Transport::Threads {
            let message =
                "ranks that are threads of one process end together: none is left to start others".to_string();
            let help = "leave one of them out".to_string();
            resolver.contradiction(&[RESTARTS, "launcher.transport"], message, Some(help));
        }
        let Some(min_ranks) = self.min_ranks else { return };
        if self.max_restarts == 0 {
            let message = "fewer ranks can only go on if they are started again".to_string();
            let help = format!("write `{RESTARTS}` as well");
            resolver.contradiction(&[MIN_RANKS, RESTARTS], message, Some(help));
        }
        if min_ranks > self.num_processes {
            let message = format!("at least {min_ranks} ranks of {} cannot be left", self.num_processes);
            resolver.contradiction(&[MIN_RANKS, "launcher.num_processes"], message, None);
        }
    }
}
