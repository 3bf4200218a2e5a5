//! One attempt of a run: starts the ranks of this host and waits until all have ended.
//!
//! When a rank fails, ranks that already train notice this by themselves. If a signal killed the rank, the launcher
//! kills the ranks that do not train yet. One second after the failure, it sends SIGTERM to the remaining ranks, and
//! after a grace period SIGKILL. It reports which rank failed first.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::train::Restarts;
use rustix::process::{Pid, Signal};
use signal_hook::consts::SIGTERM;
use zero_comm::store::StoreServer;
use zero_comm::token::{self, TokenFile};
use zero_engine::printed::{tell, tell_text};

use super::error::failed;
use super::hosts::Line;
use super::job::{Job, Team, What};
use super::outcome::{AttemptOutcome, Failure};
use super::output::Printed;
use super::signals::{Signals, catches, send};
use crate::process::{self, STATUS_FILE};
use zero_engine::Error;

/// Time that the other ranks have to end by themselves after a rank has died.
const GRACE: Duration = Duration::from_millis(1000);

/// The parameters of an attempt.
pub(super) struct Attempt<'a> {
    pub(super) number: usize,
    /// The name of the job, which all its attempts share. No other job has the same name.
    pub(super) job_name: &'a str,
    pub(super) team: &'a Team,
    pub(super) job: &'a Job<'a>,
    /// The token of a single-host job, whose ranks connect through a store that only this attempt uses.
    pub(super) token: Option<&'a TokenFile>,
    pub(super) restarts: &'a Restarts,
    /// The connection to the launchers of the other hosts.
    pub(super) line: Option<&'a Line>,
}

struct Rank {
    /// Global rank.
    number: usize,
    child: Child,
    status: Option<ExitStatus>,
    /// Whether the launcher has sent the rank a signal to end.
    was_ended: bool,
    printed: Printed,
    /// The file to which the rank writes the exit status of its error.
    status_file: Option<PathBuf>,
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.status_file.as_ref().map(std::fs::remove_file);
    }
}

/// An attempt whose ranks on this host have all ended.
pub(super) struct Ended {
    ranks: Vec<Rank>,
    /// Index of the rank that failed first. A rank that ended because it lost a peer counts only if no rank failed for
    /// another reason, even if the launcher noticed its end first.
    first: Option<usize>,
    /// Number of ranks that crashed: killed by a signal that the launcher did not send, or exited with status 1.
    lost: usize,
}

/// The address of the store through which the ranks connect.
struct Meeting {
    address: String,
    port: u16,
    _store: Option<StoreServer>,
}

