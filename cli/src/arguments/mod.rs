//! Arguments of the command line.

use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Arg, Args, CommandFactory, FromArgMatches, Parser, Subcommand};

mod bench;
mod checkpoint;
mod config;
mod generate;
mod launch;
mod plan;

pub(crate) use bench::{Bench, BenchArgs};
pub(crate) use checkpoint::{Checkpoint, CheckpointArgs, ExportArgs, Floats};
pub(crate) use config::ConfigArgs;
pub(crate) use generate::GenerateArgs;
pub(crate) use launch::LaunchArgs;
pub(crate) use plan::PlanArgs;

/// ZeRO-style memory-optimized training for candle models.
#[derive(Debug, Parser)]
#[command(name = "zero-train", version, args_conflicts_with_subcommands = true)]
#[command(override_usage = "zero-train --config <FILE> [-n <N>] [OPTIONS]\n       zero-train <COMMAND>")]
pub(crate) struct Cli {
    /// The command. Without one, the program trains.
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    /// The options of training.
    #[command(flatten)]
    pub(crate) train: TrainArgs,
}

/// The commands other than training.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Print the resolved configuration with the origin of each value, or every error at once
    Check(CheckArgs),
    /// Print the layers, memory and traffic of each rank without starting any rank; --grid draws the schedule of a step
    Plan(PlanArgs),
    /// Start the ranks of this host, alone or as one of several hosts; accepts flags of torchrun, deepspeed and
    /// accelerate
    Launch(Box<LaunchArgs>),
    /// Find the fastest configuration that fits in memory, or with --sweep the best hyperparameters
    Autotune(AutotuneArgs),
    /// Measure kernels, collectives, disks, checkpoints or whole training steps on this machine
    Bench(BenchArgs),
    /// Inspect or verify a checkpoint, import pretrained weights, or export weights
    Checkpoint(CheckpointArgs),
    /// Print samples of the training data as text, marking the tokens that are trained on
    Data(DataArgs),
    /// Continue prompts or answer messages with a trained model: a run, a checkpoint, an export, a Hugging Face folder
    Generate(Box<GenerateArgs>),
    /// Write an HTML report on one or more runs: curves, memory, timeline, communication, time
    Report(ReportArgs),
    /// Print this machine's cores, instruction sets, memory, GPUs and NCCL, and which NVIDIA libraries are missing
    Doctor,
}

/// Options of training.
#[derive(Debug, Clone, Args)]
pub(crate) struct TrainArgs {
    /// Options that select the configuration.
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Run folder [default: training.output_dir]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Resume from the run's newest checkpoint (auto), from the checkpoint DIR, or from the newest checkpoint of the
    /// run DIR
    #[arg(long, value_name = "auto|DIR")]
    pub(crate) resume: Option<String>,
    /// Stop after this many optimizer steps
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) max_steps: Option<u64>,
    /// Restart all ranks from the newest checkpoint up to K times after a rank dies [default: launcher.max_restarts]
    #[arg(long, value_name = "K")]
    pub(crate) max_restarts: Option<u32>,
    /// Restart without the ranks that died as long as at least M ranks survive [default: launcher.min_ranks, else all
    /// ranks restart]
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) min_ranks: Option<u32>,
    /// Train K steps, compare their losses with those of one process at ZeRO stage 0, and stop
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) verify: Option<u64>,
    /// Evaluate the pretrained model, or the checkpoint of --resume, on the evaluation data, without training
    #[arg(long, conflicts_with_all = ["verify", "max_steps"])]
    pub(crate) evaluate: bool,
    /// Start even if the plan exceeds the memory limit
    #[arg(long)]
    pub(crate) force: bool,
    /// Print plain lines instead of a progress bar, even on a terminal
    #[arg(long, conflicts_with = "quiet")]
    pub(crate) plain: bool,
    /// Print only errors
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
    /// Options that select the configuration.
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
}

/// Options of `autotune`.
#[derive(Debug, Args)]
pub(crate) struct AutotuneArgs {
    /// Options that select the configuration.
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Search the hyperparameters in autotuning.sweep for the lowest evaluation loss, instead of searching for speed
    #[arg(long)]
    pub(crate) sweep: bool,
    /// Results folder [default: autotuning.results_dir]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Continue an earlier search of the same configuration and keep its measurements
    #[arg(long)]
    pub(crate) resume: bool,
    /// Print plain lines instead of a table, even on a terminal
    #[arg(long, conflicts_with = "quiet")]
    pub(crate) plain: bool,
    /// Print only errors
    #[arg(long)]
    pub(crate) quiet: bool,
}

