//! One attempt of a run: its ranks from their start until the last has ended.
//!
//! When a rank dies, those that train notice by themselves, and the launcher ends those that do not train yet; it says which died
//! first, and ends what is left after a second.

use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::{Pid, Signal};
use signal_hook::consts::{SIGINT, SIGTERM};
use zero_comm::store::StoreServer;
use zero_comm::token::{self, TokenFile};
use zero_train::train::Again;

use super::Team;
use super::signals::{Signals, catches, send};
use crate::surroundings;

/// How long the other ranks may take to end by themselves after one has died.
const GRACE: Duration = Duration::from_millis(1000);

/// The exit status of a rank that lost a peer.
const LOST_PEER: Option<i32> = Some(4);

/// What the ranks of an attempt are told.
pub(super) struct Attempt<'a> {
    pub(super) number: usize,
    pub(super) team: &'a Team,
    pub(super) token: &'a TokenFile,
    pub(super) again: &'a Again,
    pub(super) standard_input: Option<&'a str>,
}

struct Rank {
    child: Child,
    status: Option<ExitStatus>,
    /// The launcher has ended it.
    was_ended: bool,
    errors: Option<JoinHandle<String>>,
}

/// An attempt whose ranks have all ended.
pub(super) struct Ended {
    ranks: Vec<Rank>,
    /// The one that failed first: if one of two lost the other, that other, whichever was seen first.
    first: Option<usize>,
    /// How many died by themselves: not of the loss of another, and not because the launcher ended them.
    lost: usize,
}

impl Attempt<'_> {
    /// Starts the ranks and waits for all.
    pub(super) fn carry_out(&self, signals: &Signals) -> anyhow::Result<Ended> {
        let store = StoreServer::bind("127.0.0.1:0", Some(self.token.token()));
        let store = store.context("cannot open the port where ranks meet")?;
        let ranks = (0..self.team.ranks).map(|rank| self.start(rank, &store)).collect::<anyhow::Result<_>>()?;
        let mut ended = Ended { ranks, first: None, lost: 0 };
        ended.wait(signals)?;
        Ok(ended)
    }

    fn start(&self, rank: usize, store: &StoreServer) -> anyhow::Result<Rank> {
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let ranks = self.team.ranks.to_string();
        let mut command = Command::new(&program);
        command
            .args(std::env::args_os().skip(1))
            .args(self.team.overrides.iter().flat_map(|change| ["--set", change]))
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", &ranks)
            .env("LOCAL_RANK", rank.to_string())
            .env("LOCAL_WORLD_SIZE", &ranks)
            .env("MASTER_ADDR", store.address().ip().to_string())
            .env("MASTER_PORT", store.address().port().to_string())
            .env("ZERO_TRAIN_ATTEMPT", self.number.to_string())
            .env(token::TOKEN_FILE, self.token.path())
            .env_remove(token::TOKEN)
            .env_remove(surroundings::RESTARTED)
            .env(surroundings::LAUNCHED, "1")
            .envs(surroundings::variables(self.team.threads))
            .stdin(if self.standard_input.is_some() { Stdio::piped() } else { Stdio::null() });
        if self.number > 0 {
            command.env(surroundings::RESTARTED, self.again.to_json());
        }
        if rank > 0 {
            command.stderr(Stdio::piped());
        }
        let mut child = command.spawn().with_context(|| format!("cannot start rank {rank}"))?;
        if let (Some(mut pipe), Some(text)) = (child.stdin.take(), self.standard_input) {
            // A rank that ends before it has read everything says why itself.
            let _ = pipe.write_all(text.as_bytes());
        }
        let errors = child.stderr.take().map(|mut pipe| {
            std::thread::spawn(move || {
                let mut text = String::new();
                let _ = pipe.read_to_string(&mut text);
                text
            })
        });
        Ok(Rank { child, status: None, was_ended: false, errors })
    }
}

