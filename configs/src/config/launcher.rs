//! `launcher`: how ranks are started and how they communicate.

use serde::Serialize;

use crate::choice::{Choice as _, choice};
use crate::read::reader::Resolver;
use crate::schema::*;
use crate::table::section;

section! {
    /// `launcher`.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Launcher(keys) in "launcher" {
        /// Number of ranks to start on this machine. If not given: pipeline stages × ranks that share a sequence ×
        /// tensor-parallel ranks. In a resolved configuration this is the world size.
        pub num_processes: usize = engine(RANKS, "= pipeline.stages × ranks that share a sequence × ranks of a tensor group; with training.device: cuda, one per GPU", "Ranks to start on this machine") [is keys.facts().ranks];
        pub transport: Transport = key(Transport::KIND, "auto", "Transport for messages between ranks");
        pub gpu_transport: GpuTransport = key(GpuTransport::KIND, "auto", "Transport for tensors between GPUs; auto: NCCL if it is installed and each rank has its own GPU, otherwise host memory");
        pub check_collectives: bool = key(Kind::Bool, "false", "For debugging: before each collective between GPUs, ranks meet on the host and compare their calls, and the host waits until the collective is complete. If false, ranks compare their programs once, after the first step, and GPUs run collectives ahead of the host");
        pub interface: Option<String> = key(Kind::Text, "null", "Network interface or address to bind; loopback if omitted");
        pub timeout_seconds: f64 = key(Kind::Float(Range { min: 0.0, max: 86_400.0, above: true, below: false }), "30.0", "Seconds without a sign of life from a peer before it counts as lost");
        /// Compute threads per rank; `None` is `auto`: the number of cores divided by the number of ranks on this
        /// machine.
        #[serde(serialize_with = "crate::write::yaml_out::auto")]
        pub threads_per_rank: Option<usize> = engine(Kind::Int { min: 1, max: 4096 }, "auto", "Compute threads per rank; auto: the cores divided by the ranks on this machine");
        pub instruction_set: InstructionSet = key(InstructionSet::KIND, "auto", "Instruction set of the kernels; auto: the widest that the processor supports. The environment variable ZERO_TRAIN_ISA overrides it");
        pub bind_cores_to_rank: bool = key(Kind::Bool, "true", "Bind each rank to its own cores; skipped if there are more ranks or threads than cores, or if another launcher has bound the ranks");
        pub max_restarts: usize = key(COUNT_OR_0, "0", "Maximum number of times that `zero-train -n` or `zero-train launch` restarts all ranks from the newest checkpoint after a rank dies; 0: never");
        pub min_ranks: Option<usize> = key(RANKS, "null", "Minimum number of surviving ranks for a restart without the ranks that died, with the same train_batch_size, on one host; null: restart all ranks");
        pub bind_core_list: Option<String> = key(Kind::Text, "null", "Cores to use, such as `0-27,32-59`; null: all cores that the process may use");
    }
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
        /// For ranks that run as threads of one process.
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
        /// Host memory, over `launcher.transport`.
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
    /// Checks the keys about restarts against each other.
    pub(crate) fn check(&self, resolver: &mut Resolver<'_>) {
        if self.max_restarts > 0 && self.transport == Transport::Threads {
            let message = "restarts need ranks in separate processes; with `transport: threads` all ranks end together"
                .to_string();
            let help = "remove one of the two".to_string();
            resolver.contradiction(&[Self::max_restarts, Self::transport], message, Some(help));
        }
        let Some(min_ranks) = self.min_ranks else { return };
        if self.max_restarts == 0 {
            let message = "`min_ranks` needs `max_restarts`: training continues with fewer ranks only after a restart"
                .to_string();
            let help = format!("set `{}` as well", Self::max_restarts);
            resolver.contradiction(&[Self::min_ranks, Self::max_restarts], message, Some(help));
        }
        if min_ranks > self.num_processes {
            let message =
                format!("the minimum of {min_ranks} ranks is more than the {} ranks of the run", self.num_processes);
            resolver.contradiction(&[Self::min_ranks, Self::num_processes], message, None);
        }
    }
}
