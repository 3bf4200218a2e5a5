//! Counts the rounds of operations over streams, which determine how long small operations take. Each wait of the
//! slowest rank for data that a peer can send only after a wait of its own adds a round.
//!
//! Data that is sent in one round arrives in the next, which begins when no rank can continue.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::message::{End, StreamInbox, StreamOutbox};
use super::{Broken, Exchange, Wait, Wires};
use crate::buffers::dtype::Dtype;
use crate::buffers::ranges::consecutive;
use crate::collective::deadline::Deadline;
use crate::collective::parts::{Counts, Parts};
use crate::collective::reduction::ReduceOp;
use crate::collective::signature::{Operation, Signature};
use crate::collective::step::{Collective, Inbox, Membership, Outbox, Step, Vector};
use crate::health::{Board, Health};
use crate::hierarchy::Hierarchy;
use crate::inquiry::{Topic, Waiters};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Streams between the ranks of a job.
#[derive(Default)]
struct Network {
    state: Mutex<State>,
    changed: Condvar,
}

/// Chunks in flight, each with the round in which it was sent.
type Stream = VecDeque<(usize, Vec<u8>)>;

#[derive(Default)]
struct State {
    round: usize,
    /// Number of ranks that have not completed their operation, and number of those that wait for the next round.
    running: usize,
    waiting: usize,
    /// Keys are (lane, sender, receiver), in global ranks.
    streams: HashMap<(u64, usize, usize), Stream>,
}

impl Network {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the next round if no rank can continue.
    fn begin_round(&self, state: &mut State) {
        if state.waiting == state.running {
            (state.round, state.waiting) = (state.round + 1, 0);
            self.changed.notify_all();
        }
    }
}

/// A rank's end of the streams of a lane.
struct StreamEnd {
    network: Arc<Network>,
    membership: Membership,
    /// By peer, the chunk that is being received.
    arriving: HashMap<usize, Vec<u8>>,
}

impl StreamEnd {
    /// Returns the key of the stream from one rank of the group to another.
    fn key(&self, from: usize, to: usize) -> (u64, usize, usize) {
        (self.membership.group, self.membership.members[from], self.membership.members[to])
    }
}

impl Wires for StreamEnd {
    fn chunk(&self) -> usize {
        1024
    }

    fn push(&mut self, peer: usize, bytes: &[u8]) -> Result<usize, Broken> {
        let mut state = self.network.lock();
        let sent = (state.round, bytes.to_vec());
        state.streams.entry(self.key(self.membership.rank, peer)).or_default().push_back(sent);
        Ok(bytes.len())
    }

    fn pull(&mut self, peer: usize, into: &mut [u8]) -> Result<usize, Broken> {
        if !self.arrived(peer, into.len())? {
            return Ok(0);
        }
        into.copy_from_slice(self.view(peer, into.len()));
        self.consume(peer);
        Ok(into.len())
    }

    fn arrived(&mut self, peer: usize, _length: usize) -> Result<bool, Broken> {
        if self.arriving.contains_key(&peer) {
            return Ok(true);
        }
        let mut state = self.network.lock();
        let round = state.round;
        let stream = state.streams.entry(self.key(peer, self.membership.rank)).or_default();
        let next = stream.pop_front_if(|(sent, _)| *sent < round);
        Ok(next.map(|(_, chunk)| self.arriving.insert(peer, chunk)).is_some())
    }

    fn view(&self, peer: usize, length: usize) -> &[u8] {
        &self.arriving[&peer][..length]
    }

    fn consume(&mut self, peer: usize) {
        self.arriving.remove(&peer);
    }

    fn is_taken(&self, _peer: usize) -> bool {
        false
    }

    fn is_network(&self) -> bool {
        true
    }

    fn mark(&self) -> u32 {
        0
    }

    fn wait(&mut self, _mark: u32, _waits: &[Wait], _limit: Duration) {
        let mut state = self.network.lock();
        let round = state.round;
        state.waiting += 1;
        self.network.begin_round(&mut state);
        drop(self.network.changed.wait_while(state, |state| state.round == round));
    }
}

/// A rank of a job.
struct Rank {
    network: Arc<Network>,
    health: Arc<Health>,
    waiters: Arc<Waiters>,
    rank: usize,
}

/// A rank no longer takes part once it has completed its operation or panicked.
impl Drop for Rank {
    fn drop(&mut self) {
        let mut state = self.network.lock();
        state.running -= 1;
        if state.running > 0 {
            self.network.begin_round(&mut state);
        }
    }
}

impl Rank {
    /// Returns this rank's end of a group's streams: wires, membership and topic. `members` includes this rank.
    fn lane(&self, group: u64, members: &[usize]) -> (Box<StreamEnd>, Membership, Topic) {
        let own = members.iter().position(|member| *member == self.rank).expect("a member");
        let membership = || Membership::new(group, own, members.to_vec());
        let wires =
            StreamEnd { network: Arc::clone(&self.network), membership: membership(), arriving: HashMap::new() };
        (Box::new(wires), membership(), Topic::collectives(group, &self.waiters))
    }

    fn group(&self, group: u64, members: &[usize]) -> Box<Exchange> {
        let (wires, membership, topic) = self.lane(group, members);
        Box::new(Exchange { wires, neighbours: None, membership, health: Arc::clone(&self.health), topic, job: (1, 0) })
    }

    fn messages(&self, group: u64, peer: usize) -> End {
        let members = [self.rank.min(peer), self.rank.max(peer)];
        let (wires, membership, topic) = self.lane(group, &members);
        let peer = 1 - membership.rank;
        End { wires, neighbours: None, membership, health: Arc::clone(&self.health), topic, job: (1, 0), peer }
    }
}