/// Options of `data`.
#[derive(Debug, Args)]
pub(crate) struct DataArgs {
    /// The command.
    #[command(subcommand)]
    pub(crate) what: Data,
}

/// The commands for data.
#[derive(Debug, Subcommand)]
pub(crate) enum Data {
    /// Print samples with the tokens trained on in color, or in ⟦ ⟧ without colors, and the number of tokens
    Show(ShowArgs),
    /// Tokenize text into the cache before a run, and print the result
    Prepare(DataConfigArgs),
    /// Print the numbers of documents, tokens and samples, lengths, duplicates and the share of padding
    Stats(DataConfigArgs),
    /// Read all data, compare checksums, and check tokens against the vocabulary
    Verify(DataConfigArgs),
}

/// Options of `data prepare`, `data stats` and `data verify`.
#[derive(Debug, Args)]
pub(crate) struct DataConfigArgs {
    /// ds.yaml or ds_config.json, or - for standard input; may be repeated: keys of later files override earlier ones
    #[arg(long, short, value_name = "FILE", required = true)]
    pub(crate) config: Vec<PathBuf>,
    /// Override a value, for example data.cache_dir=/data/cache; may be repeated
    #[arg(long, value_name = "PATH=VALUE")]
    pub(crate) set: Vec<String>,
}

/// Options of `data show`.
#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// ds.yaml or ds_config.json, or - for standard input; may be repeated: keys of later files override earlier ones
    #[arg(long, short, value_name = "FILE", required = true)]
    pub(crate) config: Vec<PathBuf>,
    /// Override a value, for example data.sequence_length=512; may be repeated
    #[arg(long, value_name = "PATH=VALUE")]
    pub(crate) set: Vec<String>,
    /// Number of samples to print
    #[arg(long, short = 'n', value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) count: u32,
    /// First sample to print, counted from 0 in the order of the files
    #[arg(long, value_name = "I", default_value_t = 0)]
    pub(crate) index: usize,
    /// Print samples of data.eval
    #[arg(long)]
    pub(crate) eval: bool,
}

/// Options of `report`.
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// Folder of a run; several runs are overlaid on one page
    #[arg(value_name = "RUN", required = true)]
    pub(crate) runs: Vec<PathBuf>,
    /// File to write; required for several runs [default: RUN/report.html]
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
}

impl TrainArgs {
    /// Checks that no option of training is set.
    ///
    /// # Errors
    /// Fails if an option is set, and names the first one.
    pub(crate) fn is_unused(&self) -> Result<(), String> {
        let options = [
            ("--set", !self.config.set.is_empty()),
            ("--ignore-unknown-keys", self.config.ignore_unknown_keys),
            ("--out", self.out.is_some()),
            ("--resume", self.resume.is_some()),
            ("--max-steps", self.max_steps.is_some()),
            ("--min-ranks", self.min_ranks.is_some()),
            ("--verify", self.verify.is_some()),
            ("--evaluate", self.evaluate),
            ("--force", self.force),
            ("--plain", self.plain),
            ("--quiet", self.quiet),
        ];
        match options.into_iter().find(|(_, given)| *given) {
            Some((name, _)) => Err(format!(
                "{name} is a training option, so `launch` does not accept it before a program; if it belongs to the program, put it after the program"
            )),
            None => Ok(()),
        }
    }

    /// Returns the overrides of `--set`, followed by the overrides that other options imply.
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
        let ranks = "Total number of ranks on all hosts, as in `accelerate launch`";
        launch
            .mut_arg("num_processes", |arg| arg.help(ranks).long_help(ranks))
            .mut_arg("max_restarts", |arg| arg.env("PET_MAX_RESTARTS"))
    };
    let most = "Maximum number of ranks [default: launcher.num_processes; if unset, one per GPU; without GPUs, the smallest number that the other keys allow]";
    let autotune = |autotune: clap::Command| autotune.mut_arg("num_processes", |arg| arg.help(most).long_help(most));
    underscores(Cli::command().mut_subcommand("launch", launch).mut_subcommand("autotune", autotune))
}

/// Prints an error of the command line with the usage of the subcommand, and exits with status 2.
pub(crate) fn refuse(message: &str) -> ! {
    let mut command = command();
    command.build();
    for name in std::env::args().skip(1) {
        let Some(subcommand) = command.find_subcommand(&name) else { break };
        command = subcommand.clone();
    }
    command.error(ErrorKind::ValueValidation, message).exit()
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
    fn the_command_line_definition_is_consistent() {
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
