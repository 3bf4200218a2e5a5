//! `zero-train autotune --sweep`: runs the library's sweep. Prints a line per trial, and a table at the end.

use crate::printed::show_line;
use zero_planner::autotune::{Request, SweepTrial, SweepWatch, Swept, TrialState};

/// Runs the sweep and prints the result. Returns whether it was interrupted, and whether a trial finished.
///
/// # Errors
/// Returns the errors of [`zero_planner::autotune::sweep`].
pub(super) fn sweep(request: &Request<'_>, is_quiet: bool) -> anyhow::Result<(bool, bool)> {
    let swept = zero_planner::autotune::sweep(request, &mut Lines { is_quiet })?;
    if !is_quiet {
        conclude(&swept);
    }
    Ok((swept.interrupted, swept.best.is_some()))
}

struct Lines {
    is_quiet: bool,
}

impl SweepWatch for Lines {
    fn trial(&mut self, trial: &SweepTrial) {
        if !self.is_quiet {
            let reason = trial.reason.as_ref().map_or_else(String::new, |reason| format!(" ({reason})"));
            show_line(&format!("  trial {}: {}: {}{reason}", trial.id + 1, told(trial), trial.words()));
        }
    }

    fn say(&mut self, word: &str) {
        if !self.is_quiet {
            show_line(word);
        }
    }
}

fn told(trial: &SweepTrial) -> String {
    match (trial.state, trial.best()) {
        (TrialState::Finished, Some(best)) => format!("evaluation loss {:.4} after step {}", best.loss, best.step),
        (state, Some(best)) => format!("{}, {:.4} after step {}", state.name(), best.loss, best.step),
        (state, None) => state.name().to_string(),
    }
}

/// Formats the table of all trials, best first.
fn table(trials: &[SweepTrial]) -> Vec<String> {
    let mut sorted: Vec<&SweepTrial> = trials.iter().collect();
    sorted.sort_by(|a, b| a.compare(b));
    let row = |rank: &str, loss: &str, step: &str, state: &str, rest: &str| {
        format!("{rank:>4}  {loss:>10}  {step:>7}  {state:<13}  {rest}")
    };
    let mut lines = vec![row("rank", "loss", "at step", "state", "hyperparameters")];
    lines.extend(sorted.iter().enumerate().map(|(index, trial)| {
        // Only finished trials are ranked, because comparisons with trials that stopped early are provisional.
        let rank = if trial.state == TrialState::Finished { (index + 1).to_string() } else { "-".into() };
        let (loss, step) = match trial.best() {
            Some(best) => (format!("{:.4}", best.loss), best.step.to_string()),
            None => ("-".into(), "-".into()),
        };
        row(&rank, &loss, &step, trial.state.name(), &trial.words())
    }));
    lines
}

fn conclude(swept: &Swept) {
    show_line("");
    table(&swept.trials).iter().for_each(|line| show_line(line));
    match swept.best.map(|best| &swept.trials[best]) {
        Some(best) => show_line(&format!("best: {}: {}", told(best), best.words())),
        None => show_line("no trial finished"),
    }
    swept.files.iter().for_each(|file| show_line(&file.display().to_string()));
    if swept.interrupted {
        show_line("interrupted; continue with --resume");
    }
}
