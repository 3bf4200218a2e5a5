//! Starts the ranks of this machine as processes, ends them together, and starts them again when one has died.
//!
//! The parent hosts the store where the ranks meet, and gives each its place in the variables that torchrun uses. It
//! trains nothing itself. Each attempt has a number, a store of its own and processes of its own; the next one begins when all
//! processes of the last have ended.

mod attempt;
mod recovery;
mod signals;

use anyhow::Context;
use zero_comm::token::TokenFile;
use zero_train::train::{Again, Restart};

use attempt::Attempt;
use signals::Signals;

pub(crate) use recovery::{Before, Recovery};

/// The ranks of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Team {
    /// How many.
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

/// Starts copies of this program with the same arguments, waits for all, and returns the exit status. With a `recovery`, ranks that
/// died are started again, as often as it says.
///
/// # Errors
/// If a process cannot be started.
pub(crate) fn launch(
    mut team: Team,
    standard_input: Option<&str>,
    recovery: Option<&Recovery<'_>>,
) -> anyhow::Result<u8> {
    let token = TokenFile::create().context("cannot write the job's token")?;
    let signals = Signals::listen()?;
    let mut again = Again::default();
    loop {
        let number = again.restarts.len();
        let ended =
            Attempt { number, team: &team, token: &token, again: &again, standard_input }.carry_out(&signals)?;
        let limit = recovery.map_or(0, |recovery| recovery.max_restarts);
        let (Some(recovery), Some(death)) = (recovery, ended.death()) else { return Ok(ended.report()) };
        if signals.have_stopped() || number >= limit {
            return Ok(ended.report());
        }
        let left = team.ranks.saturating_sub(ended.lost());
        let next = recovery.next(&team, left).and_then(|next| Ok((next, recovery.whence()?)));
        let (next, whence) = match next {
            Ok(found) => found,
            Err(error) => {
                let status = ended.report();
                eprintln!("error: no restart: {error:#}");
                return Ok(status);
            }
        };
        ended.tell();
        team = next;
        eprintln!("restart {} of {limit}: {death}; {}", number + 1, told(&team, &whence));
        let step = whence.from.last().map_or(0, |(step, _)| *step);
        again.restarts.push(Restart { reason: death, ranks: team.ranks, step });
        (again.from, again.keeps_folder) = (whence.from, whence.keeps_folder);
    }
}

/// Who goes on from where.
fn told(team: &Team, whence: &recovery::Whence) -> String {
    let ranks = if team.ranks == 1 { "1 rank".to_string() } else { format!("{} ranks", team.ranks) };
    match whence.from.last() {
        Some((step, folder)) => format!("{ranks} from step {step}, {}", folder.display()),
        None => format!("{ranks} from where the run began: it has saved no checkpoint yet"),
    }
}
