//! `csv_monitor`, `tensorboard` and `comms_logger`.

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

impl Monitor {
    pub(crate) fn read(resolver: &mut Resolver<'_>, name: &str) -> Self {
        let mut keys = resolver.section(name);
        Self { enabled: keys.bool("enabled"), output_path: keys.text("output_path"), job_name: keys.text("job_name") }
    }
}

impl CommsLogger {
    pub(crate) fn read(resolver: &mut Resolver<'_>) -> Self {
        let mut keys = resolver.section("comms_logger");
        Self {
            enabled: keys.bool("enabled"),
            verbose: keys.bool("verbose"),
            prof_all: keys.bool("prof_all"),
            prof_ops: keys.texts("prof_ops").unwrap_or_default(),
        }
    }
}
