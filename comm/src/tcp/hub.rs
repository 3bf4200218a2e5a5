//! Opens the connections between ranks: the higher rank connects, the lower rank accepts.
//!
//! The request for a connection contains the job, attempt, group and purpose of the connection, and the ranks of both
//! ends. The proof of the job token covers these fields. The hub keeps each accepted connection until its group asks
//! for it, so groups may connect at the same time and in any order.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::auth::{self, Hello, Key, Refusal, WELCOME};
use crate::doorkeeper::Doorkeeper;
use crate::error::CommError;
use crate::lock::lock;

/// The identity of this process towards its peers.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    /// Digest of the job's run id.
    pub(crate) job: u64,
    pub(crate) attempt: u32,
    /// Rank in the job.
    pub(crate) rank: usize,
    pub(crate) key: Key,
}

/// The purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub(crate) enum Purpose {
    Control = 1,
    Collectives = 2,
    Messages = 3,
}

type Arrival = (u64, u32, u32);

pub(crate) struct Hub {
    pub(crate) identity: Identity,
    door: Doorkeeper,
    arrivals: Arc<Arrivals>,
    /// Addresses that the ranks of the job listen on; set after the rendezvous.
    pub(crate) addresses: OnceLock<Vec<SocketAddr>>,
}

#[derive(Default)]
struct Arrivals {
    streams: Mutex<HashMap<Arrival, TcpStream>>,
    changed: Condvar,
}

const OTHER_JOB: u8 = 1;
const OTHER_ATTEMPT: u8 = 2;
const OTHER_RANK: u8 = 3;

impl Hub {
    pub(crate) fn listen(listener: TcpListener, identity: Identity) -> io::Result<Hub> {
        let arrivals = Arc::new(Arrivals::default());
        let (ours, accepted) = (identity.clone(), Arc::clone(&arrivals));
        let door = Doorkeeper::start(listener, "hub", move |mut stream, pending| {
            let judge = |hello: &Hello| judge(hello, &ours);
            if stream.set_nodelay(true).is_err() {
                return;
            }
            if let Ok(hello) = auth::demand(&mut stream, &ours.key, judge) {
                drop(pending);
                let arrival = (word(&hello, 16), half_word(&hello, 24), half_word(&hello, 28));
                lock(&accepted.streams).insert(arrival, stream);
                accepted.changed.notify_all();
            }
        })?;
        Ok(Hub { identity, door, arrivals, addresses: OnceLock::new() })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.door.address
    }

    /// Opens the connections to all `members` and returns them in the order of `members`, with `None` for this rank.
    pub(crate) fn mesh(
        &self,
        group: u64,
        purpose: Purpose,
        members: &[usize],
        deadline: Instant,
    ) -> Result<Vec<Option<TcpStream>>, CommError> {
        let own = self.identity.rank;
        let mut streams: Vec<Option<TcpStream>> = members.iter().map(|_| None).collect();
        // Open the outgoing connections first, then wait for the incoming ones. Otherwise ranks could wait for each
        // other in a cycle.
        for (stream, member) in streams.iter_mut().zip(members).filter(|(_, member)| **member < own) {
            *stream = Some(self.open(group, purpose, *member, deadline)?);
        }
        for (stream, member) in streams.iter_mut().zip(members).filter(|(_, member)| **member > own) {
            *stream = Some(self.accept(group, purpose, *member, deadline)?);
        }
        Ok(streams)
    }

