//! Tests that the other ranks blame a rank that stops in the middle of a collective, wherever it stops, but not a rank
//! that is only slow.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{Broken, Exchange, Wait, Wires};
use crate::buffers::dtype::Dtype;
use crate::buffers::ranges::{consecutive, even_counts};
use crate::collective::deadline::Deadline;
use crate::collective::parts::{Counts, Parts};
use crate::collective::reduction::ReduceOp;
use crate::collective::signature::{Operation, Signature};
use crate::collective::step::{Collective, Membership, Step, Vector};
use crate::health::{Announce, Board, Cause, Failure, Health};
use crate::inquiry::{Topic, WaitRegistry, Waiters};

const SIZE: usize = 3;
const CHUNK: usize = 16;
const CHUNKS: usize = 2;
const TIMEOUT: Duration = Duration::from_secs(1);

/// Chunks in flight from one rank to another.
type Stream = VecDeque<Vec<u8>>;

/// The ranks of a scene.
#[derive(Clone, Copy)]
struct Cast {
    size: usize,
    /// The rank that stops.
    stopped: usize,
    chunk: usize,
    is_network: bool,
    /// Shortest time between two chunks that the stopping rank sends.
    pause: Duration,
}

const FEW: Cast = Cast { size: SIZE, stopped: 2, chunk: CHUNK, is_network: false, pause: Duration::ZERO };

/// In-memory streams between ranks, one of which stops after it has sent a number of chunks.
struct Scene {
    cast: Cast,
    /// Keys are pairs (sender, receiver).
    streams: Mutex<HashMap<(usize, usize), Stream>>,
    registries: Vec<Arc<WaitRegistry>>,
    /// Number of chunks that the stopping rank still sends.
    left: AtomicUsize,
    /// When the stopping rank last sent a chunk.
    sent: Mutex<Option<Instant>>,
}

impl Scene {
    fn new(cast: Cast, left: usize) -> Arc<Scene> {
        let registries = (0..cast.size).map(|_| Arc::default()).collect();
        let (streams, left, sent) = (Mutex::default(), AtomicUsize::new(left), Mutex::default());
        Arc::new(Scene { cast, streams, registries, left, sent })
    }

    /// Runs collectives on all ranks, until one fails. Returns each rank's result.
    fn play(self: &Arc<Scene>, times: u64, collective: Run) -> Vec<Result<(), Failure>> {
        let start = |rank| {
            let scene = Arc::clone(self);
            std::thread::spawn(move || scene.run(rank, times, collective))
        };
        let ranks: Vec<_> = (0..self.cast.size).map(start).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    }

    fn has_stopped(&self, rank: usize) -> bool {
        rank == self.cast.stopped && self.left.load(Ordering::SeqCst) == 0
    }

    /// Runs `times` collectives on one rank, until one fails.
    fn run(self: &Arc<Scene>, rank: usize, times: u64, collective: Run) -> Result<(), Failure> {
        let membership = Membership::new(5, rank, (0..self.cast.size).collect());
        let end = || End { scene: Arc::clone(self), rank };
        let registry = Arc::clone(&self.registries[rank]);
        let health = Health::new(rank, Board::new(self.cast.size), registry, Some(Box::new(end())));
        let waiters = Arc::<Waiters>::default();
        let topic = Topic::collectives(5, &waiters);
        let _seat = waiters.enter();
        let wires = Box::new(end());
        let mut exchange = Exchange { wires, neighbours: None, membership, health, topic, job: (1, 0) };
        (0..times).try_for_each(|sequence| collective(&mut exchange, rank, sequence))
    }
}

/// Runs a collective on one rank, given its sequence number.
type Run = fn(&mut Exchange, usize, u64) -> Result<(), Failure>;

fn reduce(exchange: &mut Exchange, _rank: usize, sequence: u64) -> Result<(), Failure> {
    reduce_all(exchange, sequence, &[CHUNKS])
}

/// Reduces the same number of chunks as `reduce`, divided among several vectors.
fn reduce_coalesced(exchange: &mut Exchange, _rank: usize, sequence: u64) -> Result<(), Failure> {
    reduce_all(exchange, sequence, &[1, 0, CHUNKS - 1])
}

