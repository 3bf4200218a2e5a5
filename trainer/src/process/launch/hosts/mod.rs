//! Coordinates the launchers of several hosts: they start together, tell each other when a rank has failed, and follow
//! the decisions of host 0.
//!
//! They communicate through the store that host 0's launcher serves. The ranks use the same store. Each launcher owns
//! one key and writes its value ten times a second. A launcher that stops writing is considered lost. A value holds the
//! complete state of its launcher, so it does not matter when or how often the others read it.

mod reason;
mod talk;

use std::net::{IpAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::train::Restarts;
use serde::{Deserialize, Serialize};
use zero_comm::store::StoreServer;
use zero_engine::Error;
use zero_engine::printed::tell;

use talk::Talk;

use super::error::failed;
use super::outcome::AttemptOutcome;
use super::signals::Signals;

/// The default port of the store, the same as PyTorch's.
const DEFAULT_PORT: u16 = 29500;
/// Timeout for all launchers to connect. It is long because a scheduler may start the hosts minutes apart.
const GATHERING: Duration = Duration::from_secs(600);
/// Time after which a launcher reports which other launchers it still waits for.
const REPORTING: Duration = Duration::from_secs(10);
/// Interval between two exchanges of states.
const TICK: Duration = Duration::from_millis(100);
/// A launcher waits this much longer for another host than a rank waits for another rank. The ranks therefore give up
/// first and report a more detailed error.
const AFTER_RANKS: Duration = Duration::from_secs(5);
/// Maximum time that a launcher waits until the other launchers know that the job has ended.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// The hosts of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hosts {
    /// Number of hosts.
    pub count: usize,
    /// Index of this host.
    pub index: usize,
    /// Address of host 0 as the other hosts reach it; `None` for a single host.
    pub address: Option<String>,
    /// Port of the store on host 0.
    pub port: Option<u16>,
    /// Name of the job.
    pub run: Option<String>,
}

impl Hosts {
    /// Creates the description of a single host.
    pub const fn alone() -> Self {
        Self { count: 1, index: 0, address: None, port: None, run: None }
    }

    /// Returns the address and port of the store that ranks and launchers of several hosts use.
    fn meeting(&self) -> (String, u16) {
        (self.address.clone().unwrap_or_else(|| "127.0.0.1".into()), self.port.unwrap_or(DEFAULT_PORT))
    }
}

/// How the launchers on several hosts communicate.
#[derive(Debug, Clone)]
pub struct Reach {
    /// The address of this host to listen on. `None` listens on the address by which the other hosts reach host 0.
    pub listen: Option<IpAddr>,
    /// The job's token.
    pub token: String,
    /// How long a rank waits for another rank.
    pub timeout: Duration,
}

/// The decision of host 0 after an attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Decision {
    /// The job has ended.
    End(AttemptOutcome),
    /// The launchers restart the ranks.
    Restart {
        /// The restarts so far, passed to the ranks.
        restarts: Restarts,
        /// The message for the user.
        told: String,
    },
}

/// The state that a launcher publishes to the other launchers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct LauncherState {
    /// Heartbeat: incremented by each write.
    beat: u64,
    /// Random ID of this launcher process. If a host's launcher is restarted, the new process has another ID.
    id: u64,
    /// IDs of the launchers whose states this launcher has read, by host. The ID is 0 for a host whose state it has not
    /// read.
    met: Vec<u64>,
    /// Settings that must be the same on all hosts.
    terms: Vec<(String, String)>,
    attempt: usize,
    /// Whether a rank of this attempt has failed on this host.
    failed: bool,
    /// How this attempt has ended on this host.
    outcome: Option<AttemptOutcome>,
    /// What follows the attempt. Only host 0 sets this.
    decision: Option<Decision>,
    /// Whether this launcher knows that the job has ended.
    leaves: bool,
}

struct Seen {
    state: LauncherState,
    changed: Instant,
}

