//! What a launcher starts: the ranks of this host, and the program that each of them runs.

use std::ffi::OsString;
use std::time::Duration;

use super::hosts::{Hosts, Reach};
use super::output::Output;

/// How long ranks that were told to end may take, where nobody says otherwise.
pub(super) const GRACE: Duration = Duration::from_secs(5);

/// The ranks of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Team {
    /// How many on each host.
    pub(crate) ranks: usize,
    /// Compute threads of each.
    pub(crate) threads: usize,
    /// Overrides of the configuration, besides those of the command line.
    pub(crate) overrides: Vec<String>,
}

impl Team {
    /// A team that is started with the command line alone.
    pub(crate) fn new(ranks: usize, threads: usize) -> Self {
        Self { ranks, threads, overrides: vec![] }
    }
}

/// What is started.
#[derive(Debug, Clone)]
pub(crate) enum What<'a> {
    /// Copies of this program, with the same arguments and this standard input.
    Ourselves {
        /// The configuration, if it was read from there.
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

/// What a launcher does, but for the ranks.
#[derive(Debug, Clone)]
pub(crate) struct Job<'a> {
    /// Where.
    pub(crate) hosts: &'a Hosts,
    /// How launchers talk; of several hosts.
    pub(crate) reach: Option<Reach>,
    /// What.
    pub(crate) what: What<'a>,
    /// Where goes what the ranks print.
    pub(crate) output: Output,
    /// How long ranks that were told to end may take.
    pub(crate) grace: Duration,
}

impl<'a> Job<'a> {
    /// Copies of this program on this host, with the same arguments and this standard input.
    pub(crate) fn here(standard_input: Option<&'a str>) -> Self {
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
