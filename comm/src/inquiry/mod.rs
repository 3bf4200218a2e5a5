//! Determines which rank to blame when an operation reaches its deadline.
//!
//! The peer that a rank waits for may itself wait for a third rank that has stopped. In that case, a rank that blamed
//! the peer whose data is missing would blame the wrong rank. Once half of the timeout has passed, a rank therefore
//! asks the ranks it waits for which ranks they wait for, then asks those, and so on. A rank that does not answer, or
//! waits for no other rank, is to blame. Questions are sent over the control connections. A dedicated thread answers
//! them, so only a process that has stopped entirely does not answer.
//!
//! A rank takes part in several operations of several groups at a time. A question is about one operation. If the asked
//! rank runs that operation, its answer lists the ranks that the operation waits for. Otherwise the rank has not
//! reached that operation, because its threads wait for other operations. The answer then lists the ranks that those
//! operations wait for. A receive for which no thread waits yet does not delay the rank, and its deadline does not run.
//!
//! Data that moves is a sign of life: the timeout starts again. An answer tells how long ago data moved. A rank that
//! waits for a slow transfer between other ranks therefore also starts its timeout again.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::collective::deadline::Deadline;
use crate::collective::signature::digest;
use crate::health::{Health, SLICE};
use crate::lock::lock;

/// Counts the threads of a rank that wait for a lane.
#[derive(Debug, Default)]
pub(crate) struct Waiters(Mutex<Present>);

#[derive(Debug, Default)]
struct Present {
    threads: usize,
    /// When the first of the waiting threads started to wait; `None` if no thread waits.
    since: Option<Instant>,
}

impl Waiters {
    /// Counts the calling thread until the guard is dropped.
    pub(crate) fn enter(self: Arc<Waiters>) -> WaiterGuard {
        let mut present = lock(&self.0);
        present.threads += 1;
        present.since.get_or_insert_with(Instant::now);
        drop(present);
        WaiterGuard(self)
    }

    fn since(&self) -> Option<Instant> {
        lock(&self.0).since
    }
}

/// Counts one waiting thread while it lives.
pub(crate) struct WaiterGuard(Arc<Waiters>);

impl Drop for WaiterGuard {
    fn drop(&mut self) {
        let mut present = lock(&self.0.0);
        present.threads -= 1;
        if present.threads == 0 {
            present.since = None;
        }
    }
}

/// Identifies a lane's work in questions from other ranks.
#[derive(Debug, Clone)]
pub(crate) struct Topic {
    /// Equal on all ranks that take part, and different from every other lane's id.
    id: u64,
    waiters: Arc<Waiters>,
}

impl Topic {
    /// Returns the topic of a group's collectives.
    pub(crate) fn collectives(group: u64, waiters: &Arc<Waiters>) -> Topic {
        Topic { id: group, waiters: Arc::clone(waiters) }
    }

    /// Returns the topic of the messages from one rank of a group to another.
    pub(crate) fn messages(group: u64, from: usize, to: usize, waiters: &Arc<Waiters>) -> Topic {
        Topic { id: digest("messages", &[group as usize, from, to]), waiters: Arc::clone(waiters) }
    }

    /// Counts the calling thread among those that wait for the lane, until the guard is dropped.
    pub(crate) fn enter(&self) -> WaiterGuard {
        Arc::clone(&self.waiters).enter()
    }
}

/// A rank's answer to a question about an operation. Ranks are global ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum WaitState {
    /// The rank waits for other ranks.
    Waiting {
        /// The ranks that it waits for.
        ranks: Vec<usize>,
        /// When data last moved in the operation that the rank runs.
        moved: Option<Instant>,
    },
    /// The rank does not run that operation and waits for no other, or it has not waited for long.
    Elsewhere,
}

/// Records which ranks this rank waits for, and the answers of other ranks.
#[derive(Default)]
pub(crate) struct WaitRegistry {
    /// By topic.
    waiting: Mutex<BTreeMap<u64, Wait>>,
    /// By topic and global rank.
    answers: Mutex<BTreeMap<(u64, usize), (Instant, WaitState)>>,
}