struct Shared {
    own: Mutex<LauncherState>,
    others: Mutex<Vec<Option<Seen>>>,
    /// Why the other launchers cannot be reached.
    lost: Mutex<Option<String>>,
    /// The error of the last exchange of states; `None` if it succeeded.
    trouble: Mutex<Option<String>>,
    /// Whether all launchers have met. From then on, a launcher with a new ID is an error.
    gathered: AtomicBool,
    closing: AtomicBool,
}

/// The connection to the launchers of the other hosts.
pub(super) struct Line {
    hosts: Hosts,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    patience: Duration,
    /// The store, on host 0.
    server: Option<StoreServer>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Line {
    /// Connects to the launchers of all hosts and waits for them. All must have the same `terms`.
    ///
    /// # Errors
    /// Fails if a host does not connect in time or has different terms, or if a signal stops this launcher.
    pub(super) fn open(
        hosts: &Hosts,
        reach: &Reach,
        terms: Vec<(String, String)>,
        signals: &Signals,
    ) -> Result<Self, Error> {
        let (address, port) = hosts.meeting();
        let server = if hosts.index == 0 { Some(serve(&address, port, reach)?) } else { None };
        let place = if address.contains(':') { format!("[{address}]:{port}") } else { format!("{address}:{port}") };
        let place = server.as_ref().map_or(place, |server| server.address().to_string());
        let (id, met) = (own_id()?, vec![0; hosts.count]);
        let state = LauncherState {
            beat: 0,
            id,
            met,
            terms,
            attempt: 0,
            failed: false,
            outcome: None,
            decision: None,
            leaves: false,
        };
        let shared = Arc::new(Shared {
            own: Mutex::new(state),
            others: Mutex::new((0..hosts.count).map(|_| None).collect()),
            lost: Mutex::default(),
            trouble: Mutex::default(),
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
        // On failure, host 0 keeps serving the store until the other launchers have read the reason.
        line.gather(signals).inspect_err(|_| line.leave())?;
        Ok(line)
    }

    fn gather(&self, signals: &Signals) -> Result<(), Error> {
        let start = Instant::now();
        let mut is_reported = false;
        loop {
            let missing = {
                let others = locked(&self.shared.others);
                self.agree(&others)?;
                let (own, id) = (self.hosts.index, locked(&self.shared.own).id);
                // The other launcher must also have read the state of this launcher. If it has instead read the state
                // of an earlier launcher of this host, the other launcher belongs to another job.
                let has_met =
                    |host: usize| others[host].as_ref().is_some_and(|seen| seen.state.met.get(own) == Some(&id));
                (0..self.hosts.count).find(|&host| host != own && !has_met(host))
            };
            let Some(missing) = missing else {
                self.shared.gathered.store(true, Ordering::Relaxed);
                return Ok(());
            };
            if let Some(lost) = locked(&self.shared.lost).clone() {
                return Err(Error::Hosts(lost));
            }
            if signals.have_stopped() {
                return Err(Error::Hosts(format!("stopped by a signal while waiting for host {missing}")));
            }
            if start.elapsed() > GATHERING {
                let (waited, reason) = (GATHERING.as_secs() / 60, self.reason(missing));
                return Err(Error::Hosts(format!("host {missing} did not connect within {waited} minutes{reason}")));
            }
            if !is_reported && start.elapsed() > REPORTING {
                is_reported = true;
                tell(&format!("waiting for host {missing}{}", self.reason(missing)));
            }
            std::thread::sleep(TICK / 10);
        }
    }

    fn agree(&self, others: &[Option<Seen>]) -> Result<(), Error> {
        let own = locked(&self.shared.own).terms.clone();
        for (host, seen) in others.iter().enumerate() {
            let Some(seen) = seen else { continue };
            let differs = own.iter().zip(&seen.state.terms).find(|(here, there)| here != there);
            if let Some(((name, here), (_, there))) = differs {
                let index = self.hosts.index;
                return Err(Error::setting(
                    name,
                    format!(
                        "the hosts were started with different settings: {name} is {here} on host {index} and {there} on host {host}"
                    ),
                    "start `zero-train launch` with the same flags on every host, except --node-rank",
                ));
            }
        }
        Ok(())
    }

    /// Returns the address and port at which the ranks of this host reach the store.
    pub(super) fn meeting(&self) -> (String, u16) {
        match &self.server {
            // Host 0 may have a different address for the other hosts. This is the address on which it listens.
            Some(server) => (server.address().ip().to_string(), server.address().port()),
            None => self.hosts.meeting(),
        }
    }

    /// Tells the other launchers that a rank of this host has failed.
    pub(super) fn tell_of_failure(&self) {
        locked(&self.shared.own).failed = true;
    }

    /// Returns whether a rank of another host has failed in this attempt, or another host is lost.
    pub(super) fn has_failure(&self, attempt: usize) -> bool {
        let others = locked(&self.shared.others);
        let failed = |seen: &Seen| seen.state.attempt == attempt && seen.state.failed;
        let failed = others.iter().flatten().any(failed);
        drop(others);
        failed || self.lost().is_some()
    }

    /// Returns a message that names the lost host and the reason, if a host is lost.
    fn lost(&self) -> Option<String> {
        if let Some(lost) = locked(&self.shared.lost).clone() {
            return Some(lost);
        }
        let others = locked(&self.shared.others);
        let silent = |seen: &Option<Seen>| seen.as_ref().is_some_and(|seen| seen.changed.elapsed() > self.patience);
        let host = others.iter().position(silent)?;
        Some(format!("host {host} has not responded for {:.0?}", self.patience))
    }

    /// Waits for the outcomes of all hosts and combines them. Only host 0 calls it.
    ///
    /// # Errors
    /// Fails if a host is lost.
    pub(super) fn outcome_of_all(&self, attempt: usize, own: AttemptOutcome) -> Result<AttemptOutcome, Error> {
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

    /// Publishes the decision. Only host 0 calls it.
    pub(super) fn decide(&self, decision: Decision) {
        locked(&self.shared.own).decision = Some(decision);
    }

    /// Publishes the outcome on this host and waits for the decision of host 0. Only the other hosts call it.
    ///
    /// # Errors
    /// Fails if a host is lost.
    pub(super) fn decision(&self, attempt: usize, own: AttemptOutcome) -> Result<Decision, Error> {
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

    /// Begins the next attempt. Keeps publishing the last decision of host 0.
    pub(super) fn begin(&self, attempt: usize) {
        let mut own = locked(&self.shared.own);
        (own.attempt, own.failed, own.outcome) = (attempt, false, None);
    }

    /// Waits until the other launchers know that the job has ended, or [`END_TIMEOUT`] has passed.
    pub(super) fn leave(&self) {
        locked(&self.shared.own).leaves = true;
        let end = Instant::now() + END_TIMEOUT;
        let others_know = || locked(&self.shared.others).iter().flatten().all(|seen| seen.state.leaves);
        let is_said = || locked(&self.shared.own).beat;
        let before = is_said();
        // Host 0 serves the store, so it waits until no other host needs the store. A host needs the store until it has
        // written its last state.
        while Instant::now() < end && locked(&self.shared.lost).is_none() {
            let done = if self.hosts.index == 0 { others_know() } else { is_said() > before + 1 };
            if done {
                return;
            }
            std::thread::sleep(TICK / 10);
        }
    }

    fn pause(&self) -> Result<(), Error> {
        if let Some(lost) = self.lost() {
            return Err(Error::Hosts(lost));
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

/// Returns a random number other than 0.
fn own_id() -> Result<u64, Error> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(failed("cannot generate random bytes"))?;
    Ok(u64::from_le_bytes(bytes) | 1)
}

fn serve(address: &str, port: u16, reach: &Reach) -> Result<StoreServer, Error> {
    let place = format!("host 0 cannot open port {port}, which all hosts connect to");
    let listen = match reach.listen {
        Some(listen) => listen,
        None => {
            let mut found = (address, port).to_socket_addrs().map_err(failed(&place))?;
            let first = found.next().ok_or_else(|| format!("the name {address} does not resolve to an address"));
            first.map_err(Error::Launch)?.ip()
        }
    };
    StoreServer::bind((listen, port), Some(&reach.token)).map_err(failed(place))
}
