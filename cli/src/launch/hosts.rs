//! The launchers of several hosts: they begin together, tell each other when a rank has failed, and do next what that of host 0 says.
//!
//! They talk through a store that the launcher of host 0 serves, where the ranks meet too. Each leaves one value there, under its own key,
//! and writes it anew ten times a second; whoever does not is lost. A value says all there is to say, so it does not matter when it is
//! read, or how often.

use std::net::{IpAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use zero_comm::store::{StoreClient, StoreError, StoreServer};
use zero_train::train::Restarts;

use super::outcome::AttemptOutcome;
use super::signals::Signals;

/// The port where launchers meet by default, PyTorch's.
const DEFAULT_PORT: u16 = 29500;
/// How long a scheduler may take from the first host to the last.
const GATHERING: Duration = Duration::from_secs(600);
/// Between two looks at the others.
const TICK: Duration = Duration::from_millis(100);
/// How much longer than a rank's, which says more, a launcher's patience is.
const AFTER_RANKS: Duration = Duration::from_secs(5);
/// How long the last words of a job may take.
const FAREWELL: Duration = Duration::from_secs(5);

/// The hosts of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hosts {
    /// How many.
    pub(crate) count: usize,
    /// Which of them this is.
    pub(crate) index: usize,
    /// Host 0, as all reach it; `None` of a single host.
    pub(crate) address: Option<String>,
    /// Port on host 0.
    pub(crate) port: Option<u16>,
    /// Name of the job.
    pub(crate) run: Option<String>,
}

impl Hosts {
    /// This one alone.
    pub(crate) const fn alone() -> Self {
        Self { count: 1, index: 0, address: None, port: None, run: None }
    }

    /// Where ranks and launchers of several hosts meet.
    fn meeting(&self) -> (String, u16) {
        (self.address.clone().unwrap_or_else(|| "127.0.0.1".into()), self.port.unwrap_or(DEFAULT_PORT))
    }
}

/// How launchers of several hosts talk.
#[derive(Debug, Clone)]
pub(crate) struct Reach {
    /// The address of this host to listen on; `None`: the one that host 0 is reached by.
    pub(crate) listen: Option<IpAddr>,
    /// The job's token.
    pub(crate) token: String,
    /// How long a rank waits for another.
    pub(crate) timeout: Duration,
}

/// What host 0 says after an attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Decision {
    /// The job has ended.
    End(AttemptOutcome),
    /// The ranks are started again.
    Restart {
        /// What they are told.
        restarts: Restarts,
        /// What the user is told.
        told: String,
    },
}

/// What a launcher tells the others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct State {
    /// Changes each time.
    beat: u64,
    /// Of this launcher: one that is started in its place has another.
    id: u64,
    /// The launchers that it has met, by host; 0 of one that it has not.
    met: Vec<u64>,
    /// What must be the same on all hosts.
    terms: Vec<(String, String)>,
    attempt: usize,
    /// A rank of this attempt has failed.
    failed: bool,
    /// How this attempt has ended.
    outcome: Option<AttemptOutcome>,
    /// What comes after it; of host 0.
    decision: Option<Decision>,
    /// Knows that the job has ended.
    leaves: bool,
}

struct Seen {
    state: State,
    changed: Instant,
}

struct Shared {
    own: Mutex<State>,
    others: Mutex<Vec<Option<Seen>>>,
    /// Why the others are not to be reached.
    lost: Mutex<Option<String>>,
    /// All have met all: nobody else is let in.
    gathered: AtomicBool,
    closing: AtomicBool,
}

