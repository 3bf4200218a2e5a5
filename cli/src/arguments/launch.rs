//! Options of `launch`, and the hosts and ranks that they specify.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use super::TrainArgs;
use zero_train::process::launch::{Hosts, Tee};

/// Options of `launch`.
#[derive(Debug, Args)]
#[command(override_usage = "zero-train launch [OPTIONS] --config <FILE> [TRAINING OPTIONS]\n       \
                            zero-train launch [OPTIONS] [--] <PROGRAM> [PROGRAM ARGUMENTS]...")]
pub(crate) struct LaunchArgs {
    /// Ranks per host: a number, cpu (one per core), or auto [default: the same number as without `launch`, but 1 for a
    /// program]
    #[arg(long, value_name = "N", alias = "num-gpus", env = "PET_NPROC_PER_NODE", value_parser = PerHost::parse)]
    pub(crate) nproc_per_node: Option<PerHost>,
    /// Number of hosts; run `launch` once on each
    #[arg(long, value_name = "H", aliases = ["num-nodes", "num-machines"], env = "PET_NNODES", default_value = "1", value_parser = hosts)]
    pub(crate) nnodes: usize,
    /// Index of this host, from 0; rank 0 runs on host 0
    #[arg(long, value_name = "I", alias = "machine-rank", env = "PET_NODE_RANK")]
    pub(crate) node_rank: Option<usize>,
    /// Address of host 0, reachable from all hosts
    #[arg(long, value_name = "HOST", alias = "main-process-ip", env = "PET_MASTER_ADDR")]
    pub(crate) master_addr: Option<String>,
    /// Port on host 0 where all ranks connect [default: 29500 for several hosts, else a free port]
    #[arg(long, value_name = "PORT", alias = "main-process-port", env = "PET_MASTER_PORT")]
    pub(crate) master_port: Option<u16>,
    /// Address and port of host 0 in one flag, as in torchrun
    #[arg(long, value_name = "HOST:PORT", env = "PET_RDZV_ENDPOINT", conflicts_with_all = ["master_addr", "master_port"])]
    pub(crate) rdzv_endpoint: Option<String>,
    /// Name of the job; ranks of other jobs are rejected
    #[arg(long, value_name = "NAME", env = "PET_RDZV_ID")]
    pub(crate) rdzv_id: Option<String>,
    /// Accepted for scripts written for torchrun; has no effect
    #[arg(long, hide = true, value_name = "static|c10d", env = "PET_RDZV_BACKEND", value_parser = ["static", "c10d"])]
    pub(crate) rdzv_backend: Option<String>,
    /// Rejected with an explanation: DeepSpeed starts the ranks of all hosts over ssh
    #[arg(long, hide = true, value_name = "HOSTS", aliases = ["include", "exclude"], value_parser = other_hosts)]
    pub(crate) hostfile: Option<PathBuf>,
    /// Use only this host; ignores --nnodes and its environment variable
    #[arg(long, env = "PET_STANDALONE", conflicts_with = "rdzv_endpoint")]
    pub(crate) standalone: bool,
    /// Write the output of each rank to DIR/attempt_0/RANK/stdout.log and stderr.log
    #[arg(long, value_name = "DIR", env = "PET_LOG_DIR")]
    pub(crate) log_dir: Option<PathBuf>,
    /// Show the output of the ranks, each line with its rank: 1 stdout, 2 stderr, 3 both, 0 neither; or per local rank:
    /// 0:3,1:2
    #[arg(long, short, value_name = "STREAMS", env = "PET_TEE")]
    pub(crate) tee: Option<Tee>,
    /// Seconds between SIGTERM and SIGKILL for the other ranks after one has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    pub(crate) grace: u32,
    /// The options of training.
    #[command(flatten)]
    pub(crate) train: TrainArgs,
    /// Program to start on each rank, which reads its rank from the environment, for example a program that uses the
    /// library
    #[arg(value_name = "PROGRAM", trailing_var_arg = true)]
    pub(crate) program: Vec<OsString>,
}

/// Number of ranks per host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PerHost {
    /// The configured number.
    Auto,
    /// One rank per core.
    Cores,
    /// This number.
    Ranks(usize),
}

