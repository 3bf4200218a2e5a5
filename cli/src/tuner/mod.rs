//! `zero-train autotune`: runs the library's search and shows its table. `sweep` implements `--sweep`.

mod sweep;

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use console::Term;
use signal_hook::consts::{SIGINT, SIGTERM};
use zero_config::{Autotuning, Config, Metric};
use zero_engine::bytes;
use zero_planner::autotune::{Interval, Request, Row, State, Tuned, Watch, cost, tune, unit, value};

use crate::arguments::{AutotuneArgs, refuse};
use crate::printed::{is_dumb_terminal, show_line, tell};
use zero_train::process;

/// Exit status of an interrupted search.
const INTERRUPTED: u8 = 130;
/// Exit status of a search in which no candidate ran.
const NOTHING_RAN: u8 = 1;
/// Maximum number of rows in the table.
const SHOWN: usize = 12;

/// Runs the search or the sweep and prints the result. Returns the exit status.
///
/// # Errors
/// Returns the errors of [`tune`], or of the sweep.
pub(crate) fn autotune(args: &AutotuneArgs) -> anyhow::Result<u8> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // A second signal ends the program at once.
        signal_hook::flag::register_conditional_shutdown(signal, i32::from(INTERRUPTED), stop.clone())?;
        signal_hook::flag::register(signal, stop.clone())?;
    }
    let Ok([mut source]) = <[_; 1]>::try_from(crate::input::read(&args.config)?) else {
        // The search writes the best settings into the text of the configuration file, so there must be exactly one
        // file.
        refuse("autotune takes one --config: merge the files, or pass the keys of the others with --set")
    };
    let config = crate::input::load_sources(&args.config, vec![source.clone()], &args.config.set)?;
    if args.config.ignore_unknown_keys {
        // Trials read this text again and would reject unknown keys, so remove these keys from it.
        let written = zero_config::load(source.clone(), &args.config.set)?;
        let changes: Vec<_> = written.unknown_keys().into_iter().map(|key| (key.to_string(), None)).collect();
        source.text = zero_config::edit(&source, &changes)?;
    }
    let ranks = args.config.ranks(&config);
    let config = config.resolve(ranks)?;
    // `autotuning.enabled` causes a warning that training does not tune. The warning does not apply to this command.
    let warnings = config.warnings.iter().filter(|warning| warning.place.path != "autotuning.enabled");
    warnings.for_each(|warning| tell(&warning.to_string()));
    let request = Request {
        source,
        overrides: args.config.set.clone(),
        results_dir: args.out.clone(),
        ranks,
        program: std::env::current_exe()?,
        threads: &|config: &Config| process::threads(Some(&config.launcher), config.world_size),
        planner: &zero_train::train::planner_of_data,
        resume: args.resume,
        stop: &stop,
    };
    if args.sweep {
        let (interrupted, has_best) = sweep::sweep(&request, args.quiet)?;
        return Ok(status(interrupted, has_best));
    }
    let mut table = Table::new(args);
    let tuned = tune(&request, &mut table)?;
    if !args.quiet {
        conclude(&tuned);
    }
    Ok(status(tuned.interrupted, tuned.best.is_some()))
}

fn status(interrupted: bool, has_best: bool) -> u8 {
    match (interrupted, has_best) {
        (true, _) => INTERRUPTED,
        (false, true) => 0,
        (false, false) => NOTHING_RAN,
    }
}

/// Shows the progress of the search: a table that is redrawn on a terminal, or lines elsewhere.
struct Table {
    terminal: Option<Term>,
    lines: bool,
    /// Number of lines on the terminal that must be cleared before the next drawing.
    height: usize,
    word: String,
    drawn: Vec<String>,
}

impl Table {
    fn new(args: &AutotuneArgs) -> Self {
        let is_terminal = std::io::stdout().is_terminal() && !is_dumb_terminal() && !args.plain && !args.quiet;
        Self {
            terminal: is_terminal.then(Term::stdout),
            lines: !is_terminal && !args.quiet,
            height: 0,
            word: String::new(),
            drawn: vec![],
        }
    }

    fn draw(&mut self) {
        let Some(terminal) = &self.terminal else { return };
        let _ = terminal.clear_last_lines(self.height);
        let (height, width) = terminal.size();
        let (height, width) = (usize::from(height), usize::from(width).max(20));
        // Draw only lines that fit: lines that scroll off the terminal cannot be cleared. The cursor takes one
        // additional line.
        let lines = self.drawn.iter().take(height.saturating_sub(2)).chain(std::iter::once(&self.word));
        self.height = 0;
        for line in lines {
            let _ = terminal.write_line(&console::truncate_str(line, width - 1, "…"));
            self.height += 1;
        }
    }
}

impl Watch for Table {
    fn rows(&mut self, rows: &[Row], changed: Option<usize>, tuning: &Autotuning) {
        if self.terminal.is_some() {
            self.drawn = table(rows, tuning.metric);
            self.draw();
        } else if self.lines {
            match changed {
                Some(id) => show_line(&sentence(&rows[id], tuning.metric)),
                None => show_line(&counts(rows)),
            }
        }
    }

    fn say(&mut self, word: &str) {
        if self.terminal.is_some() {
            self.word = word.to_string();
            self.draw();
        } else if self.lines {
            show_line(word);
        }
    }
}