/// Reduces several vectors. Each rank owns `chunks[i]` chunks of vector `i`.
fn reduce_all(exchange: &mut Exchange, sequence: u64, chunks: &[usize]) -> Result<(), Failure> {
    let mut buffers: Vec<Vec<u8>> = chunks.iter().map(|chunks| vec![1; SIZE * chunks * CHUNK]).collect();
    let reduce = Some(ReduceOp::Sum);
    let length = SIZE * CHUNKS * CHUNK;
    let signature = Signature { reduce, ..signature(Operation::AllReduce, sequence, length) };
    let vectors = buffers.iter_mut().zip(chunks);
    let vectors = vectors
        .map(|(buffer, chunks)| Vector::new(Dtype::U8, buffer, consecutive([chunks * CHUNK; SIZE], 1)))
        .collect();
    let deadline = Deadline::after(TIMEOUT);
    exchange.run(Step { signature, reduce, vectors, gather: true, deadline })?;
    assert!(buffers.iter().flatten().all(|sum| usize::from(*sum) == SIZE));
    Ok(())
}

/// Reduces a few bytes over a tree of many ranks.
fn reduce_small(exchange: &mut Exchange, _rank: usize, sequence: u64) -> Result<(), Failure> {
    let mut buffer = [1; 5];
    let signature = Signature { reduce: Some(ReduceOp::Sum), ..signature(Operation::AllReduce, sequence, 5) };
    let ranges = consecutive(even_counts(buffer.len(), MANY), 1);
    let vectors = vec![Vector::new(Dtype::U8, &mut buffer, ranges)];
    let deadline = Deadline::after(TIMEOUT);
    exchange.run(Step { signature, reduce: Some(ReduceOp::Sum), vectors, gather: true, deadline })?;
    assert!(buffer.iter().all(|sum| usize::from(*sum) == MANY));
    Ok(())
}

const MANY: usize = 17;

fn exchange_parts(exchange: &mut Exchange, rank: usize, sequence: u64) -> Result<(), Failure> {
    let counts = Counts { send: vec![PART; SIZE], receive: vec![PART; SIZE] };
    let input = [rank as u8; SIZE * PART];
    let mut output = [9; SIZE * PART];
    let signature = signature(Operation::AllToAll, sequence, input.len());
    let (pairs, deadline) = (counts.pairs(1), Deadline::after(TIMEOUT));
    exchange.exchange(Parts { signature, input: &input, output: &mut output, pairs, deadline })?;
    assert!(output.chunks(PART).enumerate().all(|(from, part)| part.iter().all(|value| usize::from(*value) == from)));
    Ok(())
}

/// Number of bytes of a part: not a whole number of chunks, so the last chunk is shorter.
const PART: usize = 2 * CHUNKS * CHUNK - 1;

fn signature(operation: Operation, sequence: u64, length: usize) -> Signature {
    let (dtype, length) = (Some(Dtype::U8), length as u64);
    Signature { operation, sequence, vectors: 1, dtype, length, reduce: None, layout: 0, on_device: false }
}

struct End {
    scene: Arc<Scene>,
    rank: usize,
}

impl End {
    fn stream<T>(&self, from: usize, to: usize, use_it: impl FnOnce(&mut Stream) -> T) -> T {
        let mut streams = self.scene.streams.lock().unwrap_or_else(PoisonError::into_inner);
        use_it(streams.entry((from, to)).or_default())
    }
}

impl Wires for End {
    fn chunk(&self) -> usize {
        self.scene.cast.chunk
    }

    fn push(&mut self, peer: usize, bytes: &[u8]) -> Result<usize, Broken> {
        let full = self.stream(self.rank, peer, |stream| stream.len() == 4);
        if full || self.scene.has_stopped(self.rank) {
            return Ok(0);
        }
        if self.rank == self.scene.cast.stopped {
            let mut sent = self.scene.sent.lock().unwrap_or_else(PoisonError::into_inner);
            if sent.is_some_and(|sent| sent.elapsed() < self.scene.cast.pause) {
                return Ok(0);
            }
            *sent = Some(Instant::now());
            self.scene.left.fetch_sub(1, Ordering::SeqCst);
        }
        self.stream(self.rank, peer, |stream| stream.push_back(bytes.to_vec()));
        Ok(bytes.len())
    }