    fn open(&self, group: u64, purpose: Purpose, peer: usize, deadline: Instant) -> Result<TcpStream, CommError> {
        let Identity { job, attempt, rank, ref key } = self.identity;
        let address = self.addresses.get().map(|addresses| addresses[peer]);
        let Some(address) = address else {
            return Err(CommError::Io { rank, detail: format!("the address of rank {peer} is unknown") });
        };
        let mut hello = [0; auth::HELLO_BYTES];
        hello[0..8].copy_from_slice(&job.to_le_bytes());
        hello[8..12].copy_from_slice(&attempt.to_le_bytes());
        hello[12..16].copy_from_slice(&(peer as u32).to_le_bytes());
        hello[16..24].copy_from_slice(&group.to_le_bytes());
        hello[24..28].copy_from_slice(&(purpose as u32).to_le_bytes());
        hello[28..32].copy_from_slice(&(rank as u32).to_le_bytes());
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let tried = TcpStream::connect_timeout(&address, left.max(Duration::from_millis(1)))
                .map_err(Refusal::Io)
                .and_then(|mut stream| {
                    stream.set_nodelay(true)?;
                    auth::prove(&mut stream, key, &hello)?;
                    Ok(stream)
                });
            let rendezvous = |detail: String| CommError::Rendezvous { rank, address: address.to_string(), detail };
            match tried {
                Ok(stream) => return Ok(stream),
                // The peer may have refused the connection because it has too many unauthenticated connections at the
                // moment.
                Err(Refusal::Io(_)) if Instant::now() + RETRY < deadline => std::thread::sleep(RETRY),
                Err(Refusal::Io(error)) => return Err(rendezvous(format!("rank {peer}: {error}"))),
                Err(Refusal::Protocol) => {
                    return Err(rendezvous(format!(
                        "the process at this address is not a zero-train rank; expected rank {peer}"
                    )));
                }
                Err(Refusal::Verdict(OTHER_ATTEMPT)) => {
                    let detail =
                        format!("rank {peer} belongs to another attempt of the job; this is attempt {attempt}");
                    return Err(rendezvous(detail));
                }
                Err(Refusal::Verdict(_)) => {
                    return Err(rendezvous(format!("the process at this address is not rank {peer} of this job")));
                }
                Err(Refusal::Proof) => {
                    let detail = format!("rank {peer} and rank {rank} have different job tokens");
                    return Err(CommError::Unauthorized { address: address.to_string(), detail });
                }
            }
        }
    }

    fn accept(&self, group: u64, purpose: Purpose, peer: usize, deadline: Instant) -> Result<TcpStream, CommError> {
        let arrival = (group, purpose as u32, peer as u32);
        let mut streams = lock(&self.arrivals.streams);
        loop {
            if let Some(stream) = streams.remove(&arrival) {
                return Ok(stream);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let detail = format!("rank {peer} did not connect in time");
                return Err(CommError::Rendezvous {
                    rank: self.identity.rank,
                    address: self.address().to_string(),
                    detail,
                });
            }
            streams = self.arrivals.changed.wait_timeout(streams, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

const RETRY: Duration = Duration::from_millis(20);

fn judge(hello: &Hello, ours: &Identity) -> u8 {
    match () {
        () if word(hello, 0) != ours.job => OTHER_JOB,
        () if half_word(hello, 8) != ours.attempt => OTHER_ATTEMPT,
        () if half_word(hello, 12) as usize != ours.rank => OTHER_RANK,
        () => WELCOME,
    }
}

fn word(hello: &Hello, at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| hello[at + i]))
}

fn half_word(hello: &Hello, at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| hello[at + i]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(rank: usize, attempt: u32, token: &str) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        Hub::listen(listener, Identity { job: 7, attempt, rank, key: Key::new(Some(token)) }).expect("a hub")
    }

    /// Connects rank 1, with the given attempt and token, to rank 0, which has attempt 2 and the token `token`.
    fn meet(attempt: u32, token: &str) -> Result<TcpStream, CommError> {
        let (first, second) = (hub(0, 2, "token"), hub(1, attempt, token));
        let addresses = vec![first.address(), second.address()];
        second.addresses.get_or_init(|| addresses);
        second.open(5, Purpose::Messages, 0, Instant::now() + Duration::from_secs(10))
    }

    #[test]
    fn ranks_of_another_attempt_or_token_do_not_connect() {
        assert!(meet(2, "token").is_ok());
        let error = meet(3, "token").expect_err("another attempt").to_string();
        assert!(error.contains("another attempt") && error.contains("this is attempt 3"), "{error}");
        assert!(matches!(meet(2, "guess"), Err(CommError::Unauthorized { .. })));
    }

    #[test]
    fn connections_are_matched_by_group_and_purpose() {
        let (first, second) = (hub(0, 0, "t"), hub(1, 0, "t"));
        let addresses = vec![first.address(), second.address()];
        first.addresses.get_or_init(|| addresses.clone());
        second.addresses.get_or_init(|| addresses);
        let deadline = Instant::now() + Duration::from_secs(10);
        let wanted = [(1, Purpose::Messages), (1, Purpose::Collectives), (2, Purpose::Messages)];
        let opened = wanted.map(|(group, purpose)| second.open(group, purpose, 0, deadline).expect("opened"));
        for index in [2, 0, 1] {
            let (group, purpose) = wanted[index];
            let accepted = first.accept(group, purpose, 1, deadline).expect("accepted");
            assert_eq!(accepted.peer_addr().ok(), opened[index].local_addr().ok());
        }
        let late = first.accept(9, Purpose::Control, 1, Instant::now()).expect_err("no rank connects");
        assert!(late.to_string().contains("rank 1 did not connect in time"), "{late}");
    }
}