impl Ended {
    fn wait(&mut self, signals: &Signals) -> anyhow::Result<()> {
        let mut since: Option<Instant> = None;
        let mut follows = false;
        while self.ranks.iter().any(|rank| rank.status.is_none()) {
            signals.hand_on(&self.running());
            for index in 0..self.ranks.len() {
                let rank = &mut self.ranks[index];
                if rank.status.is_some() {
                    continue;
                }
                let Some(status) = rank.child.try_wait()? else { continue };
                rank.status = Some(status);
                // What the launcher ends is no cause.
                if status.success() || rank.was_ended {
                    continue;
                }
                self.lost += usize::from(status.signal().is_some() || status.code() == Some(1));
                if self.first.is_none() || follows && status.code() != LOST_PEER {
                    self.first = Some(index);
                    follows = status.code() == LOST_PEER;
                }
                since.get_or_insert_with(Instant::now);
                if status.signal().is_some() {
                    // They would wait for it to come to the meeting.
                    self.end(|rank| !catches(rank, SIGTERM));
                }
            }
            if since.is_some_and(|since| since.elapsed() > GRACE) {
                self.end(|_| true);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Kills those of the running ranks.
    fn end(&mut self, which: impl Fn(Pid) -> bool) {
        for rank in self.ranks.iter_mut().filter(|rank| rank.status.is_none()) {
            let process = Pid::from_child(&rank.child);
            if which(process) {
                rank.was_ended = true;
                send(&[process], Signal::KILL);
            }
        }
    }

    fn running(&self) -> Vec<Pid> {
        self.ranks.iter().filter(|rank| rank.status.is_none()).map(|rank| Pid::from_child(&rank.child)).collect()
    }

    fn status(&self, rank: usize) -> Option<ExitStatus> {
        self.ranks[rank].status
    }

    /// How many ranks died by themselves.
    pub(super) fn lost(&self) -> usize {
        self.lost
    }

    /// Which rank died how, if this is a death and no end: not the user's mistake (2), not unreadable data (3), not a loss that is no
    /// longer finite (5), and not a signal that asks to stop.
    pub(super) fn death(&self) -> Option<String> {
        let first = self.first?;
        let status = self.status(first)?;
        let is_end = match (status.code(), status.signal()) {
            (Some(code), _) => matches!(code, 2 | 3 | 5 | 130 | 143),
            (None, signal) => matches!(signal, Some(SIGINT | SIGTERM)),
        };
        (!is_end).then(|| how(first, status))
    }

    /// Prints what the rank that failed first has said, unless it is on the terminal already.
    pub(super) fn tell(mut self) {
        if let Some(first) = self.first {
            eprint!("{}", self.errors(first));
        }
    }

    /// What a rank has said; nothing of rank 0, whose errors went straight to the terminal.
    fn errors(&mut self, rank: usize) -> String {
        self.ranks[rank].errors.take().and_then(|handle| handle.join().ok()).unwrap_or_default()
    }

    /// Says what rank 0 cannot have said; returns the exit status.
    pub(super) fn report(mut self) -> u8 {
        let Some(first) = self.first else { return 0 };
        let code = |ended: &Self, rank: usize| ended.status(rank).and_then(|status| status.code());
        let own = code(&self, first);
        let errors = self.errors(first);
        match own {
            // Stopped by a signal after a checkpoint: no error.
            Some(130 | 143) => {}
            // The same mistake, which rank 0 has told of.
            Some(status @ (2 | 3 | 5)) if code(&self, 0) == Some(status) => {}
            Some(_) if errors.trim().is_empty() => {}
            Some(_) => eprint!("{errors}"),
            None => {
                let how = self.status(first).map_or_else(String::new, |status| how(first, status));
                eprintln!("error: {how}; it was the first to end, the others followed");
            }
        }
        own.map_or(4, |status| u8::try_from(status).unwrap_or(1))
    }
}

/// How a rank ended that did not end well.
fn how(rank: usize, status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("rank {rank} ended with status {code}"),
        (None, signal) => format!("rank {rank} was killed by signal {}", signal.unwrap_or(0)),
    }
}
