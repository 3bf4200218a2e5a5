//! Arguments of the command line.

use std::path::PathBuf;

use clap::{Arg, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};

mod launch;

pub(crate) use launch::LaunchArgs;

/// ZeRO-style memory-optimized training for candle models.
#[derive(Debug, Parser)]
#[command(name = "zero-train", version, args_conflicts_with_subcommands = true)]
#[command(override_usage = "zero-train --config <FILE> [-n <N>] [OPTIONS]\n       zero-train <COMMAND>")]
pub(crate) struct Cli {
    /// Without one: train.
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    /// Of training.
    #[command(flatten)]
    pub(crate) train: TrainArgs,
}

/// What else the binary does.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Print the resolved configuration with the origin of each value, or every error at once
    Check(CheckArgs),
    /// Print who has which layers, what each rank needs and sends, and with --grid when it computes what; starts nothing
    Plan(PlanArgs),
    /// Start ranks on this host, one of several if need be, with the flags of torchrun, deepspeed and accelerate
    Launch(Box<LaunchArgs>),
    /// Find the fastest configuration that fits, by plans, short profiles and runs in turn; with --sweep the best hyperparameters
    Autotune(AutotuneArgs),
    /// Measure this machine: kernels, collectives or whole steps
    Bench(BenchArgs),
    /// Look at a checkpoint, check it, or make one of pretrained weights and weights of one
    Checkpoint(CheckpointArgs),
    /// Write one HTML page of a run, finished or not, or of several overlaid: curves, memory, timeline, communication, time
    Report(ReportArgs),
    /// Print what this machine offers: cores, instructions, memory, GPUs, NCCL, and what of NVIDIA's is missing
    Doctor,
}

/// Where the configuration comes from.
#[derive(Debug, Clone, Args)]
pub(crate) struct ConfigArgs {
    /// ds.yaml or ds_config.json, or - for standard input; required. Given again, a further file, whose keys stand over the first's
    // Optional for clap, which would otherwise also require it for a subcommand.
    #[arg(long, short, value_name = "FILE", visible_alias = "deepspeed_config")]
    pub(crate) config: Vec<PathBuf>,
    /// Ranks to start on this machine [default: launcher.num_processes, else pipeline.stages]
    #[arg(long, short, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) num_processes: Option<u32>,
    /// Override a value, for example zero_optimization.stage=2; may be given several times
    #[arg(long, value_name = "PATH=VALUE")]
    pub(crate) set: Vec<String>,
    /// Warn of unknown keys at the top of the file, which DeepSpeed ignores, instead of refusing them
    #[arg(long)]
    pub(crate) ignore_unknown_keys: bool,
}

/// Options of training.
#[derive(Debug, Clone, Args)]
pub(crate) struct TrainArgs {
    /// Where the configuration comes from.
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Folder of the run [default: training.output_dir]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Continue from the newest checkpoint of the run (auto), or from a checkpoint's folder or the newest of a run's
    #[arg(long, value_name = "auto|DIR")]
    pub(crate) resume: Option<String>,
    /// Stop after this many optimizer steps
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) max_steps: Option<u64>,
    /// Start all ranks again from the newest checkpoint when one has died, so often [default: launcher.max_restarts]
    #[arg(long, value_name = "K")]
    pub(crate) max_restarts: Option<u32>,
    /// Restart without the ranks that died, while so many are left [default: launcher.min_ranks, else all are started]
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) min_ranks: Option<u32>,
    /// Train K steps, compare them with one process at stage 0, and stop
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) verify: Option<u64>,
    /// Start although the plan says that memory will not suffice
    #[arg(long)]
    pub(crate) force: bool,
    /// Plain lines instead of a progress bar, also on a terminal
    #[arg(long, conflicts_with = "quiet")]
    pub(crate) plain: bool,
    /// Print nothing but errors
    #[arg(long)]
    pub(crate) quiet: bool,
    /// Accepted for launchers of DeepSpeed scripts; has no effect
    #[arg(long, hide = true)]
    pub(crate) deepspeed: bool,
    /// Accepted for launchers of DeepSpeed scripts; has no effect
    #[arg(long, hide = true, value_name = "N")]
    pub(crate) local_rank: Option<u32>,
}