/// The ranks that a lane waits for, and the threads that wait for the lane.
struct Wait {
    ranks: Vec<usize>,
    moved: Option<Instant>,
    waiters: Arc<Waiters>,
    /// Whether the operation was given up while a thread was waiting for it.
    given_up: bool,
}

impl Wait {
    fn keeps_a_thread(&self) -> bool {
        self.given_up || self.waiters.since().is_some()
    }
}

impl WaitRegistry {
    /// Returns this rank's answer to a question about `topic`.
    pub(crate) fn wait_state(&self, topic: u64) -> WaitState {
        let waiting = lock(&self.waiting);
        if let Some(wait) = waiting.get(&topic) {
            return WaitState::Waiting { ranks: wait.ranks.clone(), moved: wait.moved };
        }
        // A rank whose thread waits for one operation is late for all other operations.
        let keeping = || waiting.values().filter(|wait| wait.keeps_a_thread());
        let ranks: BTreeSet<usize> = keeping().flat_map(|wait| &wait.ranks).copied().collect();
        match ranks.is_empty() {
            true => WaitState::Elsewhere,
            false => {
                let moved = keeping().filter_map(|wait| wait.moved).max();
                WaitState::Waiting { ranks: ranks.into_iter().collect(), moved }
            }
        }
    }

    /// Records the answer of a rank.
    pub(crate) fn answered(&self, topic: u64, rank: usize, wait_state: WaitState) {
        lock(&self.answers).insert((topic, rank), (Instant::now(), wait_state));
    }
}

/// One rank's search for the rank that blocks an operation. It exists as long as the operation.
pub(crate) struct Inquest<'a> {
    health: &'a Health,
    topic: &'a Topic,
    begun: Instant,
    deadline: Deadline,
    /// When data last moved.
    moved: Option<Instant>,
    /// When this rank first noticed that the time was up. May be later than the deadline, because the machine may have
    /// been suspended.
    up: Option<Instant>,
    /// How long other ranks may take to answer: a quarter of the timeout.
    patience: Duration,
    /// Whether the registry tells other ranks that this rank waits.
    public: bool,
    /// When each rank was first asked.
    asked: BTreeMap<usize, Instant>,
    /// When this rank last checked the operation.
    looked: Instant,
    /// Whether a rank was blamed.
    closed: bool,
}

/// A waiting rank checks every [`SLICE`]. If it has not checked for this long, the machine was suspended or overloaded.
/// Perhaps the other ranks were not running either.
const STANDSTILL: Duration = SLICE.saturating_mul(4);