impl Attempt<'_> {
    /// Starts the ranks of this host and waits until all have ended.
    pub(super) fn carry_out(&self, signals: &Signals) -> Result<Ended, Error> {
        let meeting = self.meeting()?;
        let mut ended = Ended { ranks: vec![], first: None, lost: 0 };
        for local_rank in 0..self.team.ranks {
            match self.start(local_rank, &meeting) {
                Ok(rank) => ended.ranks.push(rank),
                Err(error) => {
                    ended.end(Signal::KILL, |_| true);
                    return Err(error);
                }
            }
        }
        ended.wait(self, signals)?;
        Ok(ended)
    }

    fn meeting(&self) -> Result<Meeting, Error> {
        if let Some(line) = self.line {
            let (address, port) = line.meeting();
            return Ok(Meeting { address, port, _store: None });
        }
        let token = self.token.map(TokenFile::token);
        let store = StoreServer::bind(("127.0.0.1", self.job.hosts.port.unwrap_or(0)), token);
        let store = store.map_err(failed("cannot open the port that the ranks connect to"))?;
        let address = store.address();
        Ok(Meeting { address: address.ip().to_string(), port: address.port(), _store: Some(store) })
    }

    fn command(&self) -> Result<Command, Error> {
        match &self.job.what {
            What::Program(words) => {
                let mut command = Command::new(&words[0]);
                command.args(&words[1..]);
                Ok(command)
            }
            What::Ourselves { .. } => {
                let program = std::env::current_exe().map_err(failed("cannot find this program's executable"))?;
                let mut command = Command::new(program);
                command
                    .args(std::env::args_os().skip(1))
                    .args(self.team.overrides.iter().flat_map(|change| ["--set", change]));
                Ok(command)
            }
        }
    }

    fn start(&self, local_rank: usize, meeting: &Meeting) -> Result<Rank, Error> {
        let hosts = self.job.hosts;
        let rank = hosts.index * self.team.ranks + local_rank;
        let ranks = hosts.count * self.team.ranks;
        let mut command = self.command()?;
        command
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("LOCAL_RANK", local_rank.to_string())
            .env("LOCAL_WORLD_SIZE", self.team.ranks.to_string())
            .env("GROUP_RANK", hosts.index.to_string())
            .env("MASTER_ADDR", &meeting.address)
            .env("MASTER_PORT", meeting.port.to_string())
            .env("TORCHELASTIC_USE_AGENT_STORE", "True")
            .env("ZERO_TRAIN_ATTEMPT", self.number.to_string())
            .env_remove(process::RESTARTED)
            .env(process::LAUNCHED, "1")
            .env(process::JOB, self.job_name)
            .envs(process::variables(self.team.threads, ranks))
            .stdin(if self.job.standard_input().is_some() { Stdio::piped() } else { Stdio::null() });
        let status_file = self.token.map(|token| token.path().with_file_name(format!("status-{}-{rank}", self.number)));
        command.env_remove(STATUS_FILE).envs(status_file.iter().map(|path| (STATUS_FILE, path)));
        if let Some(token) = self.token {
            command.env(token::TOKEN_FILE, token.path()).env_remove(token::TOKEN);
        }
        if let Some(run) = &hosts.run {
            command.env("ZERO_TRAIN_RUN_ID", run);
        }
        if self.number > 0 {
            command.env(process::RESTARTED, self.restarts.to_json());
        }
        let output = self.job.output.plan(self.number, rank, local_rank)?;
        // Rank 0 of a training run writes its errors straight to the terminal, so that it can draw a progress bar.
        output.prepare(&mut command, !(self.job.what.is_ours() && local_rank == 0));
        let program = command.get_program().to_string_lossy().into_owned();
        let mut child = command.spawn().map_err(|error| {
            let help = "give the path of an executable file";
            Error::Launch(format!("cannot start rank {rank}, `{program}`: {error}\n  help: {help}"))
        })?;
        if let (Some(mut pipe), Some(text)) = (child.stdin.take(), self.job.standard_input()) {
            // If the rank ends before it has read everything, it reports its own error.
            let _ = pipe.write_all(text.as_bytes());
        }
        let printed = output.follow(&mut child);
        Ok(Rank { number: rank, child, status: None, was_ended: false, printed, status_file })
    }
}

