//! Options that select the configuration.

use std::path::PathBuf;

use clap::Args;
use zero_config::Typed;
use zero_train::process::launch::one_a_gpu;

/// Options that select the configuration.
#[derive(Debug, Clone, Args)]
pub(crate) struct ConfigArgs {
    /// ds.yaml or ds_config.json, or - for standard input; required. May be repeated: keys of later files override
    /// earlier ones
    // Optional for clap, which would otherwise require it even with a subcommand. `input.rs` rejects a missing option.
    #[arg(long, short, value_name = "FILE", visible_alias = "deepspeed_config")]
    pub(crate) config: Vec<PathBuf>,
    /// Number of ranks [default: launcher.num_processes; if unset, one per GPU; without GPUs, the smallest number that
    /// the other keys allow]
    #[arg(long, short, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) num_processes: Option<u32>,
    /// Override a value, for example zero_optimization.stage=2; may be repeated
    #[arg(long, value_name = "PATH=VALUE")]
    pub(crate) set: Vec<String>,
    /// Warn about unknown top-level keys, which DeepSpeed ignores, instead of rejecting them
    #[arg(long)]
    pub(crate) ignore_unknown_keys: bool,
}

impl ConfigArgs {
    /// Returns the number of ranks given on the command line. Without it, returns one rank per GPU if the run uses
    /// GPUs, and otherwise `None`: the configuration then decides.
    pub(crate) fn ranks(&self, typed: &Typed) -> Option<usize> {
        self.num_processes.map(|ranks| ranks as usize).or_else(|| one_a_gpu(typed))
    }
}