/// Options of `check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Where the configuration comes from.
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
}

/// Options of `plan`.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// Where the configuration comes from.
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Draw the step: a row for each pipeline stage, a column for each slot of time
    #[arg(long, conflicts_with = "json")]
    pub(crate) grid: bool,
    /// Plan for this many ranks, on machines that need not be this one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) world_size: Option<u32>,
    /// Memory that a rank may use, for example 80GiB [default: training.memory_limit, else its share of this machine]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) device_memory: Option<u64>,
    /// Bytes of state of a rank at each ZeRO stage over 1 to 1024 ranks
    #[arg(long, conflicts_with = "json")]
    pub(crate) stages: bool,
    /// A cost table of `bench costs`, for the time of a step [default: training.cost_table]
    #[arg(long, value_name = "FILE")]
    pub(crate) costs: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Options of `autotune`.
#[derive(Debug, Args)]
pub(crate) struct AutotuneArgs {
    /// Where the configuration comes from; -n is the most ranks
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Train with the hyperparameters of autotuning.sweep instead, and find those with the lowest evaluation loss
    #[arg(long)]
    pub(crate) sweep: bool,
    /// Folder of the results [default: autotuning.results_dir]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Go on with what an earlier search of the same configuration has measured
    #[arg(long)]
    pub(crate) resume: bool,
    /// Plain lines instead of a table, also on a terminal
    #[arg(long, conflicts_with = "quiet")]
    pub(crate) plain: bool,
    /// Print nothing but errors
    #[arg(long)]
    pub(crate) quiet: bool,
}

fn size(text: &str) -> Result<u64, String> {
    zero_config::bytes(text).ok_or_else(|| "write a number of bytes, or for example 80GiB or 800MB".to_string())
}

/// Options of `report`.
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// Folder of a run; several are overlaid in one page
    #[arg(value_name = "RUN", required = true)]
    pub(crate) runs: Vec<PathBuf>,
    /// File to write; required for several runs [default: RUN/report.html]
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
}

/// Options of `bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    pub(crate) what: Bench,
}

