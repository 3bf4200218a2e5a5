//! Shows progress during training: a bar on a terminal, plain lines elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use zero_config::LogLevel;

use super::bar::Bar;
use zero_engine::printed::{is_dumb_terminal, show_line, tell};

/// Selects what a run prints.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Output {
    /// A progress bar on a terminal that can redraw a line, and plain lines otherwise.
    #[default]
    Auto,
    /// Plain lines.
    Plain,
    /// Only errors.
    Quiet,
}

impl Output {
    /// Returns the output for a log level. A log level that hides information also hides progress.
    #[must_use]
    pub fn at(self, level: LogLevel) -> Self {
        if level < LogLevel::Info { Self::Quiet } else { self }
    }

    /// Returns a progress bar if this output shows one.
    pub(crate) fn bar(self) -> Option<Bar> {
        (self == Self::Auto && std::io::stderr().is_terminal() && !is_dumb_terminal()).then(Bar::default)
    }
}

/// The values that a line of progress shows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shown {
    pub(crate) step: u64,
    pub(crate) loss: f32,
    pub(crate) lr: f64,
    pub(crate) grad_norm: f64,
    pub(crate) tokens_per_s: f64,
}

pub(crate) struct Progress {
    bar: Option<Bar>,
    lines: bool,
    every: u64,
    last: u64,
    from: u64,
    started: Instant,
}

impl Progress {
    /// Creates the progress display. Ranks that do not print pass [`Output::Quiet`].
    pub(crate) fn new(output: Output, every: usize, from: u64, steps: u64) -> Self {
        let bar = output.bar();
        let lines = output != Output::Quiet && bar.is_none();
        Self { bar, lines, every: every as u64, last: steps, from, started: Instant::now() }
    }

    pub(crate) fn step(&self, shown: &Shown) {
        let Shown { step, loss, lr, grad_norm, tokens_per_s } = *shown;
        if let Some(bar) = &self.bar {
            let eta = self.eta(step);
            bar.set(step, self.last, &format!("loss {loss:.4}  {tokens_per_s:.0} tokens/s  eta {eta}"));
        }
        if self.lines && self.is_due(step) {
            show_line(&format!(
                "step {step:>6}/{}  loss {loss:<8.4} lr {lr:<9.3e} grad norm {grad_norm:<8.3} {tokens_per_s:>8.0} tokens/s  eta {}",
                self.last,
                self.eta(step)
            ));
        }
    }

    /// Returns whether `step` gets a line of progress.
    pub(crate) fn is_due(&self, step: u64) -> bool {
        self.every > 0 && (step.is_multiple_of(self.every) || step == self.from + 1 || step == self.last)
    }

    /// Prints a warning to standard error, even if the output is quiet.
    pub(crate) fn warn(&self, text: &str) {
        let line = format!("warning: {text}");
        match &self.bar {
            Some(bar) => bar.suspend(&|| tell(&line)),
            None => tell(&line),
        }
    }

    /// Prints a line between steps.
    pub(crate) fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(&|| show_line(line)),
            None if self.lines => show_line(line),
            None => {}
        }
    }

    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish();
        }
    }

    fn eta(&self, step: u64) -> String {
        let done = (step - self.from).max(1);
        let left = self.started.elapsed().div_f64(done as f64).mul_f64(self.last.saturating_sub(step) as f64);
        seconds(left)
    }
}

/// Formats a duration like `2m 05s`.
pub(crate) fn seconds(duration: Duration) -> String {
    let s = duration.as_secs();
    match s {
        0..60 => format!("{s}s"),
        60..3600 => format!("{}m {:02}s", s / 60, s % 60),
        _ => format!("{}h {:02}m", s / 3600, s % 3600 / 60),
    }
}
