//! Connects this process to the other ranks of its job.
//!
//! The ranks meet at a key-value store on `MASTER_PORT`. The launcher serves this store, or else rank 0 does. Each rank
//! stores the address that it listens on under the key `/zero/{run}/{attempt}/{rank}` and reads the addresses of the
//! others. Then the ranks connect to each other directly. A program may connect several times, for example for two
//! engines. The keys of later connections also contain their number, so that no rank reads earlier addresses.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::agreement::Terms;
use crate::auth::Key;
use crate::collective::signature::digest;
use crate::collective::step::Membership;
use crate::communicator::{Communicator, Options};
use crate::error::CommError;
use crate::group::Group;
use crate::health::{Board, Health};
use crate::launcher_environment::LauncherEnvironment;
use crate::lock::lock;
use crate::processes::{Control, Processes, World};
use crate::shm::{PeerArenas, host_identity};
use crate::store::{StoreClient, StoreError, StoreServer};
use crate::tcp::{Hub, Identity, Purpose, bind_address};
use crate::threads::threads;

/// Meets the other ranks of the job and connects to them. A job of one rank returns immediately.
///
/// For a job on several hosts, the options must contain an interface and a token. A process may connect several times;
/// all ranks must connect in the same order.
///
/// # Errors
/// [`CommError::Rendezvous`], [`CommError::Unauthorized`], [`CommError::Disagreement`], or the error of an operation if
/// a rank is lost while the ranks connect.
pub fn connect(place: &LauncherEnvironment, options: &Options) -> Result<Arc<dyn Communicator>, CommError> {
    if place.world_size == 1 {
        return Ok(Arc::clone(&threads(1, options)[0]));
    }
    let deadline = Instant::now() + options.meeting_timeout;
    let meeting = Meeting::at(place, options)?;
    let free = || TcpListener::bind((meeting.interface, 0));
    let listener = apart_from(place.master_port, free).map_err(|error| meeting.error(&error.to_string()))?;
    let job = digest(&place.run_id, &[]);
    let members: Vec<usize> = (0..place.world_size).collect();

    meeting.check_master()?;
    let (server, mut store) = meeting.open_store(deadline)?;
    let token = meeting.agree_on_token(&mut store, deadline)?;
    let identity = Identity { job, attempt: place.attempt, rank: place.rank, key: Key::new(Some(&token)) };
    let hub = Hub::listen(listener, identity).map_err(|error| meeting.error(&error.to_string()))?;
    let peers = meeting.introduce(&mut store, hub.address(), server.is_some(), deadline)?;
    meeting.agree(&mut store, &peers, server.is_some())?;
    drop(store);

    let (addresses, hosts): (Vec<_>, Vec<_>) = peers.into_iter().map(|peer| (peer.address, peer.host)).unzip();
    meeting.check_reach(&hosts)?;
    hub.addresses.get_or_init(|| addresses);
    let board = Board::new(place.world_size);
    let control = hub.mesh(WORLD, Purpose::Control, &members, deadline)?;
    let registry = Arc::default();
    let control = Control::start(control, Arc::clone(&board), Arc::clone(&registry));
    let control = control.map_err(|error| meeting.error(&error.to_string()))?;
    let health = Health::new(place.rank, board, registry, Some(Box::new(control)));
    let (transport, timeout) = (options.transport, options.timeout);
    let world =
        Arc::new(World { hub, health: Arc::clone(&health), hosts, transport, arenas: PeerArenas::default(), timeout });
    let membership = Membership::new(WORLD, place.rank, members);
    let fabric = Processes::connect(&world, membership.clone(), deadline)?;
    // By now every rank has connected to every other, so no rank needs the store any more.
    drop(server);
    let group = Group::new(membership, Box::new(fabric), None, health, timeout)?;
    *lock(&MADE).entry(of_rank(place)).or_default() += 1;
    Ok(group)
}

/// The run, the attempt, the port of the store, the rank, and the number of ranks.
type OfRank = (String, u32, u16, usize, usize);

/// Number of times that each rank has connected in this process. Usually a process is one rank.
static MADE: Mutex<BTreeMap<OfRank, usize>> = Mutex::new(BTreeMap::new());

