//! Describes what a launcher starts: the ranks of this host, and the program that each of them runs.

use std::ffi::OsString;
use std::time::Duration;

use zero_config::{Compute, Typed};

use super::hosts::{Hosts, Reach};
use super::output::Output;

/// Default time between SIGTERM and SIGKILL for ranks that should end.
pub const GRACE: Duration = Duration::from_secs(5);

/// The ranks that an attempt starts on each host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Team {
    /// Number of ranks per host.
    pub ranks: usize,
    /// Compute threads per rank.
    pub threads: usize,
    /// Overrides of the configuration, in addition to the overrides on the command line.
    pub overrides: Vec<String>,
}

impl Team {
    /// Creates a team without additional overrides.
    pub fn new(ranks: usize, threads: usize) -> Self {
        Self { ranks, threads, overrides: vec![] }
    }
}

/// Returns the number of ranks on this host for a GPU run whose configuration does not set this number. It is the
/// number of GPUs, rounded down to a multiple of pipeline stages × context size × tensor size, and at least this
/// product. Returns `None` for other runs.
#[must_use]
pub fn one_a_gpu(typed: &Typed) -> Option<usize> {
    let config = typed.resolve(None).ok().filter(|config| config.training.device == Compute::Cuda)?;
    let least = config.pipeline.stages * config.context_size() * config.tensor_size();
    typed.num_processes().is_none().then(|| (zero_engine::gpus() / least * least).max(least))
}

/// The program that each rank runs.
#[derive(Debug, Clone)]
pub enum What<'a> {
    /// This program, with the same arguments.
    Ourselves {
        /// The standard input of each rank: the configuration, if this process read the configuration from its standard
        /// input.
        standard_input: Option<&'a str>,
    },
    /// Another program and its arguments.
    Program(&'a [OsString]),
}

impl What<'_> {
    pub(super) fn is_ours(&self) -> bool {
        matches!(self, Self::Ourselves { .. })
    }
}

/// The parameters of a launcher, except for the ranks.
#[derive(Debug, Clone)]
pub struct Job<'a> {
    /// The hosts of the job.
    pub hosts: &'a Hosts,
    /// How the launchers communicate; `None` for a single host.
    pub reach: Option<Reach>,
    /// The program that each rank runs.
    pub what: What<'a>,
    /// Where the output of the ranks goes.
    pub output: Output,
    /// Time between SIGTERM and SIGKILL for ranks that should end.
    pub grace: Duration,
}

impl<'a> Job<'a> {
    /// Creates a job that runs copies of this program on this host, with the same arguments and this standard input.
    pub fn here(standard_input: Option<&'a str>) -> Self {
        const HERE: &Hosts = &Hosts::alone();
        let what = What::Ourselves { standard_input };
        Self { hosts: HERE, reach: None, what, output: Output::default(), grace: GRACE }
    }

    pub(super) fn standard_input(&self) -> Option<&str> {
        match self.what {
            What::Ourselves { standard_input } => standard_input,
            What::Program(_) => None,
        }
    }
}