/// The line to the launchers of the other hosts.
pub(super) struct Line {
    hosts: Hosts,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    patience: Duration,
    /// Where all meet, on host 0.
    server: Option<StoreServer>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Line {
    /// Waits for the launchers of all hosts, which must agree about `terms`.
    ///
    /// # Errors
    /// A host that does not come, or was started differently; a signal that stops this one.
    pub(super) fn open(
        hosts: &Hosts,
        reach: &Reach,
        terms: Vec<(String, String)>,
        signals: &Signals,
    ) -> anyhow::Result<Self> {
        let (address, port) = hosts.meeting();
        let server = if hosts.index == 0 { Some(serve(&address, port, reach)?) } else { None };
        let place = if address.contains(':') { format!("[{address}]:{port}") } else { format!("{address}:{port}") };
        let place = server.as_ref().map_or(place, |server| server.address().to_string());
        let (id, met) = (own_id()?, vec![0; hosts.count]);
        let state =
            State { beat: 0, id, met, terms, attempt: 0, failed: false, outcome: None, decision: None, leaves: false };
        let shared = Arc::new(Shared {
            own: Mutex::new(state),
            others: Mutex::new((0..hosts.count).map(|_| None).collect()),
            lost: Mutex::default(),
            gathered: AtomicBool::new(false),
            closing: AtomicBool::new(false),
        });
        let patience = reach.timeout + AFTER_RANKS;
        let talk = Talk {
            place,
            token: reach.token.clone(),
            keys: format!("/zero-launch/{}", hosts.run.as_deref().unwrap_or("local")),
            index: hosts.index,
            patience,
            shared: Arc::clone(&shared),
        };
        let thread = Some(std::thread::spawn(move || talk.run()));
        let line = Self { hosts: hosts.clone(), shared, thread, patience, server };
        // The others shall see why, before what host 0 serves is gone.
        line.gather(signals).inspect_err(|_| line.leave())?;
        Ok(line)
    }

    fn gather(&self, signals: &Signals) -> anyhow::Result<()> {
        let end = Instant::now() + GATHERING;
        loop {
            let missing = {
                let others = locked(&self.shared.others);
                self.agree(&others)?;
                let (own, id) = (self.hosts.index, locked(&self.shared.own).id);
                // It must know this one too: one that has met an earlier launcher of this host is of another job.
                let has_met =
                    |host: usize| others[host].as_ref().is_some_and(|seen| seen.state.met.get(own) == Some(&id));
                (0..self.hosts.count).find(|&host| host != own && !has_met(host))
            };
            let Some(missing) = missing else {
                self.shared.gathered.store(true, Ordering::Relaxed);
                return Ok(());
            };
            if let Some(lost) = locked(&self.shared.lost).clone() {
                anyhow::bail!(zero_train::Error::Hosts(lost));
            }
            if signals.have_stopped() {
                anyhow::bail!(zero_train::Error::Hosts(format!("stopped by a signal before host {missing} had come")));
            }
            if Instant::now() > end {
                let waited = GATHERING.as_secs() / 60;
                anyhow::bail!(zero_train::Error::Hosts(format!("host {missing} has not come within {waited} minutes")));
            }
            std::thread::sleep(TICK / 10);
        }
    }

    fn agree(&self, others: &[Option<Seen>]) -> anyhow::Result<()> {
        let own = locked(&self.shared.own).terms.clone();
        for (host, seen) in others.iter().enumerate() {
            let Some(seen) = seen else { continue };
            let differs = own.iter().zip(&seen.state.terms).find(|(here, there)| here != there);
            if let Some(((name, here), (_, there))) = differs {
                let index = self.hosts.index;
                anyhow::bail!(zero_train::Error::Setting {
                    key: name.clone(),
                    message: format!(
                        "the hosts were not started alike: {name} is {here} on host {index}, and {there} on host {host}"
                    ),
                    help: "start `zero-train launch` with the same flags on each, but for --node-rank".into(),
                });
            }
        }
        Ok(())
    }

    /// Where the ranks of this host reach the store.
    pub(super) fn meeting(&self) -> (String, u16) {
        match &self.server {
            // Whatever name host 0 has for others, this is where it listens.
            Some(server) => (server.address().ip().to_string(), server.address().port()),
            None => self.hosts.meeting(),
        }
    }

    /// Says that a rank of this host has failed.
    pub(super) fn tell_of_failure(&self) {
        locked(&self.shared.own).failed = true;
    }

    /// Whether a rank of another host has failed in this attempt, or another host is lost.
    pub(super) fn has_failure(&self, attempt: usize) -> bool {
        let others = locked(&self.shared.others);
        let failed = |seen: &Seen| seen.state.attempt == attempt && seen.state.failed;
        let failed = others.iter().flatten().any(failed);
        drop(others);
        failed || self.lost().is_some()
    }

    /// Which host is lost, and why it is thought so.
    fn lost(&self) -> Option<String> {
        if let Some(lost) = locked(&self.shared.lost).clone() {
            return Some(lost);
        }
        let others = locked(&self.shared.others);
        let silent = |seen: &Option<Seen>| seen.as_ref().is_some_and(|seen| seen.changed.elapsed() > self.patience);
        let host = others.iter().position(silent)?;
        Some(format!("host {host} has not been heard of for {:.0?}", self.patience))
    }

    /// On host 0: how the attempt has ended on all hosts.
    ///
    /// # Errors
    /// A lost host.
    pub(super) fn outcome_of_all(&self, attempt: usize, own: AttemptOutcome) -> anyhow::Result<AttemptOutcome> {
        locked(&self.shared.own).outcome = Some(own);
        loop {
            {
                let others = locked(&self.shared.others);
                let outcome = |host: usize| match &others[host] {
                    _ if host == self.hosts.index => Some(own),
                    Some(seen) if seen.state.attempt == attempt => seen.state.outcome,
                    _ => None,
                };
                if let Some(all) = (0..self.hosts.count).map(outcome).collect::<Option<Vec<_>>>() {
                    return Ok(AttemptOutcome::of_all(all));
                }
            }
            self.pause()?;
        }
    }

    /// On host 0: what all do next.
    pub(super) fn decide(&self, decision: Decision) {
        locked(&self.shared.own).decision = Some(decision);
    }

    /// On the other hosts: what host 0 says after an attempt.
    ///
    /// # Errors
    /// Host 0 is lost.
    pub(super) fn decision(&self, attempt: usize, own: AttemptOutcome) -> anyhow::Result<Decision> {
        locked(&self.shared.own).outcome = Some(own);
        loop {
            let decision = {
                let others = locked(&self.shared.others);
                let first = others[0].as_ref().map(|seen| &seen.state);
                first.and_then(|state| state.decision.clone()).filter(|decision| match decision {
                    Decision::End(_) => true,
                    Decision::Restart { restarts, .. } => restarts.restarts.len() == attempt + 1,
                })
            };
            if let Some(decision) = decision {
                return Ok(decision);
            }
            self.pause()?;
        }
    }

    /// Begins the next attempt. What host 0 has decided stays to be read.
    pub(super) fn begin(&self, attempt: usize) {
        let mut own = locked(&self.shared.own);
        (own.attempt, own.failed, own.outcome) = (attempt, false, None);
    }

    /// Sees to it that all others know that the job has ended.
    pub(super) fn leave(&self) {
        locked(&self.shared.own).leaves = true;
        let end = Instant::now() + FAREWELL;
        let others_know = || locked(&self.shared.others).iter().flatten().all(|seen| seen.state.leaves);
        let is_said = || locked(&self.shared.own).beat;
        let before = is_said();
        // Host 0 serves what the others read; they need to have written once more.
        while Instant::now() < end && locked(&self.shared.lost).is_none() {
            let done = if self.hosts.index == 0 { others_know() } else { is_said() > before + 1 };
            if done {
                return;
            }
            std::thread::sleep(TICK / 10);
        }
    }

    fn pause(&self) -> anyhow::Result<()> {
        if let Some(lost) = self.lost() {
            anyhow::bail!(zero_train::Error::Hosts(lost));
        }
        std::thread::sleep(TICK / 10);
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Any number but 0.
fn own_id() -> anyhow::Result<u64> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|error| anyhow::anyhow!("no random bytes: {error}"))?;
    Ok(u64::from_le_bytes(bytes) | 1)
}

fn serve(address: &str, port: u16, reach: &Reach) -> anyhow::Result<StoreServer> {
    let failed = || format!("host 0 cannot open the port {port} where all meet");
    let listen = match reach.listen {
        Some(listen) => listen,
        None => {
            let mut found = (address, port).to_socket_addrs().with_context(failed)?;
            found.next().with_context(|| format!("{address} has no address"))?.ip()
        }
    };
    StoreServer::bind((listen, port), Some(&reach.token)).with_context(failed)
}

/// The thread that writes what this launcher says and reads what the others do.
struct Talk {
    place: String,
    token: String,
    keys: String,
    index: usize,
    patience: Duration,
    shared: Arc<Shared>,
}

impl Talk {
    fn run(&self) {
        // At first the others may not have been started.
        let mut end = Instant::now() + GATHERING;
        let mut client = None;
        while !self.shared.closing.load(Ordering::Relaxed) {
            match self.exchange(&mut client) {
                Ok(()) => end = Instant::now() + self.patience,
                Err(error) if matches!(error, StoreError::Unauthorized { .. }) || Instant::now() > end => {
                    let hint = match error {
                        StoreError::Unauthorized { .. } => "; ZERO_TRAIN_TOKEN_FILE must hold the same on all hosts",
                        _ => "",
                    };
                    *locked(&self.shared.lost) =
                        Some(format!("the launcher of host 0 is not to be reached: {error}{hint}"));
                    return;
                }
                // A connection that has failed in the middle of a message is of no use.
                Err(_) => client = None,
            }
            std::thread::sleep(TICK);
        }
    }