fn of_rank(place: &LauncherEnvironment) -> OfRank {
    (place.run_id.clone(), place.attempt, place.master_port, place.rank, place.world_size)
}

/// Opens a listener on a port other than the store's. As long as no store listens, the system may assign the store's
/// port to a listener that binds port 0. The other ranks would then take this listener for the store and wait.
fn apart_from(store: u16, free: impl Fn() -> io::Result<TcpListener>) -> io::Result<TcpListener> {
    let first = free()?;
    // The first listener stays open until the second is bound, so the second gets a different port.
    if first.local_addr()?.port() == store { free() } else { Ok(first) }
}

/// The group of all ranks of the job.
const WORLD: u64 = 0;

/// How long the rank that serves the store keeps running after it has found that the ranks' settings or world sizes
/// differ, so that the other ranks can read these values and report the difference.
const REPORT_TIME: Duration = Duration::from_secs(5);

/// The record that a rank publishes in the store.
pub(crate) struct Introduction {
    address: SocketAddr,
    /// Digest of the rank's terms.
    terms: String,
    /// Number of ranks of the job, according to the rank's environment.
    size: usize,
    host: String,
}

impl Introduction {
    pub(crate) fn read(text: &str) -> Option<Introduction> {
        let mut words = text.splitn(3, ' ');
        let mut word = || words.next();
        let address = word()?.parse().ok()?;
        let (terms, size) = word()?.split_once('/')?;
        Some(Introduction { address, terms: terms.into(), size: size.parse().ok()?, host: word()?.into() })
    }
}

/// This rank's view of the rendezvous.
struct Meeting<'a> {
    place: &'a LauncherEnvironment,
    options: &'a Options,
    /// This rank's own address.
    interface: IpAddr,
    /// The address of the store.
    address: String,
    keys: String,
    terms: Terms,
}

