//! Shows the progress of data preparation, and stops it after a signal.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::bar::Bar;
use super::progress::Output;
use crate::data::{Phase, Watch};
use crate::process::signals::Requests;
use zero_engine::format::bytes;
use zero_engine::printed::show_line;

/// Minimum time between two lines of progress.
const PAUSE: Duration = Duration::from_secs(5);

/// Shows the progress of a rank, or of a command without ranks, while it opens its data.
pub(crate) struct Preparing<'a> {
    bar: Option<Bar>,
    lines: bool,
    requests: Option<&'a Requests>,
    /// The phase of the last call.
    phase: Cell<Option<Phase>>,
    /// The time of the last line.
    shown: Cell<Instant>,
}

impl<'a> Preparing<'a> {
    /// Watches the preparation of a rank. Only rank 0 shows progress.
    pub(crate) fn of_rank(rank: usize, output: Output, requests: &'a Requests) -> Self {
        Self::new(if rank == 0 { output } else { Output::Quiet }, Some(requests))
    }

    /// Watches the preparation of a command without ranks. Shows only a progress bar.
    pub(crate) fn of_command(requests: &'a Requests) -> Self {
        let mut preparing = Self::new(Output::Auto, Some(requests));
        preparing.lines = false;
        preparing
    }

    /// Watches a preparation. Without `requests`, signals keep their default actions, and only a progress bar is shown.
    pub(crate) fn new(output: Output, requests: Option<&'a Requests>) -> Self {
        let bar = output.bar();
        let lines = requests.is_some() && output != Output::Quiet && bar.is_none();
        Self { bar, lines, requests, phase: Cell::new(None), shown: Cell::new(Instant::now()) }
    }
}

impl Watch for Preparing<'_> {
    fn progress(&self, phase: Phase, done: u64, total: u64) {
        let what = match phase {
            Phase::Downloading => "downloaded",
            Phase::Waiting => "tokenized by another process",
            Phase::Hashing => "compared with the token cache",
            Phase::Tokenizing => "tokenized",
        };
        if let Some(bar) = &self.bar {
            bar.set(done >> 20, total >> 20, &format!("MiB of the data {what}"));
        }
        let begins = self.phase.replace(Some(phase)) != Some(phase) && phase == Phase::Tokenizing;
        if self.lines && (begins || self.shown.get().elapsed() >= PAUSE) {
            self.shown.set(Instant::now());
            show_line(&format!("data: {} % of {} {what}", 100 * done / total.max(1), bytes(total)));
        }
    }

    fn is_stopped(&self) -> bool {
        self.requests.is_some_and(|requests| requests.stop() != 0)
    }
}

impl Drop for Preparing<'_> {
    fn drop(&mut self) {
        if self.phase.get().is_some()
            && let Some(bar) = &self.bar
        {
            bar.finish();
        }
    }
}