    fn pull(&mut self, peer: usize, into: &mut [u8]) -> Result<usize, Broken> {
        if !self.arrived(peer, into.len())? {
            return Ok(0);
        }
        into.copy_from_slice(&self.stream(peer, self.rank, |stream| stream.pop_front()).unwrap_or_default());
        Ok(into.len())
    }

    fn arrived(&mut self, peer: usize, _length: usize) -> Result<bool, Broken> {
        Ok(!self.scene.has_stopped(self.rank) && self.stream(peer, self.rank, |stream| !stream.is_empty()))
    }

    fn view(&self, peer: usize, length: usize) -> &[u8] {
        // All values are 1.
        assert_eq!(self.stream(peer, self.rank, |stream| stream.front().cloned()), Some(vec![1; length]));
        &[1; CHUNK][..length]
    }

    fn consume(&mut self, peer: usize) {
        self.stream(peer, self.rank, |stream| stream.pop_front());
    }

    fn is_taken(&self, peer: usize) -> bool {
        self.stream(self.rank, peer, |stream| stream.is_empty())
    }

    fn is_network(&self) -> bool {
        self.scene.cast.is_network
    }

    fn mark(&self) -> u32 {
        0
    }

    fn wait(&mut self, _mark: u32, _waits: &[Wait], _limit: Duration) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Announce for End {
    /// Does nothing, so that every rank must detect the failure by itself.
    fn announce(&self, _cause: &Cause) {}

    fn ask(&self, peer: usize, topic: u64) {
        if !self.scene.has_stopped(peer) {
            self.scene.registries[self.rank].answered(topic, peer, self.scene.registries[peer].wait_state(topic));
        }
    }
}

/// Runs two collectives for each number of chunks below `whole`. In each run, one rank stops after it has sent that
/// number of chunks.
fn stop_everywhere(cast: Cast, collective: Run, whole: usize) {
    std::thread::scope(|scope| {
        for left in 0..whole {
            scope.spawn(move || {
                let outcomes = Scene::new(cast, left).play(2, collective);
                let named = |outcome: &Result<(), Failure>| match outcome {
                    Ok(()) => None,
                    Err(Failure::Deadline { peer }) => Some(*peer),
                    Err(Failure::Cause(cause)) => panic!("{cause:?}"),
                };
                let others = outcomes.iter().enumerate().filter(|(rank, _)| *rank != cast.stopped);
                let named: Vec<usize> = others.filter_map(|(_, outcome)| named(outcome)).collect();
                assert!(!named.is_empty() && named.iter().all(|rank| *rank == cast.stopped), "{named:?}");
            });
        }
    });
}

#[test]
fn the_rank_that_stopped_is_named_wherever_it_stops() {
    // In each of two collectives, the rank sends two headers. To each of two peers, it sends the peer's chunks for
    // the reduction and its own reduced chunks.
    stop_everywhere(FEW, reduce, 2 * (2 + 2 * 2 * CHUNKS));
    stop_everywhere(FEW, reduce_coalesced, 2 * (2 + 2 * 2 * CHUNKS));
    // In each of two collectives, the rank sends two headers, and one part to each of two peers.
    stop_everywhere(FEW, exchange_parts, 2 * (2 + 2 * 2 * CHUNKS));
}

#[test]
fn the_rank_that_stopped_is_named_in_a_tree_of_ranks() {
    // In each of two collectives, the rank sends a header to each neighbour in the tree, its contribution to its
    // parent, and the result to each child. The sums list the chunks in this order.
    for (stopped, chunks) in [(0, 5 + 5), (12, 3 + 1 + 2), (13, 1 + 1)] {
        let cast = Cast { size: MANY, stopped, chunk: 4096, is_network: true, ..FEW };
        stop_everywhere(cast, reduce_small, 2 * chunks);
    }
}

/// The slow rank sends ten chunks, so the collective takes longer than the timeout, but data moves all the time.
#[test]
fn a_slow_rank_is_not_blamed() {
    let slow = Cast { pause: TIMEOUT.mul_f64(0.15), ..FEW };
    for collective in [reduce as Run, exchange_parts] {
        for outcome in Scene::new(slow, usize::MAX).play(1, collective) {
            assert!(outcome.is_ok(), "{outcome:?}");
        }
    }
}