impl Meeting<'_> {
    fn at<'a>(place: &'a LauncherEnvironment, options: &'a Options) -> Result<Meeting<'a>, CommError> {
        let host = place.master_addr.as_str();
        let host = if host.contains(':') { format!("[{host}]") } else { host.to_string() };
        let address = format!("{host}:{}", place.master_port);
        let error = |detail| CommError::Rendezvous { rank: place.rank, address: address.clone(), detail };
        let interface = bind_address(options.interface.as_deref()).map_err(error)?;
        if !interface.is_loopback() && options.token.is_none() {
            let detail = "connections from other hosts require a job token: set ZERO_TRAIN_TOKEN or ZERO_TRAIN_TOKEN_FILE, with the same token on all ranks";
            return Err(error(detail.into()));
        }
        if place.rank >= place.world_size {
            return Err(error(format!("rank {} is not below the world size {}", place.rank, place.world_size)));
        }
        let made = lock(&MADE).get(&of_rank(place)).copied().unwrap_or(0);
        let number = if made == 0 { String::new() } else { format!("/connection-{made}") };
        let keys = format!("/zero/{}/{}{number}", place.run_id, place.attempt);
        Ok(Meeting { place, options, interface, address, keys, terms: Terms::new(&options.terms) })
    }

    fn error(&self, detail: &str) -> CommError {
        CommError::Rendezvous { rank: self.place.rank, address: self.address.clone(), detail: detail.into() }
    }

    fn store_error(&self, error: StoreError) -> CommError {
        match error {
            StoreError::Unauthorized { address } => CommError::Unauthorized {
                address,
                detail: "the store at this address has a different job token".into(),
            },
            StoreError::Missing { key, .. } => {
                let waited = self.options.meeting_timeout;
                let spans_hosts = self.place.local_world_size < self.place.world_size;
                let hint = if spans_hosts && self.interface.is_loopback() {
                    "; ranks on other hosts need `launcher.interface`"
                } else {
                    ""
                };
                self.error(&format!("{key} did not appear in the store within {waited:?}: that rank has not started or cannot reach the store{hint}"))
            }
            other => self.error(&other.to_string()),
        }
    }

    /// Checks that `MASTER_ADDR` is on this host if no interface is set. Rank 0 then listens on loopback only, and a
    /// rank on another host would wait for it in vain.
    fn check_master(&self) -> Result<(), CommError> {
        if self.options.interface.is_some() || self.place.rank == 0 || self.place.store_is_served {
            return Ok(());
        }
        // If the name cannot be resolved now, it may become resolvable later. If it does not, the attempt to connect
        // reports it.
        let Ok(addresses) = self.address.to_socket_addrs() else { return Ok(()) };
        let addresses: Vec<SocketAddr> = addresses.collect();
        let is_own = |address: &SocketAddr| TcpListener::bind((address.ip(), 0)).is_ok();
        if addresses.is_empty() || addresses.iter().any(is_own) {
            return Ok(());
        }
        Err(self.error(
            "this address is on another host: set `launcher.interface` (in code `interface`) to the network interface that \
             connects the hosts",
        ))
    }

    /// Connects to the store. Before that, rank 0 starts the store's server, unless another process serves the store or
    /// the launcher has announced that it will serve it.
    fn open_store(&self, deadline: Instant) -> Result<(Option<StoreServer>, StoreClient), CommError> {
        let token = self.options.token.as_deref();
        let server = match self.place.rank {
            0 if !self.place.store_is_served => {
                match StoreServer::bind((self.interface, self.place.master_port), token) {
                    Ok(server) => Some(server),
                    // Another process, for example the launcher, serves a store on this port.
                    Err(StoreError::Bind { in_use: true, .. }) => None,
                    Err(error) => return Err(self.store_error(error)),
                }
            }
            _ => None,
        };
        let loopback = format!("127.0.0.1:{}", self.place.master_port);
        let addresses = match (&server, &self.options.interface) {
            (Some(server), _) => vec![server.address().to_string()],
            (None, Some(_)) => vec![self.address.clone()],
            // Without an interface, a store of rank 0 listens on loopback only, even if `MASTER_ADDR` is another name
            // of this host.
            (None, None) => vec![loopback, self.address.clone()],
        };
        let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
        let client = StoreClient::connect_any(&addresses, token, deadline).map_err(|error| self.store_error(error))?;
        Ok((server, client))
    }

    /// Returns the token for the connections between ranks. If none was configured, rank 0 generates a token and
    /// publishes it in the store. A process that can read the store can then join the job, but a process that only
    /// finds the port of a rank cannot.
    fn agree_on_token(&self, store: &mut StoreClient, deadline: Instant) -> Result<String, CommError> {
        if let Some(token) = &self.options.token {
            return Ok(token.clone());
        }
        let key = format!("{}/token", self.keys);
        if self.place.rank == 0 {
            let mut secret = [0; 32];
            getrandom::fill(&mut secret).map_err(|error| self.error(&error.to_string()))?;
            let token: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
            store.set(&key, token.as_bytes()).map_err(|error| self.store_error(error))?;
            return Ok(token);
        }
        let token = store.get(&key, deadline).map_err(|error| self.store_error(error))?;
        String::from_utf8(token).map_err(|_| self.error("the token in the store is not valid UTF-8"))
    }

    /// Publishes this rank's address and reads the addresses of all ranks, indexed by rank. Returns an error if another
    /// rank was started with a different number of ranks.
    fn introduce(
        &self,
        store: &mut StoreClient,
        own: SocketAddr,
        serves: bool,
        deadline: Instant,
    ) -> Result<Vec<Introduction>, CommError> {
        let key = |rank: usize| format!("{}/{rank}", self.keys);
        let host = self.options.host.as_deref().unwrap_or_default();
        let (terms, size) = (self.terms.digest(), self.place.world_size);
        let introduction = format!("{own} {terms}/{size} {}/{host}", host_identity());
        store.set(&key(self.place.rank), introduction.as_bytes()).map_err(|error| self.store_error(error))?;
        let read = |rank: usize| {
            let value = store.get(&key(rank), deadline).map_err(|error| self.store_error(error))?;
            let text = String::from_utf8_lossy(&value).into_owned();
            let introduction = Introduction::read(&text);
            match introduction {
                Some(introduction) if introduction.size == size => Ok(introduction),
                Some(introduction) => Err(self.differing_size(store, rank, introduction.size, serves)),
                None => Err(self.error(&format!("rank {rank} published {text:?} instead of its address"))),
            }
        };
        (0..size).map(read).collect()
    }

    /// Returns the error that reports that rank `peer` was started with `there` ranks. The rank that serves the store
    /// first waits until the other ranks have found the difference.
    fn differing_size(&self, store: &mut StoreClient, peer: usize, there: usize, serves: bool) -> CommError {
        let (rank, here, deadline) = (self.place.rank, self.place.world_size, Instant::now() + REPORT_TIME);
        let _ = self.part(store, ("differs", here.max(there)), serves, deadline);
        let mut both = [(rank, here.to_string()), (peer, there.to_string())];
        both.sort();
        let [(rank, here), (peer, there)] = both;
        CommError::Disagreement { rank, peer, key: "the number of ranks".into(), here, there }
    }

    /// Marks in the store that this rank has found a difference. The rank that serves the store waits for the marks of
    /// all `ranks` ranks. The store ends at the deadline. A rank that has not found the difference by then reports that
    /// the store is unreachable.
    fn part(
        &self,
        store: &mut StoreClient,
        (mark, ranks): (&str, usize),
        serves: bool,
        deadline: Instant,
    ) -> Result<(), StoreError> {
        let key = |rank: usize| format!("{}/{mark}/{rank}", self.keys);
        store.set(&key(self.place.rank), b"1")?;
        if serves {
            let _ = (0..ranks).try_for_each(|rank| store.get(&key(rank), deadline).map(drop));
        }
        Ok(())
    }

    /// Returns an error if the terms of the ranks differ. Every rank knows the digests of all ranks, so all ranks
    /// report the same error.
    fn agree(&self, store: &mut StoreClient, peers: &[Introduction], serves: bool) -> Result<(), CommError> {
        let Some(other) = peers.iter().position(|peer| peer.terms != peers[0].terms) else { return Ok(()) };
        let (rank, deadline) = (self.place.rank, Instant::now() + REPORT_TIME);
        let key = |rank: usize| format!("{}/terms/{rank}", self.keys);
        let failed = |error| self.store_error(error);
        if rank == 0 || rank == other {
            store.set(&key(rank), &self.terms.encode()).map_err(failed)?;
        }
        let mut of = |rank: usize| store.get(&key(rank), deadline).map(|bytes| Terms::decode(&bytes));
        let (first, second) = (of(0).map_err(failed)?, of(other).map_err(failed)?);
        self.part(store, ("read", peers.len()), serves, deadline).map_err(failed)?;
        Err(first.disagreement(0, &second, other))
    }

    /// Checks that this rank can reach all ranks: ranks on other hosts cannot be reached over loopback.
    fn check_reach(&self, hosts: &[String]) -> Result<(), CommError> {
        let network = |host: &String| host.split('/').take(2).collect::<Vec<_>>().join("/");
        let home = network(&hosts[0]);
        match hosts.iter().position(|host| network(host) != home) {
            Some(other) if self.interface.is_loopback() => Err(self.error(&format!(
                "ranks 0 and {other} are on different hosts: set `launcher.interface` (in code `interface`) to the network \
                 interface that connects them"
            ))),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_never_listens_at_the_port_of_the_store() {
        let free = || TcpListener::bind(("127.0.0.1", 0));
        let port = |listener: &TcpListener| listener.local_addr().expect("an address").port();
        let (first, second) = (free().expect("a port"), free().expect("a port"));
        let [store, other] = [&first, &second].map(port);
        let offered = std::cell::RefCell::new(vec![second, first]);
        let next = || Ok(offered.borrow_mut().pop().expect("two listeners"));
        // The system offers the store's port first.
        let found = apart_from(store, next).expect("a listener");
        assert_eq!(port(&found), other);
        let offered = std::cell::Cell::new(Some(found));
        let next = || Ok(offered.take().expect("one listener"));
        assert_eq!(port(&apart_from(store, next).expect("a listener")), other);
    }
}