/// What can be measured.
#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// AdamW against a loop that reads four arrays and writes three
    Adam {
        /// Millions of parameters
        #[arg(long, default_value_t = 50)]
        millions: usize,
        /// Runs of each, in turn
        #[arg(long, default_value_t = 9)]
        repeats: usize,
    },
    /// Collectives between processes of this machine
    Comm {
        /// Processes
        #[arg(long, short, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
        num_processes: u32,
        /// Megabytes of f32
        #[arg(long, default_value_t = 64)]
        megabytes: usize,
        /// Runs of each operation
        #[arg(long, default_value_t = 15)]
        repeats: usize,
        /// auto, shared_memory or tcp
        #[arg(long, default_value = "auto")]
        transport: String,
    },
    /// What layers, transfers and the optimizer take, for `plan --costs`: a cost table
    Costs {
        /// Where the configuration comes from.
        #[command(flatten)]
        config: ConfigArgs,
        /// The file to write
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
        /// Measured steps, after two that are not
        #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=18))]
        steps: u32,
        /// Begin no further step after so long, though fewer were measured; one always is
        #[arg(long, value_name = "SECONDS")]
        seconds: Option<u32>,
    },
    /// A disk as `nvme_path` would use it, against the same bytes read and written by threads
    Io {
        /// Where the file is made: a folder on the disk
        #[arg(default_value = ".")]
        folder: PathBuf,
        /// Mebibytes of the file
        #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(1..1 << 30))]
        megabytes: u64,
        /// Mebibytes of a request
        #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..1 << 20))]
        request_megabytes: u32,
        /// Requests at a time
        #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..1 << 10))]
        requests: u32,
        /// Runs of each, in turn
        #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
        repeats: u32,
        /// Threads with positioned reads and writes instead of io_uring
        #[arg(long)]
        threads: bool,
        /// Print one line of JSON
        #[arg(long)]
        json: bool,
    },
    /// Steps of a configuration whose state is on a disk, in turn with the disk alone
    Offload {
        /// Where the configuration comes from.
        #[command(flatten)]
        config: ConfigArgs,
        /// Measured steps, after two that are not
        #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=18))]
        steps: u32,
    },
    /// Every operation at the shapes of two GPT steps, against what the chip allows
    Ops {
        /// Leave out attention and what is element-wise
        #[arg(value_name = "products", value_parser = ["products"])]
        only: Option<String>,
        /// Threads of each operation
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
        threads: u32,
        /// Runs of each, in turn with its limit
        #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
        repeats: u32,
    },
    /// Pipelines of layers that sleep, so that more stages can be run than there are cores: measured beside simulated steps
    Pipeline {
        /// Numbers of stages
        #[arg(long, value_delimiter = ',', default_value = "2,4,8", value_parser = clap::value_parser!(u32).range(1..))]
        stages: Vec<u32>,
        /// Micro-batches of a step
        #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
        micro_batches: u32,
        /// Measured steps, after one that is not
        #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
        repeats: u32,
    },
    /// Where the time of a training step goes, by operation
    Profile {
        /// Where the configuration comes from.
        #[command(flatten)]
        config: ConfigArgs,
        /// Measured steps, after two that are not
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
        steps: u32,
    },
    /// What checkpoints of a configuration cost training, in turn with the copying and the writing alone
    Save {
        /// Where the configuration comes from.
        #[command(flatten)]
        config: ConfigArgs,
        /// Where they are written: a folder on the disk
        #[arg(long, value_name = "DIR", default_value = ".")]
        folder: PathBuf,
        /// Runs of each
        #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
        repeats: u32,
    },
    /// Training steps of a configuration on synthetic tokens: time and tokens per second
    Step {
        /// Where the configuration comes from.
        #[command(flatten)]
        config: ConfigArgs,
        /// Measured steps, after those that are not
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
        steps: u32,
        /// Steps before them: the first one touches all memory
        #[arg(long, value_name = "STEPS", default_value_t = 2)]
        warm_up: u32,
        /// Go on until steps were measured for so long
        #[arg(long, value_name = "SECONDS", default_value_t = 0)]
        seconds: u32,
        /// Print one line of JSON
        #[arg(long)]
        json: bool,
    },
}

/// Options of `checkpoint`.
#[derive(Debug, Args)]
pub(crate) struct CheckpointArgs {
    /// What to do.
    #[command(subcommand)]
    pub(crate) what: Checkpoint,
}