/// Returns the number of rounds after which each rank has completed `operation`.
fn rounds(size: usize, operation: impl Fn(&Rank) + Sync) -> Vec<usize> {
    let network = Arc::new(Network::default());
    network.lock().running = size;
    let board = Board::new(size);
    std::thread::scope(|scope| {
        let start = |rank: usize| {
            let health = Health::new(rank, Arc::clone(&board), Arc::default(), None);
            let (network, waiters) = (Arc::clone(&network), Arc::default());
            let (rank, operation) = (Rank { network, health, waiters, rank }, &operation);
            scope.spawn(move || {
                let _seat = Arc::clone(&rank.waiters).enter();
                operation(&rank);
                // The health stays, because dropping it tells the other ranks that this rank has left.
                (rank.network.lock().round, Arc::clone(&rank.health))
            })
        };
        let ranks: Vec<_> = (0..size).map(start).collect();
        let ended: Vec<_> = ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect();
        ended.into_iter().map(|(round, _)| round).collect()
    })
}

fn signature(operation: Operation, length: usize) -> Signature {
    let (dtype, length) = (Some(Dtype::U8), length as u64);
    Signature { operation, sequence: 0, vectors: 1, dtype, length, reduce: None, layout: 0, on_device: false }
}

/// Runs a collective of `size` ranks on a vector with `part` bytes for each of them.
fn run(collective: &mut dyn Collective, size: usize, (reduce, gather): (Option<ReduceOp>, bool), part: usize) {
    let mut buffer = vec![1; size * part];
    let signature = Signature { reduce, ..signature(Operation::AllReduce, buffer.len()) };
    let vectors = vec![Vector::new(Dtype::U8, &mut buffer, consecutive(vec![part; size], 1))];
    collective.run(Step { signature, reduce, vectors, gather, deadline: Deadline::after(TIMEOUT) }).expect("completed");
}

fn exchange(collective: &mut dyn Collective, size: usize) {
    let (part, counts) = (1500, vec![1500; size]);
    let (input, mut output) = (vec![1; size * part], vec![0; size * part]);
    let signature = signature(Operation::AllToAll, input.len());
    let pairs = Counts { send: counts.clone(), receive: counts }.pairs(1);
    let deadline = Deadline::after(TIMEOUT);
    collective.exchange(Parts { signature, input: &input, output: &mut output, pairs, deadline }).expect("completed");
    assert_eq!(input, output);
}

const GATHER: (Option<ReduceOp>, bool) = (None, true);
const SCATTER: (Option<ReduceOp>, bool) = (Some(ReduceOp::Sum), false);
const ALL_REDUCE: (Option<ReduceOp>, bool) = (Some(ReduceOp::Sum), true);

/// Headers travel ahead of the data, and no rank waits for a header before it sends data. Each operation therefore
/// takes as few rounds as its results allow: one, or two if every rank needs data that another rank has reduced.
#[test]
fn no_round_is_spent_on_headers() {
    for size in [2, 3, 4] {
        let all: Vec<usize> = (0..size).collect();
        for part in [1, 1500] {
            for (phases, expected) in [(GATHER, 1), (SCATTER, 1), (ALL_REDUCE, 2)] {
                let found = rounds(size, |rank| run(&mut *rank.group(5, &all), size, phases, part));
                assert_eq!(found, vec![expected; size], "{phases:?} of {part} bytes");
            }
        }
        assert_eq!(rounds(size, |rank| exchange(&mut *rank.group(5, &all), size)), vec![1; size]);
    }
    let message = |rank: &Rank| {
        let (mut bytes, end) = (vec![1; 1500], rank.messages(5, 1 - rank.rank));
        let (signature, deadline) = (signature(Operation::Send, bytes.len()), Deadline::after(TIMEOUT));
        match rank.rank {
            0 => drop(StreamOutbox(end).send(&signature, &bytes, deadline).expect("sent")),
            _ => StreamInbox(end).recv(&signature, &mut bytes, deadline).expect("received"),
        }
    };
    assert_eq!(rounds(2, message), [0, 1]);
}

/// In a tree of 17 ranks, data crosses at most four connections on its way to the root, and at most four on its way
/// back.
#[test]
fn a_tree_takes_a_round_for_each_level() {
    let all: Vec<usize> = (0..17).collect();
    for phases in [GATHER, ALL_REDUCE] {
        let found = rounds(17, |rank| run(&mut *rank.group(5, &all), 17, phases, 1));
        assert_eq!((found[0], found.iter().max()), (4, Some(&8)), "{phases:?}");
    }
}

/// Four ranks on two hosts: the ranks of a host communicate over its memory, and those of different hosts over the
/// network. Operations take additional rounds only within a host.
#[test]
fn hosts_add_rounds_within_them() {
    let hosts = |rank: &Rank| {
        let host = rank.rank / 2;
        let cell = rank.group(10 + host as u64, &[2 * host, 2 * host + 1]);
        Hierarchy::new(vec![0..2, 2..4], cell, *rank.group(20, &[0, 1, 2, 3]))
    };
    for (phases, expected) in [(GATHER, 3), (SCATTER, 3), (ALL_REDUCE, 4)] {
        assert_eq!(rounds(4, |rank| run(&mut hosts(rank), 4, phases, 1500)), [expected; 4], "{phases:?}");
    }
    assert_eq!(rounds(4, |rank| exchange(&mut hosts(rank), 4)), [2; 4]);
}
