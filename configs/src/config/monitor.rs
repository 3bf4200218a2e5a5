//! `csv_monitor`, `tensorboard`, `mlflow`, `prometheus`, `machine_monitor`, `comms_logger` and `flops_profiler`.

use std::path::PathBuf;

use serde::Serialize;

use crate::reader::Resolver;

/// Where a monitor writes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Monitor {
    /// Write at all.
    pub enabled: bool,
    /// Folder; empty is the run's own.
    pub output_path: String,
    /// Folder inside `output_path`.
    pub job_name: String,
}

/// `mlflow`: a run of a tracking server.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Mlflow {
    /// Write at all.
    pub enabled: bool,
    /// Address of the server; `None` is what the environment says.
    pub tracking_uri: Option<String>,
    /// Experiment that the run belongs to.
    pub experiment_name: String,
    /// Name of the run; `None` is one of the server's.
    pub run_name: Option<String>,
}

/// `machine_monitor`: what rank 0's machine does meanwhile.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MachineMonitor {
    /// Sample at all.
    pub enabled: bool,
    /// How often.
    pub interval_seconds: f64,
}

/// `prometheus`: a page of the newest values.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Prometheus {
    /// Serve it.
    pub enabled: bool,
    /// Address to listen at.
    pub host: String,
    /// Port to listen at; 0 is a free one.
    pub port: u16,
}

/// `comms_logger`: count, bytes and seconds of each collective.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CommsLogger {
    /// Record at all.
    pub enabled: bool,
    /// Print what the operations of each step did.
    pub verbose: bool,
    /// Show every kind of operation.
    pub prof_all: bool,
    /// With `prof_all` off: the kinds of operations to show, for example `all_gather`.
    pub prof_ops: Vec<String>,
}

/// `flops_profiler`: one step, layer by layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FlopsProfiler {
    /// Profile at all.
    pub enabled: bool,
    /// Which step, from 1.
    pub profile_step: usize,
    /// How deep in the names of layers to print; `None` is all of it, written as -1.
    #[serde(serialize_with = "or_minus_1")]
    pub module_depth: Option<usize>,
    /// How many to name as the first of each depth.
    pub top_modules: usize,
    /// Print every layer.
    pub detailed: bool,
    /// File to write it to; `None` prints it.
    pub output_file: Option<PathBuf>,
}

fn or_minus_1<S: serde::Serializer>(depth: &Option<usize>, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_i64(depth.map_or(-1, |depth| depth as i64))
}

impl FlopsProfiler {
    /// Whether this step is the one.
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
        // The range lets -0.5 and 1.5 through.
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

/// What ranks do together, by the names that are counted.
const OPERATIONS: [&str; 8] =
    ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "recv", "barrier", "split"];

/// The name of an operation, of which DeepSpeed has several for some.
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