impl PerHost {
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cores),
            "gpu" => {
                Err("give a number, cpu or auto; auto starts one rank per GPU with `training.device: cuda`".into())
            }
            number => match number.parse() {
                Ok(ranks) if ranks > 0 => Ok(Self::Ranks(ranks)),
                _ => Err("give a number of at least 1, cpu or auto".into()),
            },
        }
    }
}

/// Parses a number of hosts. Accepts torchrun's range `MIN:MAX` only if both numbers are equal.
fn hosts(text: &str) -> Result<usize, String> {
    let number = match text.split_once(':') {
        Some((least, most)) if least == most => most,
        Some(_) => return Err("the number of hosts cannot change during a run: give a single number".into()),
        None => text,
    };
    number.parse().ok().filter(|&hosts| hosts > 0).ok_or_else(|| "give a number of at least 1".into())
}

/// Rejects DeepSpeed's flags that select other hosts.
fn other_hosts(_: &str) -> Result<PathBuf, String> {
    Err("`zero-train launch` starts ranks on this host only: run it on each host with --nnodes and --node-rank, or start \
         the ranks with `deepspeed --no_python` and this flag"
        .into())
}

impl LaunchArgs {
    /// Returns the hosts of the job and the index of this host. If no flag sets the address or port of host 0, it is
    /// taken from `MASTER_ADDR` or `MASTER_PORT`: Kubeflow's PyTorchJob sets these variables instead of torchrun's.
    ///
    /// # Errors
    /// Fails if a flag is missing, or flags contradict each other.
    pub(crate) fn hosts(&self, lookup: impl Fn(&str) -> Option<String>) -> Result<Hosts, String> {
        let count = if self.standalone { 1 } else { self.nnodes };
        let (address, port) = match &self.rdzv_endpoint {
            None if count > 1 => {
                let address = self.master_addr.clone().or_else(|| lookup("MASTER_ADDR"));
                (address, self.master_port.or_else(|| lookup("MASTER_PORT")?.parse().ok()))
            }
            None => (None, self.master_port),
            Some(endpoint) => match endpoint.rsplit_once(':') {
                None => (Some(endpoint.clone()), None),
                Some((host, port)) => {
                    let port = port.parse().map_err(|_| format!("--rdzv-endpoint {endpoint} is not HOST:PORT"))?;
                    (Some(host.trim_matches(['[', ']']).to_string()), Some(port))
                }
            },
        };
        let index = match (count, self.node_rank) {
            (1, _) => 0,
            (_, None) => {
                return Err(format!(
                    "this is one of {count} hosts, but --node-rank is missing: give the index of this host, from 0 to {}",
                    count - 1
                ));
            }
            (_, Some(index)) if index >= count => {
                return Err(format!(
                    "--node-rank {index} is out of range: the {count} hosts have the indices 0 to {}",
                    count - 1
                ));
            }
            (_, Some(index)) => index,
        };
        if count > 1 && address.is_none() {
            return Err("the address of host 0 is missing: give the same --master-addr on all hosts".into());
        }
        Ok(Hosts { count, index, address, port, run: self.rdzv_id.clone() })
    }

