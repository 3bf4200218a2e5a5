//! Options of `bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::config::ConfigArgs;

/// Options of `bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// The benchmark to run.
    #[command(subcommand)]
    pub(crate) what: Bench,
}

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// AdamW, compared with a loop that reads four arrays and writes three
    Adam {
        /// Millions of parameters
        #[arg(long, default_value_t = 50)]
        millions: usize,
        /// Runs of the benchmark and of its comparison, which alternate
        #[arg(long, default_value_t = 9)]
        repeats: usize,
    },
    /// Each optimizer that updates element by element, and the codes of qwZ and qgZ, compared with loops that move the
    /// same bytes
    Optimizers {
        /// Millions of parameters
        #[arg(long, default_value_t = 50)]
        millions: usize,
        /// Runs of each optimizer and of its comparison, which alternate
        #[arg(long, default_value_t = 9)]
        repeats: usize,
    },
    /// Collectives between processes on this machine
    Comm {
        /// Number of processes
        #[arg(long, short, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
        num_processes: u32,
        /// Size of the f32 vector, in megabytes
        #[arg(long, default_value_t = 64)]
        megabytes: usize,
        /// Runs of each operation
        #[arg(long, default_value_t = 15)]
        repeats: usize,
        /// Transport: auto, shared_memory or tcp
        #[arg(long, default_value = "auto")]
        transport: String,
    },
    /// Measure layers, transfers and the optimizer, and write the cost table that `plan --costs` reads
    Costs {
        /// The configuration to measure.
        #[command(flatten)]
        config: ConfigArgs,
        /// File to write
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
        /// Measured steps, after two warm-up steps
        #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=18))]
        steps: u32,
        /// Stop measuring after SECONDS, even if fewer steps were measured; at least one step is measured
        #[arg(long, value_name = "SECONDS")]
        seconds: Option<u32>,
    },
    /// Disk I/O as `nvme_path` performs it, compared with threads that read and write the same bytes
    Io {
        /// Folder on the disk to measure, in which a file is created
        #[arg(default_value = ".")]
        folder: PathBuf,
        /// Size of the file, in MiB
        #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(1..1 << 30))]
        megabytes: u64,
        /// Size of a request, in MiB
        #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..1 << 20))]
        request_megabytes: u32,
        /// Requests in flight
        #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..1 << 10))]
        requests: u32,
        /// Runs of the benchmark and of its comparison, which alternate
        #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
        repeats: u32,
        /// Use threads with positioned reads and writes instead of io_uring
        #[arg(long)]
        threads: bool,
        /// Print one line of JSON
        #[arg(long)]
        json: bool,
    },
    /// Training steps of a configuration with state on a disk, alternating with plain disk I/O
    Offload {
        /// The configuration to measure.
        #[command(flatten)]
        config: ConfigArgs,
        /// Measured steps, after two warm-up steps
        #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=18))]
        steps: u32,
    },
    /// Every operation at the shapes of two GPT models, compared with the CPU's limit
    Ops {
        /// Measure matrix products only, without attention and element-wise operations
        #[arg(value_name = "products", value_parser = ["products"])]
        only: Option<String>,
        /// Number of threads per operation
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
        threads: u32,
        /// Runs of each operation and of its limit, which alternate
        #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
        repeats: u32,
    },
    /// Measured and simulated step times of pipelines whose layers sleep, so that stages can outnumber cores
    Pipeline {
        /// Numbers of stages, separated by commas
        #[arg(long, value_delimiter = ',', default_value = "2,4,8", value_parser = clap::value_parser!(u32).range(1..))]
        stages: Vec<u32>,
        /// Micro-batches per step
        #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
        micro_batches: u32,
        /// Measured steps, after one warm-up step
        #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
        repeats: u32,
    },
    /// Time of each operation in a training step
    Profile {
        /// The configuration to measure.
        #[command(flatten)]
        config: ConfigArgs,
        /// Measured steps, after two warm-up steps
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
        steps: u32,
    },
    /// Training delay caused by saving checkpoints, compared with only copying and writing the same bytes
    Save {
        /// The configuration to measure.
        #[command(flatten)]
        config: ConfigArgs,
        /// Folder on the disk to measure, in which the checkpoints are written
        #[arg(long, value_name = "DIR", default_value = ".")]
        folder: PathBuf,
        /// Runs of each measurement and of its comparison
        #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
        repeats: u32,
    },
    /// Training steps of a configuration on synthetic tokens: time and tokens per second
    Step {
        /// The configuration to measure.
        #[command(flatten)]
        config: ConfigArgs,
        /// Measured steps, after the warm-up steps
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
        steps: u32,
        /// Warm-up steps; the first one touches all memory
        #[arg(long, value_name = "STEPS", default_value_t = 2)]
        warm_up: u32,
        /// Measure for at least SECONDS
        #[arg(long, value_name = "SECONDS", default_value_t = 0)]
        seconds: u32,
        /// Print one line of JSON
        #[arg(long)]
        json: bool,
    },
}
