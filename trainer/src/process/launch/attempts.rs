//! Runs the attempts of a job one after another. Each attempt starts the ranks. After a rank has died, a new attempt
//! may begin.

use std::time::SystemTime;

use crate::train::{Restart, Restarts};
use zero_comm::token::TokenFile;
use zero_engine::Error;
use zero_engine::printed::tell;

use super::attempt::{Attempt, Ended};
use super::error::failed;
use super::hosts::{Decision, Line};
use super::job::{Job, Team};
use super::outcome::AttemptOutcome;
use super::recovery::{self, Recovery};
use super::signals::Signals;

/// Starts the ranks, waits until all have ended, and returns the exit status. With a `recovery`, restarts the ranks
/// when one has died, at most `max_restarts` times.
///
/// # Errors
/// Fails if a process cannot be started, or if another host is lost.
pub fn launch(mut team: Team, job: &Job<'_>, recovery: Option<&Recovery<'_>>) -> Result<u8, Error> {
    let signals = Signals::listen().map_err(failed("cannot handle signals"))?;
    let limit = recovery.map_or(0, |recovery| recovery.max_restarts);
    let line = match &job.reach {
        None => None,
        Some(reach) => Some(Line::open(job.hosts, reach, terms(&team, job, limit), &signals)?),
    };
    let token = match line {
        Some(_) => None,
        None => Some(TokenFile::create().map_err(failed("cannot write the job token file"))?),
    };
    let mut restarts = Restarts::default();
    let job_name = job_name();
    loop {
        let number = restarts.restarts.len();
        let attempt = Attempt {
            number,
            job_name: &job_name,
            team: &team,
            job,
            token: token.as_ref(),
            restarts: &restarts,
            line: line.as_ref(),
        };
        let ended = attempt.carry_out(&signals)?;
        let judge = Judge { signals: &signals, recovery, limit, job, restarts: &restarts };
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
            Decision::Restart { restarts: next_restarts, told } => {
                ended.tell();
                tell(&told);
                (team, restarts) = (next, next_restarts);
                if let Some(line) = &line {
                    line.begin(number + 1);
                }
            }
        }
    }
}

/// Returns a job name that no other launcher uses. By this name, ranks recognize the checkpoints of earlier attempts.
fn job_name() -> String {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    format!("{}-{}", since.as_nanos(), std::process::id())
}

/// Returns the settings that must be the same on all hosts.
fn terms(team: &Team, job: &Job<'_>, limit: usize) -> Vec<(String, String)> {
    let term = |name: &str, value: usize| (name.to_string(), value.to_string());
    vec![
        term("--nnodes", job.hosts.count),
        term("--nproc-per-node", team.ranks),
        term("--max-restarts", limit),
        ("the program".to_string(), if job.what.is_ours() { "zero-train" } else { "another" }.to_string()),
    ]
}

fn finish(ended: &Ended, job: &Job<'_>, all: AttemptOutcome) -> u8 {
    ended.report(job.what.is_ours(), all);
    all.first.map_or(0, |first| first.exit_status())
}

/// Decides whether to restart the ranks.
struct Judge<'a> {
    signals: &'a Signals,
    recovery: Option<&'a Recovery<'a>>,
    limit: usize,
    job: &'a Job<'a>,
    restarts: &'a Restarts,
}

impl Judge<'_> {
    /// Decides what follows an attempt of `team`. Returns the decision and the team of the next attempt.
    fn decide(&self, all: AttemptOutcome, team: &Team) -> (Decision, Team) {
        let number = self.restarts.restarts.len();
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
                tell(&format!("error: cannot restart: {error}"));
                return (Decision::End(all), team.clone());
            }
        };
        let ranks = self.job.hosts.count * next.ranks;
        let whose = whence.as_ref().map(|whence| told(ranks, whence)).unwrap_or_else(|| counted(ranks));
        let told = format!("restart {} of {}: {death}; {whose}", number + 1, self.limit);
        let mut restarts = self.restarts.clone();
        let whence = whence.unwrap_or_default();
        let step = whence.from.last().map_or(0, |(step, _)| *step);
        restarts.restarts.push(Restart { reason: death.to_string(), ranks, step });
        (restarts.from, restarts.keeps_folder) = (whence.from, whence.keeps_folder);
        (Decision::Restart { restarts, told }, next)
    }
}

fn counted(ranks: usize) -> String {
    zero_engine::counted(ranks, "rank", "ranks")
}

/// Returns a message that says how many ranks continue, and from which checkpoint.
fn told(ranks: usize, whence: &recovery::Whence) -> String {
    let ranks = counted(ranks);
    match whence.from.last() {
        Some((step, folder)) => format!("{ranks} from step {step}, {}", folder.display()),
        None => format!("{ranks} from the start of the run, which has saved no checkpoint yet"),
    }
}
