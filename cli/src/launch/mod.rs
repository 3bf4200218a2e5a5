//! Starts the ranks of this host as processes, ends them together, and starts them again when one has died.
//!
//! The parent hosts the store where the ranks meet, and gives each its place in the variables that torchrun uses. It
//! trains nothing itself. Each attempt has a number and processes of its own; the next one begins when all
//! processes of the last have ended. Of several hosts each has a launcher, and that of host 0 says what comes next.

mod attempt;
mod hosts;
mod outcome;
mod output;
mod recovery;
mod signals;
mod training;

use std::ffi::OsString;
use std::time::Duration;

use anyhow::Context;
use zero_comm::token::TokenFile;
use zero_train::train::{Again, Restart};

use attempt::{Attempt, Ended};
use hosts::{Decision, Line};
use outcome::Outcome;
use signals::Signals;

pub(crate) use hosts::{Hosts, Reach};
pub(crate) use output::{Output, Tee};
pub(crate) use recovery::{Before, Recovery};
pub(crate) use training::{launch_program, launch_training, train};

/// How long ranks that were told to end may take, where nobody says otherwise.
const GRACE: Duration = Duration::from_secs(5);

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
    fn is_ours(&self) -> bool {
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

    fn standard_input(&self) -> Option<&str> {
        match self.what {
            What::Ourselves { standard_input } => standard_input,
            What::Program(_) => None,
        }
    }
}

/// Starts ranks, waits for all, and returns the exit status. With a `recovery`, ranks that died are started again, as often as it
/// says.
///
/// # Errors
/// If a process cannot be started, or another host is lost.
pub(crate) fn launch(mut team: Team, job: &Job<'_>, recovery: Option<&Recovery<'_>>) -> anyhow::Result<u8> {
    let signals = Signals::listen()?;
    let limit = recovery.map_or(0, |recovery| recovery.max_restarts);
    let line = match &job.reach {
        None => None,
        Some(reach) => Some(Line::open(job.hosts, reach, terms(&team, job, limit), &signals)?),
    };
    let token = match line {
        Some(_) => None,
        None => Some(TokenFile::create().context("cannot write the job's token")?),
    };
    let mut again = Again::default();
    loop {
        let number = again.restarts.len();
        let attempt = Attempt { number, team: &team, job, token: token.as_ref(), again: &again, line: line.as_ref() };
        let ended = attempt.carry_out(&signals)?;
        let judge = Judge { signals: &signals, recovery, limit, job, again: &again };
        let own = ended.outcome();
        let (decision, next) = match &line {
            None => judge.decide(own, &team),
            Some(line) if job.hosts.index == 0 => {
                let all = line.outcome_of_all(number, own).inspect_err(|_| ended.report(job.what.is_ours(), own))?;
                let (decision, next) = judge.decide(all, &team);
                line.decide(decision.clone());
                (decision, next)
            }
            Some(line) => {
                let decision = line.decision(number, own).inspect_err(|_| ended.report(job.what.is_ours(), own))?;
                (decision, team.clone())
            }
        };
        match decision {
            Decision::End(all) => {
                if let Some(line) = &line {
                    line.leave();
                }
                return Ok(finish(&ended, job, all));
            }
            Decision::Again { again: next_again, told } => {
                ended.tell();
                eprintln!("{told}");
                (team, again) = (next, next_again);
                if let Some(line) = &line {
                    line.begin(number + 1);
                }
            }
        }
    }
}

/// What launchers of several hosts must have in common.
fn terms(team: &Team, job: &Job<'_>, limit: usize) -> Vec<(String, String)> {
    let term = |name: &str, value: usize| (name.to_string(), value.to_string());
    vec![
        term("--nnodes", job.hosts.count),
        term("--nproc-per-node", team.ranks),
        term("--max-restarts", limit),
        ("the program".to_string(), if job.what.is_ours() { "zero-train" } else { "another" }.to_string()),
    ]
}

fn finish(ended: &Ended, job: &Job<'_>, all: Outcome) -> u8 {
    ended.report(job.what.is_ours(), all);
    all.first.map_or(0, |first| first.exit_status())
}

/// What there is to know when it is decided how a job goes on.
struct Judge<'a> {
    signals: &'a Signals,
    recovery: Option<&'a Recovery<'a>>,
    limit: usize,
    job: &'a Job<'a>,
    again: &'a Again,
}

impl Judge<'_> {
    /// What comes after an attempt of `team`, and the ranks of the next.
    fn decide(&self, all: Outcome, team: &Team) -> (Decision, Team) {
        let number = self.again.restarts.len();
        let death = all.first.filter(|first| first.is_death(self.job.what.is_ours()));
        let (Some(recovery), Some(death)) = (self.recovery, death) else { return (Decision::End(all), team.clone()) };
        if self.signals.have_stopped() || number >= self.limit {
            return (Decision::End(all), team.clone());
        }
        let left = team.ranks.saturating_sub(all.lost);
        let next = recovery.next(team, left).and_then(|next| Ok((next, recovery.whence()?)));
        let (next, whence) = match next {
            Ok(found) => found,
            Err(error) => {
                eprintln!("error: no restart: {error:#}");
                return (Decision::End(all), team.clone());
            }
        };
        let ranks = self.job.hosts.count * next.ranks;
        let whose = whence.as_ref().map(|whence| told(ranks, whence)).unwrap_or_else(|| counted(ranks));
        let told = format!("restart {} of {}: {death}; {whose}", number + 1, self.limit);
        let mut again = self.again.clone();
        let whence = whence.unwrap_or_default();
        let step = whence.from.last().map_or(0, |(step, _)| *step);
        again.restarts.push(Restart { reason: death.to_string(), ranks, step });
        (again.from, again.keeps_folder) = (whence.from, whence.keeps_folder);
        (Decision::Again { again, told }, next)
    }
}

fn counted(ranks: usize) -> String {
    zero_train::counted(ranks, "rank", "ranks")
}

/// Who goes on from where.
fn told(ranks: usize, whence: &recovery::Whence) -> String {
    let ranks = counted(ranks);
    match whence.from.last() {
        Some((step, folder)) => format!("{ranks} from step {step}, {}", folder.display()),
        None => format!("{ranks} from where the run began: it has saved no checkpoint yet"),
    }
}