    fn exchange(&self, client: &mut Option<StoreClient>) -> Result<(), StoreError> {
        let client = match client {
            Some(client) => client,
            None => client.insert(StoreClient::connect(&self.place, Some(&self.token), Instant::now() + TICK)?),
        };
        let state = {
            let mut own = locked(&self.shared.own);
            own.beat += 1;
            own.clone()
        };
        // Plain data: nothing in it could fail to serialise.
        client.set(&format!("{}/{}", self.keys, self.index), &serde_json::to_vec(&state).unwrap_or_default())?;
        let count = locked(&self.shared.others).len();
        for host in (0..count).filter(|&host| host != self.index) {
            let text = match client.get(&format!("{}/{host}", self.keys), Instant::now()) {
                Ok(text) => text,
                Err(StoreError::Missing { .. }) => continue,
                Err(error) => return Err(error),
            };
            let Ok(state) = serde_json::from_slice::<State>(&text) else { continue };
            let met = std::mem::replace(&mut locked(&self.shared.own).met[host], state.id);
            if self.shared.gathered.load(Ordering::Relaxed) && met != state.id {
                locked(&self.shared.own).met[host] = met;
                *locked(&self.shared.lost) =
                    Some(format!("the launcher of host {host} has ended, and another was started"));
                continue;
            }
            let seen = &mut locked(&self.shared.others)[host];
            if seen.as_ref().is_none_or(|seen| seen.state != state) {
                *seen = Some(Seen { state, changed: Instant::now() });
            }
        }
        Ok(())
    }
}
