//! `csv_monitor`, `tensorboard`, `mlflow`, `wandb`, `prometheus`, `machine_monitor`, `comms_logger` and
//! `flops_profiler`.

use std::path::PathBuf;

use serde::Serialize;

use crate::path::last;
use crate::read::reader::{Read as _, Reader, Resolver};
use crate::schema::*;
use crate::table::section;

section! {
    /// Output of a monitor that writes files.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Monitor(keys) in "csv_monitor" {
        pub enabled: bool = now(Kind::Bool, "false", "Enable this monitor");
        pub output_path: String = key(Kind::Text, "", "Folder for the files; empty: the run folder");
        pub job_name: String = key(Kind::Text, "DeepSpeedJobName", "Folder inside output_path");
    }
}

section! {
    /// `mlflow`: a run on an MLflow tracking server.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Mlflow(keys) in "mlflow" {
        pub enabled: bool = key(Kind::Bool, "false", "Enable this monitor");
        pub tracking_uri: Option<String> = key(Kind::Path, "null", "Server URL, such as `http://host:5000`; null: the environment variable MLFLOW_TRACKING_URI. A token is read only from MLFLOW_TRACKING_TOKEN");
        pub experiment_name: String = key(Kind::Path, "zero-train", "Experiment that the run belongs to; created if it does not exist");
        pub run_name: Option<String> = key(Kind::Path, "null", "Name of the run; null: the server chooses one");
    }
}

section! {
    /// `wandb`: a run on Weights & Biases.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Wandb(keys) in "wandb" {
        pub enabled: bool = key(Kind::Bool, "false", "Enable this monitor; the API key is read only from WANDB_API_KEY or the file ~/.netrc");
        pub group: Option<String> = key(Kind::Path, "null", "Run group; null: the environment variable WANDB_RUN_GROUP, if it is set");
        pub team: Option<String> = key(Kind::Path, "null", "Team or user that the project belongs to; null: the environment variable WANDB_ENTITY, else the account's default");
        pub project: Option<String> = key(Kind::Path, "null", "Project that the run belongs to; null: the environment variable WANDB_PROJECT, else `deepspeed`");
    }
}

section! {
    /// `machine_monitor`: usage of rank 0's machine, sampled during training.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct MachineMonitor(keys) in "machine_monitor" {
        pub enabled: bool = key(Kind::Bool, "false", "Sample the usage of processor, memory, disk, network and GPUs");
        pub interval_seconds: f64 = key(Kind::Float(Range { min: 0.0, max: 86_400.0, above: true, below: false }), "5.0", "Seconds between two samples");
    }
}

section! {
    /// `prometheus`: an HTTP page with the newest values.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Prometheus(keys) in "prometheus" {
        pub enabled: bool = key(Kind::Bool, "false", "Serve the metrics from rank 0 at /metrics");
        pub host: String = key(Kind::Path, "127.0.0.1", "Address to listen on; 0.0.0.0: all interfaces of the machine");
        pub port: u16 = key(Kind::Int { min: 0, max: 65_535 }, "9464", "Port to listen on; 0: a free port, which is printed");
    }
}

section! {
    /// `comms_logger`: count, bytes and seconds of each collective.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct CommsLogger(keys) in "comms_logger" {
        pub enabled: bool = now(Kind::Bool, "false", "Record collectives");
        pub verbose: bool = now(Kind::Bool, "false", "Print the recorded operations of each step");
        pub prof_all: bool = now(Kind::Bool, "true", "Show every kind of operation");
        pub prof_ops: Vec<String> = key(Kind::Texts, "[]", "With `prof_all: false`: the kinds of operations to show");
        = later_unless("debug", &["false"], "Print the call site of each operation").instead("operations have no call site in your program; `training.trace` shows where in the step each one runs");
    }
}

section! {
    /// `flops_profiler`: a profile of one step, layer by layer.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct FlopsProfiler(keys) in "flops_profiler", off while enabled is ["false", "auto"] {
        pub enabled: bool = now(Kind::Bool, "false", "Profile one step");
        pub profile_step: usize = now(COUNT, "1", "Step to profile; the first step takes longer than others");
        /// Maximum depth to print in the hierarchy of layer names; `None` prints all depths and is written as -1.
        #[serde(serialize_with = "or_minus_1")]
        pub module_depth: Option<usize> = now(Kind::Float(Range { min: -1.0, max: 1e6, above: false, below: false }), "-1", "Depth to print in the hierarchy of layer names; -1: all") [is depth(keys)];
        pub top_modules: usize = now(COUNT, "1", "Number of layers to list at each depth: those with the largest values");
        pub detailed: bool = now(Kind::Bool, "true", "Print every layer");
        pub output_file: Option<PathBuf> = key(Kind::Path, "null", "File for the profile; null: the profile is printed");
        = ignored("recompute_fwd_factor", NON_NEGATIVE, "0.0", "recomputed forward passes are counted, not estimated");
    }
}

fn or_minus_1<S: serde::Serializer>(depth: &Option<usize>, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_i64(depth.map_or(-1, |depth| depth as i64))
}

impl FlopsProfiler {
    /// Returns whether `step` is the step to profile.
    pub fn is_due(&self, step: u64) -> bool {
        self.enabled && step == self.profile_step as u64
    }

    /// Checks that the depth is an integer; the schema's range also accepts -0.5 and 1.5.
    pub(crate) fn check(resolver: &mut Resolver<'_>) {
        let depth = f64::read(&mut resolver.top().section(Self::PATH), last(Self::module_depth));
        if depth.fract() != 0.0 {
            let message = format!("expected an integer of at least -1, found `{depth}`");
            resolver.contradiction(&[Self::module_depth], message, None);
        }
    }
}

fn depth(keys: &mut Reader<'_, '_>) -> Option<usize> {
    let depth = f64::read(keys, last(FlopsProfiler::module_depth));
    (depth >= 0.0).then_some(depth as usize)
}

/// Names of the collectives and messages that are counted.
const OPERATIONS: [&str; 9] =
    ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send", "recv", "barrier", "split"];

/// Maps DeepSpeed's name of an operation to this project's name; several names may map to one.
fn operation(name: &str) -> Option<&'static str> {
    let name = match name {
        "all_gather_into_tensor" | "all_gather_coalesced" => "all_gather",
        "reduce_scatter_tensor" => "reduce_scatter",
        "all_reduce_coalesced" => "all_reduce",
        "all_to_all_single" => "all_to_all",
        "isend" => "send",
        "irecv" => "recv",
        other => other,
    };
    OPERATIONS.into_iter().find(|known| *known == name)
}

impl CommsLogger {
    /// Replaces DeepSpeed's names of operations, and reports unknown names.
    pub(crate) fn check(&mut self, resolver: &mut Resolver<'_>) {
        for name in std::mem::take(&mut self.prof_ops) {
            match operation(&name) {
                Some(known) => self.prof_ops.push(known.to_string()),
                None => {
                    let message = format!("there is no operation `{name}`");
                    let help = Some(format!("the operations are {}", OPERATIONS.join(", ")));
                    resolver.contradiction(&[Self::prof_ops], message, help);
                }
            }
        }
    }
}