    /// Returns the number of ranks on this host according to the command line. Returns `None` if the configuration
    /// decides.
    ///
    /// # Errors
    /// Fails if two flags contradict each other.
    pub(crate) fn ranks_here(&self, cores: usize, hosts: usize) -> Result<Option<usize>, String> {
        let here = match self.nproc_per_node {
            None | Some(PerHost::Auto) => None,
            Some(PerHost::Cores) => Some(cores),
            Some(PerHost::Ranks(ranks)) => Some(ranks),
        };
        // As in Accelerate, `--num-processes` is the total number of processes over all hosts.
        let Some(all) = self.train.config.num_processes.map(|ranks| ranks as usize) else { return Ok(here) };
        match here {
            Some(here) if here * hosts != all => Err(format!(
                "--num-processes {all} contradicts --nproc-per-node {here}, which starts {} ranks in total on {hosts} hosts",
                here * hosts
            )),
            _ if !all.is_multiple_of(hosts) => Err(format!(
                "--num-processes {all} is the total number of ranks, so it must be a multiple of the number of hosts, {hosts}"
            )),
            _ => Ok(Some(all / hosts)),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::FromArgMatches;

    use super::super::{Cli, Command, command};
    use super::*;

    fn launch(args: &[&str]) -> Result<LaunchArgs, String> {
        let all = [&["zero-train", "launch"], args].concat();
        let matches = command().try_get_matches_from(all).map_err(|error| error.to_string())?;
        match Cli::from_arg_matches(&matches).map_err(|error| error.to_string())?.command {
            Some(Command::Launch(args)) => Ok(*args),
            _ => Err("another command".into()),
        }
    }

    #[test]
    fn flags_of_three_launchers_are_equivalent() {
        let torchrun = ["--nproc_per_node=2", "--nnodes=2", "--node_rank=1", "--rdzv_endpoint=h0:1234"];
        let deepspeed =
            ["--num_gpus", "2", "--num_nodes", "2", "--node_rank", "1", "--master_addr", "h0", "--master_port", "1234"];
        let accelerate = [
            "--num_processes",
            "4",
            "--num-machines",
            "2",
            "--machine_rank",
            "1",
            "--main_process_ip",
            "h0",
            "--main-process-port",
            "1234",
        ];
        for flags in [&torchrun[..], &deepspeed, &accelerate] {
            let args = launch(&[flags, &["--config", "ds.yaml"]].concat()).expect("accepted");
            let hosts = args.hosts(|_| None).expect("complete");
            assert_eq!((hosts.count, hosts.index, hosts.port), (2, 1, Some(1234)), "{flags:?}");
            assert_eq!((hosts.address.as_deref(), args.ranks_here(8, 2)), (Some("h0"), Ok(Some(2))), "{flags:?}");
        }
    }

    #[test]
    fn a_pod_of_a_pytorchjob_needs_no_flags() {
        let args = launch(&["--nnodes", "2", "--node-rank", "1"]).expect("accepted");
        let variables = |name: &str| match name {
            "MASTER_ADDR" => Some("job-master-0".to_string()),
            "MASTER_PORT" => Some("23456".to_string()),
            _ => None,
        };
        let hosts = args.hosts(variables).expect("complete");
        assert_eq!((hosts.address.as_deref(), hosts.port), (Some("job-master-0"), Some(23456)));
        // Without other hosts, the launcher chooses the port itself and ignores the variables.
        let alone = launch(&[]).expect("accepted").hosts(variables).expect("complete");
        assert_eq!(alone, Hosts::alone());
    }

    #[test]
    fn arguments_after_a_program_are_passed_to_it() {
        let args = launch(&["--nproc-per-node", "2", "train", "--config", "x", "--node_rank=7"]).expect("accepted");
        assert_eq!(args.program, ["train", "--config", "x", "--node_rank=7"]);
        assert_eq!((args.train.config.config, args.node_rank), (vec![], None));
        assert!(launch(&["--nproc-per-nod", "2", "train"]).expect_err("no such flag").contains("--nproc-per-node"));
    }

    #[test]
    fn missing_and_contradictory_flags_are_reported() {
        let error = |args: &[&str]| {
            launch(args).and_then(|args| args.hosts(|_| None).map(drop)).expect_err("the flags must be rejected")
        };
        assert!(error(&["--nnodes", "2"]).contains("--node-rank is missing: give the index of this host, from 0 to 1"));
        assert!(error(&["--nnodes", "2", "--node-rank", "2"]).contains("the 2 hosts have the indices 0 to 1"));
        assert!(error(&["--nnodes", "2", "--node-rank", "0"]).contains("--master-addr"));
        for flag in ["--hostfile", "--include", "--exclude"] {
            assert!(error(&[flag, "hosts"]).contains("run it on each host with --nnodes and --node-rank"), "{flag}");
        }
        assert!(error(&["--nnodes", "1:4"]).contains("give a single number"));
        assert!(error(&["--rdzv-endpoint", "h0:x", "--nnodes", "2"]).contains("not HOST:PORT"));
        assert!(error(&["--nproc-per-node", "gpu"]).contains("cpu or auto"));
        let ranks = |args: &[&str]| launch(args).expect("accepted").ranks_here(8, 2);
        assert!(ranks(&["-n", "3"]).expect_err("3 ranks on 2 hosts is an error").contains("a multiple of"));
        assert!(
            ranks(&["-n", "4", "--nproc-per-node", "4"])
                .expect_err("4 ranks on each of 2 hosts are 8")
                .contains("starts 8")
        );
        assert_eq!((ranks(&["--nproc-per-node", "cpu"]), ranks(&[])), (Ok(Some(8)), Ok(None)));
    }
}