fn counts(rows: &[Row]) -> String {
    let count = |state: State| rows.iter().filter(|row| row.state == state).count();
    let mut words = format!("{} configurations", rows.len());
    for (state, word) in [
        (State::Refused, "invalid"),
        (State::TooLarge, "too large"),
        (State::Predicted, "candidates"),
        (State::Measured, "measured"),
        (State::Failed, "failed"),
        (State::TimedOut, "timed out"),
        (State::OutOfMemory, "out of memory"),
    ] {
        if count(state) > 0 {
            words += &format!(", {} {word}", count(state));
        }
    }
    words
}

/// Formats the top of the table: the measured rows from best to worst, then the best predictions.
fn table(rows: &[Row], metric: Metric) -> Vec<String> {
    let seconds = |row: &Row| row.seconds().map_or(f64::INFINITY, |of| of.mean);
    let key = |row: &Row| {
        let measured = row.state == State::Measured;
        let seconds = if measured { seconds(row) } else { row.corrected.or(row.predicted).unwrap_or(f64::INFINITY) };
        (!measured, row.planned.as_ref().map_or(f64::INFINITY, |planned| cost(metric, &planned.work, seconds)))
    };
    let mut sorted: Vec<&Row> =
        rows.iter().filter(|row| row.planned.is_some() && row.state != State::TooLarge).collect();
    sorted.sort_by(|a, b| {
        let (a, b) = (key(a), key(b));
        a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
    });
    let heading = format!(
        "{:>4}  {:>10}  {:>10}  {:<18}  {:>19}  configuration",
        "rank", "predicted", "measured", "", "memory planned, held"
    );
    let mut lines = vec![counts(rows), heading];
    lines.extend(
        sorted.iter().take(SHOWN).enumerate().map(|(rank, row)| format!("{:>4}  {}", rank + 1, line(row, metric))),
    );
    lines
}

/// Describes the last run of a row's configuration.
fn sentence(row: &Row, metric: Metric) -> String {
    let work = row.planned.as_ref().map(|planned| planned.work);
    let (Some(work), Some(run), State::Measured) = (work, row.runs.last(), row.state) else {
        let reason = row.reason.as_deref().unwrap_or("unknown reason");
        return format!("  {}: {reason}: {}", row.state.name(), row.words());
    };
    let of = |seconds: f64| figure(value(metric, &work, seconds));
    let predicted = match row.predicted {
        Some(seconds) => format!("{} predicted", of(seconds)),
        None => "not predicted".into(),
    };
    let unit = unit(metric, &work);
    format!("  {} {unit} ({predicted}), {} per rank: {}", of(run.seconds()), bytes(run.peak_bytes), row.words())
}

/// Formats a row as a line of the table.
fn line(row: &Row, metric: Metric) -> String {
    let work = row.planned.as_ref().map(|planned| planned.work);
    let of = |seconds: f64| work.as_ref().map_or_else(|| "-".into(), |work| figure(value(metric, work, seconds)));
    let predicted = row.corrected.or(row.predicted).map_or_else(|| "-".into(), of);
    let (measured, spread) = match row.seconds() {
        Some(Interval { mean, low, high }) if row.runs.len() > 1 => {
            (of(mean), format!("± {:.1} %", 50.0 * (high - low) / mean))
        }
        Some(Interval { mean, .. }) => (of(mean), String::new()),
        None => (row.state.name().to_string(), String::new()),
    };
    let runs = match row.runs.len() {
        0 => String::new(),
        1 => "1 run".into(),
        runs => format!("{runs} runs"),
    };
    let planned = row.planned.as_ref().map_or_else(|| "-".into(), |planned| bytes(planned.peak_bytes));
    let held = row.runs.iter().map(|run| run.peak_bytes).max().map_or_else(|| "-".into(), bytes);
    let mut text = format!(
        "{predicted:>10}  {measured:>10}  {:<18}  {:>19}  {}",
        format!("{spread} {runs}").trim(),
        format!("{planned}, {held}"),
        row.words()
    );
    if row.state != State::Measured
        && let Some(reason) = &row.reason
    {
        text += &format!(": {reason}");
    }
    text
}

/// Formats a value with four decimals below 10, one decimal below 1000 and no decimals below a million. Larger values
/// are in scientific notation.
fn figure(value: f64) -> String {
    match value.abs() {
        large if large >= 1e6 => format!("{value:.3e}"),
        large if large >= 1000.0 => format!("{value:.0}"),
        large if large >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.4}"),
    }
}

fn conclude(tuned: &Tuned) {
    show_line("");
    match tuned.best {
        None => show_line(&format!("no configuration ran: {}", counts(&tuned.rows))),
        Some(best) => {
            let row = &tuned.rows[best];
            let (metric, work) = (tuned.tuning.metric, row.planned.as_ref().map(|planned| planned.work));
            let unit = work.as_ref().map_or("", |work| unit(metric, work));
            if let (Some(work), Some(seconds)) = (work, row.seconds()) {
                show_line(&format!("best: {} {unit}, {}", figure(value(metric, &work, seconds.mean)), row.words()));
            }
            match tuned.gain {
                _ if best == 0 => show_line("your configuration is the best configuration tested"),
                Some(Interval { mean, low, high }) if high.is_finite() => {
                    show_line(&format!(
                        "      {mean:.2} times as good as your configuration (95 % confidence interval {low:.2} – {high:.2})"
                    ));
                }
                Some(Interval { mean, .. }) => {
                    show_line(&format!(
                        "      {mean:.2} times as good as your configuration; too few runs for a confidence interval"
                    ));
                }
                None => show_line("      your configuration did not run"),
            }
        }
    }
    for file in &tuned.files {
        show_line(&file.display().to_string());
    }
    if tuned.interrupted {
        show_line("interrupted; continue with --resume");
    }
}