impl Ended {
    fn wait(&mut self, attempt: &Attempt<'_>, signals: &Signals) -> Result<(), Error> {
        let mut since: Option<Instant> = None;
        let mut follows = false;
        while self.ranks.iter().any(|rank| rank.status.is_none()) {
            signals.hand_on(&self.running());
            for index in 0..self.ranks.len() {
                let rank = &mut self.ranks[index];
                if rank.status.is_some() {
                    continue;
                }
                let Some(status) = rank.child.try_wait().map_err(failed("cannot wait for a rank"))? else { continue };
                rank.status = Some(status);
                // A rank that the launcher ended did not cause the failure.
                if status.success() || rank.was_ended {
                    continue;
                }
                let failure = Failure::new(rank.number, status, rank.status_file.as_deref());
                self.lost += usize::from(failure.signal.is_some() || failure.code == Some(1));
                if self.first.is_none() || follows && !failure.follows() {
                    self.first = Some(index);
                    follows = failure.follows();
                }
                since.get_or_insert_with(Instant::now);
                if let Some(line) = attempt.line {
                    line.tell_of_failure();
                }
                if failure.signal.is_some() {
                    // Ranks without a SIGTERM handler do not train yet. They would wait for the dead rank to connect.
                    self.end(Signal::KILL, |rank| !catches(rank, SIGTERM));
                }
            }
            if since.is_none() && attempt.line.is_some_and(|line| line.has_failure(attempt.number)) {
                since = Some(Instant::now());
            }
            match since.map(|since| since.elapsed()) {
                Some(passed) if passed > GRACE + attempt.job.grace => self.end(Signal::KILL, |_| true),
                Some(passed) if passed > GRACE => self.end(Signal::TERM, |_| true),
                _ => {}
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Sends a signal to the running ranks that `which` selects. Any signal but SIGKILL is sent to a rank only once.
    fn end(&mut self, signal: Signal, which: impl Fn(Pid) -> bool) {
        for rank in self.ranks.iter_mut().filter(|rank| rank.status.is_none()) {
            let process = Pid::from_child(&rank.child);
            if (signal == Signal::KILL || !rank.was_ended) && which(process) {
                rank.was_ended = true;
                send(&[process], signal);
            }
        }
    }

    fn running(&self) -> Vec<Pid> {
        self.ranks.iter().filter(|rank| rank.status.is_none()).map(|rank| Pid::from_child(&rank.child)).collect()
    }

    fn failure(&self, index: usize) -> Option<Failure> {
        let rank = &self.ranks[index];
        rank.status.map(|status| Failure::new(rank.number, status, rank.status_file.as_deref()))
    }

    /// Returns how the attempt ended on this host.
    pub(super) fn outcome(&self) -> AttemptOutcome {
        AttemptOutcome { first: self.first.and_then(|first| self.failure(first)), lost: self.lost }
    }

    /// Prints the last lines of the rank that failed first, unless they are on the terminal already.
    pub(super) fn tell(&self) {
        if let Some(first) = self.first {
            let (lines, unseen) = self.ranks[first].printed.last_lines();
            if unseen {
                tell_text(&lines);
            }
        }
    }

    /// Reports the failure, unless rank 0 has already reported it. `all` is the outcome on all hosts.
    pub(super) fn report(&self, is_ours: bool, all: AttemptOutcome) {
        // Waits until the output of all ranks has been written.
        self.ranks.iter().for_each(|rank| drop(rank.printed.last_lines()));
        let Some(cause) = all.first else { return };
        let Some(first) = self.first else {
            return tell(&format!("error: {cause}; it failed first, and the other ranks were stopped"));
        };
        let own = self.failure(first);
        let (lines, unseen) = self.ranks[first].printed.last_lines();
        // A rank that a signal stopped after a checkpoint has not failed. Rank 0 has already reported an error that all
        // ranks share.
        let is_told = |own: Failure| {
            matches!(own.code, Some(2 | 3 | 5)) && self.ranks[0].status.is_some_and(|status| status.code() == own.code)
        };
        if unseen && !own.is_some_and(|own| own.is_stop() || is_ours && is_told(own)) {
            tell_text(&lines);
        } else if !is_ours && !unseen && !lines.is_empty() {
            // The terminal has already shown these lines, mixed with the output of other ranks.
            tell(&format!("last lines of rank {}:", self.ranks[first].number));
            lines.lines().for_each(|line| tell(&format!("  {line}")));
        }
        // A request to stop that ends a training rank before it trains is not a failure.
        if is_ours && cause.is_stop_at_start() {
            return;
        }
        // A training rank reports its own error, unless a signal kills it.
        if cause.signal.is_some() || !is_ours && !cause.is_stop() || Some(cause) != own && !cause.is_stop() {
            tell(&format!("error: {cause}; it failed first, and the other ranks were stopped"));
        }
    }
}