impl<'a> Inquest<'a> {
    pub(crate) fn new(health: &'a Health, topic: &'a Topic, deadline: Deadline) -> Inquest<'a> {
        let (begun, patience) = (Instant::now(), deadline.timeout / 4);
        let asked = BTreeMap::new();
        Inquest {
            health,
            topic,
            begun,
            deadline,
            moved: None,
            up: None,
            patience,
            public: false,
            asked,
            looked: begun,
            closed: false,
        }
    }

    /// Records that this rank waits. Once half of the timeout has passed, also asks other ranks. Must be called
    /// regularly.
    pub(crate) fn pursue(&mut self, waits: &[usize]) {
        self.notice_standstill();
        if self.begun.elapsed() < self.patience.min(SLICE) {
            return;
        }
        let (ranks, waiters) = (waits.to_vec(), Arc::clone(&self.topic.waiters));
        let wait = Wait { ranks, moved: self.moved, waiters, given_up: false };
        lock(&self.health.registry.waiting).insert(self.topic.id, wait);
        self.public = true;
        if self.waited().is_none_or(|waited| waited < 2 * self.patience) {
            return;
        }
        for (rank, answer) in self.chain(waits) {
            self.asked.entry(rank).or_insert_with(Instant::now);
            self.health.ask(rank, self.topic.id);
            if let Some(WaitState::Waiting { moved: Some(moved), .. }) = answer {
                self.sign_of_life(moved);
            }
        }
    }

    /// Records that this rank sent or received data.
    pub(crate) fn data_moved(&mut self, when: Instant) {
        self.moved = Some(when);
        self.sign_of_life(when);
    }

    /// Starts the timeout again at the time of a sign of life, unless it has started later. If more than half of the
    /// timeout is then left, the search starts again too. Otherwise the search continues, because answers about the
    /// same data may give slightly different times.
    fn sign_of_life(&mut self, when: Instant) {
        self.deadline.started = self.deadline.started.max(when);
        if when.elapsed() < 2 * self.patience {
            self.asked.clear();
            self.up = None;
        }
    }

    /// Returns how long a thread has waited for this operation; `None` if no thread waits.
    fn waited(&self) -> Option<Duration> {
        Some(self.topic.waiters.since()?.max(self.deadline.started).elapsed())
    }

    /// Returns the remaining time. If no thread waits, the clock stands still and this returns `None`.
    pub(crate) fn left(&self) -> Option<Duration> {
        Some(self.deadline.timeout.saturating_sub(self.waited()?))
    }

    /// Returns the rank to blame once the time is up; `None` before, and while an answer may still arrive.
    pub(crate) fn verdict(&mut self, waits: &[usize]) -> Option<usize> {
        if self.left().is_none_or(|left| !left.is_zero()) {
            return None;
        }
        self.notice_standstill();
        let up = *self.up.get_or_insert_with(Instant::now);
        let chain = self.chain(waits);
        let silent = chain.iter().find(|(_, answer)| answer.is_none());
        // After a standstill, no rank counts as asked.
        let asked = |rank: usize| self.asked.get(&rank).is_some_and(|asked| asked.elapsed() >= self.patience);
        let over = up.elapsed() >= 2 * self.patience;
        if !over && chain.iter().any(|(rank, _)| !asked(*rank)) {
            return None;
        }
        self.closed = true;
        let idle = chain.iter().find(|(_, answer)| *answer == Some(WaitState::Elsewhere));
        silent.or(idle).map(|(rank, _)| *rank).or(waits.first().copied()).or(Some(self.health.rank))
    }

    /// After a standstill, forgets which ranks were asked. They are asked again and get the full time to answer,
    /// because neither an old answer nor a missing one is evidence any more. The time in `up` is moved forward by the
    /// length of the standstill.
    fn notice_standstill(&mut self) {
        let (before, now) = (self.looked, Instant::now());
        self.looked = now;
        if now - before < STANDSTILL {
            return;
        }
        self.asked.clear();
        self.up = self.up.map(|up| (up + (now - before)).min(now));
    }

    /// Returns the ranks that this rank waits for, the ranks that those wait for, and so on, each with its latest
    /// answer.
    fn chain(&self, waits: &[usize]) -> Vec<(usize, Option<WaitState>)> {
        let answers = lock(&self.health.registry.answers);
        let mut queue: VecDeque<usize> = waits.iter().copied().collect();
        let mut seen = BTreeSet::from([self.health.rank]);
        let mut chain = Vec::new();
        while let Some(rank) = queue.pop_front() {
            if !seen.insert(rank) {
                continue;
            }
            let answer = answers.get(&(self.topic.id, rank)).filter(|(when, _)| when.elapsed() < self.patience);
            if let Some((_, WaitState::Waiting { ranks, .. })) = answer {
                queue.extend(ranks);
            }
            chain.push((rank, answer.map(|(_, answer)| answer.clone())));
        }
        chain
    }
}

impl Drop for Inquest<'_> {
    fn drop(&mut self) {
        if self.public {
            let mut waiting = lock(&self.health.registry.waiting);
            // If the job has ended, keep the entry for the rest of this rank's life, although its threads no longer
            // wait. A rank that does not know of the end yet may still ask about any operation, and must not be told
            // that this rank is idle.
            if self.closed || self.health.check().is_err() {
                waiting.entry(self.topic.id).and_modify(|wait| wait.given_up |= wait.waiters.since().is_some());
            } else {
                waiting.remove(&self.topic.id);
            }
            drop(waiting);
            lock(&self.health.registry.answers).retain(|(topic, _), _| *topic != self.topic.id);
        }
    }
}

#[cfg(test)]
mod tests;
