//! Collectives between threads: every rank posts its buffers, reads the buffers of the others, and leaves when all
//! ranks have finished reading.
//!
//! A collective has up to three phases with a barrier after each. *Post*: the buffers are posted and the signatures
//! compared. *Reduce*: the owner of a range combines the values that all buffers have there; in this phase, no other
//! rank reads or writes that range. *Gather*: every rank copies the other ranges from their owners. Because of the
//! barriers, no range of a buffer is both written and read in the same phase.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use super::Room;
use crate::bell::{Bell, spin_time};
use crate::buffers::copy::copy;
use crate::buffers::dtype::Dtype;
use crate::collective::carried::Carried;
use crate::collective::deadline::Deadline;
use crate::collective::parts::{Pair, Parts};
use crate::collective::reduction::{ReduceOp, Reduction};
use crate::collective::signature::Signature;
use crate::collective::step::{Collective, Membership, Step, Vector};
use crate::health::{Cause, Failure, Health, SLICE};
use crate::inquiry::{Inquest, Topic};
use crate::tree;

pub(super) struct Meeting {
    seats: Vec<Seat>,
    /// Arrivals of all ranks at all barriers so far.
    arrivals: AtomicU64,
    bell: Bell,
}

#[derive(Default)]
struct Seat {
    post: RwLock<Option<Post>>,
    /// Number of barriers that this rank has reached.
    phase: AtomicU64,
}

/// The buffers that a rank offers for an operation. Other ranks may read them while they hold the lock of this rank's
/// seat.
#[derive(Clone)]
struct Post {
    signature: Signature,
    /// One for each vector of a collective, or the input of an all_to_all.
    buffers: Arc<[Posted]>,
    /// For an all_to_all, the data that the rank exchanges with each rank.
    pairs: Option<Arc<[Option<Pair>]>>,
}

/// A buffer of a post.
struct Posted {
    bytes: *mut u8,
    length: usize,
}

// SAFETY: readers hold the read lock of the seat, and the owner withdraws the post under the write lock before it frees
// the buffer. The phases keep writes and reads of one range apart.
unsafe impl Send for Posted {}
// SAFETY: the conditions above hold for every access to the buffer; sharing a post only copies the pointer.
unsafe impl Sync for Posted {}

impl Post {
    /// Returns the data that the rank of this post exchanges with rank `rank`; `None` unless the post is for an
    /// all_to_all.
    fn pair(&self, rank: usize) -> Option<&Pair> {
        self.pairs.as_ref()?.get(rank)?.as_ref()
    }

    /// Returns the signature of this post as rank `rank` sees it.
    fn signature(&self, rank: usize) -> Signature {
        self.pair(rank).map_or(self.signature, |pair| pair.signature(&self.signature))
    }
}

impl Posted {
    /// Returns a shared slice of the range.
    ///
    /// # Safety
    /// The caller must hold the lock of the post, and no rank may write to the range in this phase.
    unsafe fn read<'a>(&'a self, range: &Range<usize>) -> &'a [u8] {
        assert!(range.end <= self.length);
        // SAFETY: in bounds of a live buffer; the caller guarantees the absence of writes.
        unsafe { std::slice::from_raw_parts(self.bytes.add(range.start), range.len()) }
    }

    /// Returns a mutable slice of the range.
    ///
    /// # Safety
    /// The conditions of `read` apply. In addition, no other rank may read the range in this phase, and two such slices
    /// must not overlap.
    #[allow(clippy::mut_from_ref)]
    unsafe fn write<'a>(&'a self, range: &Range<usize>) -> &'a mut [u8] {
        assert!(range.end <= self.length);
        // SAFETY: in bounds of a live buffer; the caller guarantees exclusive access.
        unsafe { std::slice::from_raw_parts_mut(self.bytes.add(range.start), range.len()) }
    }
}

impl Meeting {
    pub(super) fn new(size: usize) -> Meeting {
        Meeting {
            seats: (0..size).map(|_| Seat::default()).collect(),
            arrivals: AtomicU64::new(0),
            bell: Bell::default(),
        }
    }
}

/// One rank's place in the collectives of its group.
pub(super) struct Participant {
    room: Arc<Room>,
    membership: Membership,
    health: Arc<Health>,
    topic: Topic,
    spin: Duration,
    timeout: Duration,
    /// Number of barriers reached.
    phase: u64,
}

impl Participant {
    pub(super) fn new(
        room: Arc<Room>,
        membership: Membership,
        health: Arc<Health>,
        topic: Topic,
        timeout: Duration,
    ) -> Participant {
        let spin = spin_time(health.board.ranks());
        Participant { room, membership, health, topic, spin, timeout, phase: 0 }
    }

