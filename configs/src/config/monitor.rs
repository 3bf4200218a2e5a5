//! `csv_monitor`, `tensorboard`, `mlflow`, `prometheus`, `machine_monitor`, `comms_logger` and `flops_profiler`.

use std::path::PathBuf;

use serde::Serialize;

use crate::reader::Resolver;

/// Output of a monitor that writes files.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Monitor {
    /// Whether the monitor is on.
    pub enabled: bool,
    /// Folder; empty is the folder of the run.
    pub output_path: String,
    /// Folder inside `output_path`.
    pub job_name: String,
}

/// `mlflow`: a run on an MLflow tracking server.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Mlflow {
    /// Whether the monitor is on.
    pub enabled: bool,
    /// Address of the server; `None` takes it from the environment.
    pub tracking_uri: Option<String>,
    /// Experiment that the run belongs to.
    pub experiment_name: String,
    /// Name of the run; `None` lets the server choose one.
    pub run_name: Option<String>,
}

/// `machine_monitor`: usage of rank 0's machine, sampled during training.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MachineMonitor {
    /// Whether the monitor is on.
    pub enabled: bool,
    /// Seconds between two samples.
    pub interval_seconds: f64,
}

/// `prometheus`: an HTTP page with the newest values.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Prometheus {
    /// Whether the page is served.
    pub enabled: bool,
    /// Address to listen on.
    pub host: String,
    /// Port to listen on; 0 chooses a free port.
    pub port: u16,
}

/// `comms_logger`: count, bytes and seconds of each collective.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CommsLogger {
    /// Whether collectives are recorded.
    pub enabled: bool,
    /// Print the operations of each step.
    pub verbose: bool,
    /// Show all kinds of operations.
    pub prof_all: bool,
    /// Kinds of operations to show if `prof_all` is off, for example `all_gather`.
    pub prof_ops: Vec<String>,
}

/// `flops_profiler`: a profile of one step, layer by layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FlopsProfiler {
    /// Whether the profiler is on.
    pub enabled: bool,
    /// The step to profile, counted from 1.
    pub profile_step: usize,
    /// Maximum depth to print in the hierarchy of layer names; `None` prints all depths and is written as -1.
    #[serde(serialize_with = "or_minus_1")]
    pub module_depth: Option<usize>,
    /// Number of top layers to list for each depth.
    pub top_modules: usize,
    /// Print every layer.
    pub detailed: bool,
    /// File for the profile; `None` prints it.
    pub output_file: Option<PathBuf>,
}

fn or_minus_1<S: serde::Serializer>(depth: &Option<usize>, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_i64(depth.map_or(-1, |depth| depth as i64))
}

impl FlopsProfiler {
    /// Returns whether `step` is the step to profile.
    pub fn is_due(&self, step: u64) -> bool {
        self.enabled && step == self.profile_step as u64
    }

    pub(crate) fn read(resolver: &mut Resolver<'_>) -> Self {
        let mut keys = resolver.section("flops_profiler");
        let depth = keys.float("module_depth");
        let read = Self {
            enabled: keys.bool("enabled"),
            profile_step: keys.int("profile_step"),
            module_depth: (depth >= 0.0).then_some(depth as usize),
            top_modules: keys.int("top_modules"),
            detailed: keys.bool("detailed"),
            output_file: keys.optional_path("output_file"),
        };
        // The range of the schema accepts -0.5 and 1.5.
        if depth.fract() != 0.0 {
            let message = format!("expected a whole number or -1, found `{depth}`");
            resolver.contradiction(&["flops_profiler.module_depth"], message, None);
        }
        read
    }
}

impl Monitor {
    pub(crate) fn read(resolver: &mut Resolver<'_>, name: &str) -> Self {
        let mut keys = resolver.section(name);
        Self { enabled: keys.bool("enabled"), output_path: keys.text("output_path"), job_name: keys.text("job_name") }
    }
}

impl Mlflow {
    pub(crate) fn read(resolver: &mut Resolver<'_>) -> Self {
        let mut keys = resolver.section("mlflow");
        Self {
            enabled: keys.bool("enabled"),
            tracking_uri: keys.optional_text("tracking_uri"),
            experiment_name: keys.text("experiment_name"),
            run_name: keys.optional_text("run_name"),
        }
    }
}

impl MachineMonitor {
    pub(crate) fn read(resolver: &mut Resolver<'_>) -> Self {
        let mut keys = resolver.section("machine_monitor");
        Self { enabled: keys.bool("enabled"), interval_seconds: keys.float("interval_seconds") }
    }
}

impl Prometheus {
    pub(crate) fn read(resolver: &mut Resolver<'_>) -> Self {
        let mut keys = resolver.section("prometheus");
        let port = u16::try_from(keys.u64("port")).unwrap_or(u16::MAX);
        Self { enabled: keys.bool("enabled"), host: keys.text("host"), port }
    }
}

/// Names of the collectives and messages that are counted.
const OPERATIONS: [&str; 8] =
    ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "recv", "barrier", "split"];

/// Maps a name of DeepSpeed to the name of the operation; DeepSpeed has several names for some operations.
fn operation(name: &str) -> Option<&'static str> {
    let name = match name {
        "all_gather_into_tensor" | "all_gather_coalesced" => "all_gather",
        "reduce_scatter_tensor" => "reduce_scatter",
        "all_reduce_coalesced" => "all_reduce",
        "isend" => "send",
        "irecv" => "recv",
        other => other,
    };
    OPERATIONS.into_iter().find(|known| *known == name)
}

impl CommsLogger {
    pub(crate) fn read(resolver: &mut Resolver<'_>) -> Self {
        let mut keys = resolver.section("comms_logger");
        let written = keys.texts("prof_ops").unwrap_or_default();
        let (enabled, verbose) = (keys.bool("enabled"), keys.bool("verbose"));
        let prof_all = keys.bool("prof_all");
        let mut prof_ops = vec![];
        for name in written {
            match operation(&name) {
                Some(known) => prof_ops.push(known.to_string()),
                None => {
                    let message = format!("there is no operation `{name}`");
                    let help = Some(format!("the operations are {}", OPERATIONS.join(", ")));
                    resolver.contradiction(&["comms_logger.prof_ops"], message, help);
                }
            }
        }
        Self { enabled, verbose, prof_all, prof_ops }
    }
}