/// What can be done with a checkpoint.
#[derive(Debug, Subcommand)]
pub(crate) enum Checkpoint {
    /// Print what is in a checkpoint: step, layout, parameters and where they are
    Inspect {
        /// A checkpoint's folder; or a run's, or its `checkpoints`, for the newest of them
        #[arg(value_name = "DIR")]
        folder: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Read all of a checkpoint and name each shard and tensor that is not as it was written; status 1 if there is one
    Verify {
        /// A checkpoint's folder; or a run's, or its `checkpoints`, for all of them
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
    /// Make a checkpoint at step 0 of a Hugging Face folder of GPT-2, Llama, Mistral or Qwen2, to resume from
    Import {
        /// The folder: config.json and model.safetensors, or several files with an index
        #[arg(value_name = "DIR")]
        folder: PathBuf,
        /// Where the checkpoint is made, as FOLDER/step-00000000; there are no others in it yet
        #[arg(long, value_name = "FOLDER")]
        out: PathBuf,
    },
    /// Write the weights as Hugging Face's libraries read them: safetensors, config.json, tokenizer
    Export {
        /// A checkpoint's folder; or a run's, or its `checkpoints`, for the newest of them
        #[arg(value_name = "DIR")]
        folder: PathBuf,
        /// The folder to write, which is not there yet, or is empty
        #[arg(long, value_name = "FOLDER")]
        out: PathBuf,
        /// Type of the floats
        #[arg(long, value_enum, default_value_t = Floats::F32)]
        dtype: Floats,
        /// Bytes of tensors in a file, at most
        #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = size)]
        max_shard_size: u64,
    },
}

/// Types that weights can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Floats {
    /// As they were trained
    F32,
    /// Rounded
    Bf16,
    /// Rounded; refused where a value is too large
    F16,
}

impl TrainArgs {
    /// Checks that no option of training is set.
    ///
    /// # Errors
    /// Names the first option that is set.
    pub(crate) fn is_unused(&self) -> Result<(), String> {
        let options = [
            ("--set", !self.config.set.is_empty()),
            ("--ignore-unknown-keys", self.config.ignore_unknown_keys),
            ("--out", self.out.is_some()),
            ("--resume", self.resume.is_some()),
            ("--max-steps", self.max_steps.is_some()),
            ("--min-ranks", self.min_ranks.is_some()),
            ("--verify", self.verify.is_some()),
            ("--force", self.force),
            ("--plain", self.plain),
            ("--quiet", self.quiet),
        ];
        match options.into_iter().find(|(_, given)| *given) {
            Some((name, _)) => {
                Err(format!("{name} is an option of training; write it behind the program if it is its own"))
            }
            None => Ok(()),
        }
    }

    /// Returns the overrides of `--set`, followed by those that other options stand for.
    #[must_use]
    pub(crate) fn overrides(&self) -> Vec<String> {
        let mut overrides = self.config.set.clone();
        if let Some(steps) = self.max_steps {
            overrides.push("training.epochs=".into());
            overrides.push(format!("training.max_steps={steps}"));
        }
        if let Some(out) = &self.out {
            overrides.push(format!("training.output_dir={:?}", out.display().to_string()));
        }
        overrides.extend(self.max_restarts.map(|restarts| format!("launcher.max_restarts={restarts}")));
        overrides.extend(self.min_ranks.map(|ranks| format!("launcher.min_ranks={ranks}")));
        overrides
    }
}

impl Cli {
    /// Reads the command line. Exits on an error, and after `--help` or `--version`.
    pub(crate) fn read() -> Self {
        let matches = command().get_matches();
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.format(&mut command()).exit())
    }
}

/// Returns the parser. Flags may contain `_` in place of `-`, since torchrun, deepspeed and accelerate use both.
fn command() -> clap::Command {
    let launch = |launch: clap::Command| {
        let ranks = "Ranks over all hosts, as accelerate counts them";
        launch
            .mut_arg("num_processes", |arg| arg.help(ranks).long_help(ranks))
            .mut_arg("max_restarts", |arg| arg.env("PET_MAX_RESTARTS"))
    };
    underscores(Cli::command().mut_subcommand("launch", launch))
}

fn underscores(mut command: clap::Command) -> clap::Command {
    let names: Vec<String> = command.get_subcommands().map(|sub| sub.get_name().to_string()).collect();
    for name in names {
        command = command.mut_subcommand(name, underscores);
    }
    command.mut_args(|arg: Arg| {
        let known: Vec<String> =
            arg.get_long().into_iter().chain(arg.get_all_aliases().unwrap_or_default()).map(String::from).collect();
        let missing = known.iter().map(|name| name.replace('-', "_")).filter(|name| !known.contains(name));
        missing.collect::<Vec<_>>().into_iter().fold(arg, Arg::alias)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn deepspeeds_launcher_adds_flags_of_its_own() {
        for args in [&["--local_rank=1", "--deepspeed"][..], &["--local-rank", "1"]] {
            let all = [&["zero-train"], args, &["--deepspeed_config", "ds.json", "--max_steps", "3"]].concat();
            let cli = Cli::from_arg_matches(&command().get_matches_from(all)).expect("accepted");
            assert_eq!((cli.train.local_rank, cli.train.max_steps), (Some(1), Some(3)));
        }
    }
}