    fn barrier(&mut self, inquest: &mut Inquest<'_>) -> Result<(), Failure> {
        let meeting = &self.room.meeting;
        let size = self.membership.size() as u64;
        self.phase += 1;
        meeting.seats[self.membership.rank].phase.store(self.phase, Ordering::SeqCst);
        if meeting.arrivals.fetch_add(1, Ordering::SeqCst) + 1 == size * self.phase {
            meeting.bell.ring();
            return Ok(());
        }
        loop {
            let mark = meeting.bell.mark();
            if meeting.arrivals.load(Ordering::SeqCst) >= size * self.phase {
                return Ok(());
            }
            self.health.check()?;
            let missing = self.missing();
            if let Some(peer) = missing.iter().copied().find(|peer| self.health.board.has_left(*peer)) {
                // Check the seat again now that the peer is known to have left. A rank that leaves in an orderly way
                // first reaches the barrier. If its seat is still behind, the peer is lost.
                if self.missing().contains(&peer) {
                    let detail = "it dropped its communicator".to_string();
                    return Err(Cause::Lost { peer, detail }.into());
                }
            } else if !missing.is_empty() {
                inquest.pursue(&missing);
                if let Some(peer) = inquest.verdict(&missing) {
                    return Err(Failure::Deadline { peer });
                }
            }
            meeting.bell.wait(mark, self.spin, SLICE);
        }
    }

    /// Returns the global ranks that have not reached the current barrier.
    fn missing(&self) -> Vec<usize> {
        let seats = self.room.meeting.seats.iter().zip(&self.membership.members);
        let late = seats.filter(|(seat, _)| seat.phase.load(Ordering::SeqCst) < self.phase);
        late.map(|(_, member)| *member).collect()
    }

    /// Locks the posts of all ranks for reading. Every rank locks in rank order, so readers cannot deadlock with owners
    /// that withdraw their posts.
    fn posts(&self) -> Result<Vec<Locked<'_>>, Failure> {
        (0..self.membership.size()).map(|rank| self.post(rank)).collect()
    }

    fn post(&self, rank: usize) -> Result<Locked<'_>, Failure> {
        let guard = self.room.meeting.seats[rank].post.read().unwrap_or_else(PoisonError::into_inner);
        match &*guard {
            Some(post) => Ok(Locked { post: post.clone(), _guard: guard }),
            // The owner has failed and withdrawn its post; the board has the cause.
            None => Err(self.health.check().err().unwrap_or(Failure::Deadline { peer: self.membership.members[rank] })),
        }
    }

    fn withdraw(&self) {
        let seat = &self.room.meeting.seats[self.membership.rank];
        *seat.post.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn compare(&self, own: &Post) -> Result<(), Failure> {
        for rank in 0..self.membership.size() {
            let (here, there) = (own.signature(rank), self.post(rank)?.post.signature(self.membership.rank));
            if !here.agrees_with(&there) {
                let peer = self.membership.members[rank];
                let (here, there) = (here.to_string(), there.to_string());
                return Err(Cause::Mismatch { rank: self.health.rank, here, peer, there }.into());
            }
        }
        Ok(())
    }

    /// Combines this rank's range of all buffers.
    fn reduce(&self, op: ReduceOp, parts: &mut [Part<'_>]) -> Result<(), Failure> {
        let Membership { rank, ref weights, .. } = self.membership;
        let posts = self.posts()?;
        for (index, Part { dtype, ranges, shard }) in parts.iter_mut().enumerate() {
            let (reduction, range) = (Reduction { op, dtype: *dtype }, &ranges[rank]);
            let buffers: Vec<&Posted> = posts.iter().map(|locked| &locked.post.buffers[index]).collect();
            for start in range.clone().step_by(BLOCK) {
                let block = start..range.end.min(start + BLOCK);
                let others = (0..buffers.len()).filter(|other| *other != rank);
                // SAFETY: the posts are locked, and in this phase no rank writes to this rank's range in another rank's
                // buffer.
                let peers: Vec<&[u8]> = others.map(|other| unsafe { buffers[other].read(&block) }).collect();
                match shard {
                    None => {
                        // SAFETY: the posts are locked, and in this phase only this rank accesses its range in its own
                        // buffer.
                        tree::reduce(reduction, weights, rank, unsafe { buffers[rank].write(&block) }, &peers);
                    }
                    Some(shard) => {
                        let target = &mut shard[block.start - range.start..block.end - range.start];
                        // SAFETY: as above.
                        let own = unsafe { buffers[rank].read(&block) };
                        tree::reduce_into(reduction, weights, rank, own, &peers, target, range.len());
                    }
                }
            }
        }
        Ok(())
    }

    /// Copies the other ranks' ranges into this rank's buffer.
    fn gather(&self, parts: &[Part<'_>]) -> Result<(), Failure> {
        let rank = self.membership.rank;
        for other in self.membership.peers() {
            if parts.iter().all(|part| part.ranges[other].is_empty()) {
                continue;
            }
            // Lock in rank order, as in `posts`.
            let (low, high) = (self.post(rank.min(other))?, self.post(rank.max(other))?);
            let (own, theirs) = if rank < other { (&low, &high) } else { (&high, &low) };
            let buffers = own.post.buffers.iter().zip(&*theirs.post.buffers);
            for ((own, theirs), range) in buffers.zip(parts.iter().map(|part| &part.ranges[other])) {
                // SAFETY: the posts are locked. In this phase, a rank writes only to its own buffer, and there only to
                // the ranges of other ranks. In another rank's buffer, it reads only the range of that rank.
                unsafe { copy(theirs.read(range), own.write(range), own.length) };
            }
        }
        Ok(())
    }

    /// Copies the parts for this rank from the inputs of the other ranks.
    fn collect(&self, pairs: &[Option<Pair>], output: &mut [u8]) -> Result<(), Failure> {
        let (rank, whole) = (self.membership.rank, output.len());
        for other in self.membership.peers() {
            let theirs = self.post(other)?;
            if let (Some(ours), Some(pair)) = (&pairs[other], theirs.post.pair(rank)) {
                // SAFETY: the post is locked, and no rank writes to an input.
                copy(unsafe { theirs.post.buffers[0].read(&pair.from) }, &mut output[ours.to.clone()], whole);
            }
        }
        Ok(())
    }

    /// Posts the buffers and compares the signatures of the ranks.
    fn meet(&mut self, post: Post, inquest: &mut Inquest<'_>) -> Result<(), Failure> {
        let seat = &self.room.meeting.seats[self.membership.rank];
        *seat.post.write().unwrap_or_else(PoisonError::into_inner) = Some(post.clone());
        self.barrier(inquest)?;
        self.compare(&post)
    }

    fn attempt_exchange(&mut self, post: Post, parts: &mut Parts<'_>) -> Result<(), Failure> {
        let (health, topic) = (Arc::clone(&self.health), self.topic.clone());
        let mut inquest = Inquest::new(&health, &topic, parts.deadline);
        parts.keep(self.membership.rank);
        self.meet(post, &mut inquest)?;
        self.collect(&parts.pairs, parts.output)?;
        // No rank leaves while another reads its input.
        self.barrier(&mut inquest)
    }

    fn attempt(&mut self, mut plan: Plan<'_>, post: Post) -> Result<(), Failure> {
        let (health, topic) = (Arc::clone(&self.health), self.topic.clone());
        let mut inquest = Inquest::new(&health, &topic, plan.deadline);
        self.meet(post, &mut inquest)?;
        if let Some(op) = plan.reduce {
            self.reduce(op, &mut plan.parts)?;
        }
        // A gather alone reads only ranges that no rank writes, so it needs no barrier before it.
        if plan.reduce.is_some() || !plan.gather {
            // No rank leaves while another reads its buffer or compares its post.
            self.barrier(&mut inquest)?;
        }
        if plan.gather {
            self.gather(&plan.parts)?;
            self.barrier(&mut inquest)?;
        }
        Ok(())
    }
}

/// A post and the read lock that protects it.
struct Locked<'a> {
    post: Post,
    _guard: RwLockReadGuard<'a, Option<Post>>,
}

/// The fields of a step, without its buffers.
struct Plan<'a> {
    reduce: Option<ReduceOp>,
    parts: Vec<Part<'a>>,
    gather: bool,
    deadline: Deadline,
}

/// The fields of a vector, without its buffer.
struct Part<'a> {
    dtype: Dtype,
    ranges: Vec<Range<usize>>,
    shard: Option<&'a mut [u8]>,
}

/// Bytes reduced at a time: a multiple of every element size, small enough for the L2 cache.
const BLOCK: usize = 64 * 1024;

impl Collective for Participant {
    fn run(&mut self, step: Step<'_>) -> Result<Carried, Failure> {
        let Step { signature, reduce, vectors, gather, deadline } = step;
        let mut buffers = Vec::with_capacity(vectors.len());
        let mut parts = Vec::with_capacity(vectors.len());
        for mut vector in vectors {
            vector.place_source(self.membership.rank);
            let Vector { dtype, buffer, shard, ranges, .. } = vector;
            buffers.push(Posted { bytes: buffer.as_mut_ptr(), length: buffer.len() });
            parts.push(Part { dtype, ranges, shard });
        }
        let post = Post { signature, buffers: buffers.into(), pairs: None };
        let outcome = self.attempt(Plan { reduce, parts, gather, deadline }, post);
        self.finish(outcome, &signature)
    }

    fn exchange(&mut self, mut parts: Parts<'_>) -> Result<Carried, Failure> {
        let (signature, input, pairs) = (parts.signature, parts.input, Some(Arc::from(&parts.pairs[..])));
        // No rank writes to a posted input.
        let buffers = Arc::new([Posted { bytes: input.as_ptr().cast_mut(), length: input.len() }]);
        let post = Post { signature, buffers, pairs };
        let outcome = self.attempt_exchange(post, &mut parts);
        self.finish(outcome, &signature)
    }
}

impl Participant {
    /// Withdraws the post, so that its buffer may be freed.
    fn finish(&self, outcome: Result<(), Failure>, signature: &Signature) -> Result<Carried, Failure> {
        if let Err(failure) = &outcome {
            // First end the job on the board, so that no rank starts to read. Then withdraw the post, which waits for
            // ranks that are reading.
            let timeout = self.timeout;
            self.health.end_because(failure, signature, timeout);
        }
        self.withdraw();
        outcome.map(|()| Carried::IN_PLACE)
    }
}
