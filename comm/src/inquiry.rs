//! Who is to blame when the time for an operation is up.
//!
//! The peer that a rank waits for may itself be waiting, for a third one, who is the one that has stopped: from what is missing
//! alone, a rank would often name the wrong one. So in the second half of its time it asks those whom it waits for whom they
//! wait for, and then those in turn. Who does not answer, or waits for nobody, is to blame. Questions go over the control
//! connections, where a thread of their own answers them, so only a process that has stopped as a whole stays silent.
//!
//! A rank is in several operations at a time, of several groups. The one that is asked about counts, if the rank is in it. If not,
//! what keeps the rank from it is what its own threads wait for. A receive that was only posted ahead keeps nobody, and its time does
//! not run.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::health::{Health, SLICE};
use crate::signature::digest;
use crate::step::Deadline;

/// The threads of a rank that wait for what a lane does.
#[derive(Debug, Default)]
pub(crate) struct Waiters(Mutex<Present>);

#[derive(Debug, Default)]
struct Present {
    threads: usize,
    /// Since when there has been one.
    since: Option<Instant>,
}

impl Waiters {
    /// Counts the calling thread in, until the seat is dropped.
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

/// One waiting thread.
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

/// What a lane does, as far as other ranks ask about it.
#[derive(Debug, Clone)]
pub(crate) struct Topic {
    /// The same on all ranks that take part, and no other lane's.
    id: u64,
    waiters: Arc<Waiters>,
}

impl Topic {
    /// The collectives of a group.
    pub(crate) fn collectives(group: u64, waiters: &Arc<Waiters>) -> Topic {
        Topic { id: group, waiters: Arc::clone(waiters) }
    }

    /// The messages of a group from one of its ranks to another.
    pub(crate) fn messages(group: u64, from: usize, to: usize, waiters: &Arc<Waiters>) -> Topic {
        Topic { id: digest("messages", &[group as usize, from, to]), waiters: Arc::clone(waiters) }
    }
}

/// What a rank says when it is asked about an operation. Ranks are ranks of the world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum WaitState {
    /// It waits for these.
    Waiting(Vec<usize>),
    /// It is not in that operation, or has not waited long.
    Elsewhere,
}

/// Where a rank leaves whom it waits for, and finds what others have answered.
#[derive(Default)]
pub(crate) struct WaitRegistry {
    /// By topic.
    waiting: Mutex<BTreeMap<u64, Wait>>,
    /// By topic and rank of the world.
    answers: Mutex<BTreeMap<(u64, usize), (Instant, WaitState)>>,
}

/// Whom a lane waits for, and who for the lane.
struct Wait {
    ranks: Vec<usize>,
    waiters: Arc<Waiters>,
    /// Whether it was given up, and kept this rank from everything else to the last.
    given_up: bool,
}

impl Wait {
    fn keeps_a_thread(&self) -> bool {
        self.given_up || self.waiters.since().is_some()
    }
}

impl WaitRegistry {
    /// What to answer to a question about a topic.
    pub(crate) fn wait_state(&self, topic: u64) -> WaitState {
        let waiting = lock(&self.waiting);
        if let Some(wait) = waiting.get(&topic) {
            return WaitState::Waiting(wait.ranks.clone());
        }
        // A rank that is kept in one operation is late for all others.
        let keeping = waiting.values().filter(|wait| wait.keeps_a_thread());
        let ranks: BTreeSet<usize> = keeping.flat_map(|wait| &wait.ranks).copied().collect();
        match ranks.is_empty() {
            true => WaitState::Elsewhere,
            false => WaitState::Waiting(ranks.into_iter().collect()),
        }
    }

    /// Files the answer of a rank.
    pub(crate) fn answered(&self, topic: u64, rank: usize, wait_state: WaitState) {
        lock(&self.answers).insert((topic, rank), (Instant::now(), wait_state));
    }
}

/// One rank's search for the one who keeps it waiting, as long as one operation.
pub(crate) struct Inquest<'a> {
    health: &'a Health,
    topic: &'a Topic,
    begun: Instant,
    deadline: Deadline,
    /// When it was first seen that the time is up. Not the deadline: the machine may have stood still since.
    up: Option<Instant>,
    /// How long others may take to answer: a quarter of the time.
    patience: Duration,
    /// Whether others can know that this rank waits.
    public: bool,
    /// Who was asked, and when first.
    asked: BTreeMap<usize, Instant>,
    /// When this rank last looked after the operation.
    looked: Instant,
    /// Whether somebody was blamed.
    closed: bool,
}

/// A rank that waits looks every [`SLICE`]. One that did not look for this long was not running, and perhaps no other was: the
/// machine stood still, or had too much to do.
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
            up: None,
            patience,
            public: false,
            asked,
            looked: begun,
            closed: false,
        }
    }

    /// Leaves word that this rank waits, and asks when it has waited long. To be called every now and then.
    pub(crate) fn pursue(&mut self, waits: &[usize]) {
        self.notice_standstill();
        if self.begun.elapsed() < self.patience.min(SLICE) {
            return;
        }
        let wait = Wait { ranks: waits.to_vec(), waiters: Arc::clone(&self.topic.waiters), given_up: false };
        lock(&self.health.registry.waiting).insert(self.topic.id, wait);
        self.public = true;
        if self.waited().is_none_or(|waited| waited < 2 * self.patience) {
            return;
        }
        for (rank, _) in self.chain(waits) {
            self.asked.entry(rank).or_insert_with(Instant::now);
            self.health.ask(rank, self.topic.id);
        }
    }

    /// How long a thread has waited for this operation; `None` if none does.
    fn waited(&self) -> Option<Duration> {
        Some(self.topic.waiters.since()?.max(self.deadline.started).elapsed())
    }

    /// What is left of the time, if it runs.
    pub(crate) fn left(&self) -> Option<Duration> {
        Some(self.deadline.timeout.saturating_sub(self.waited()?))
    }

    /// Whom to blame, now that the time is up; `None` if somebody may still answer.
    pub(crate) fn verdict(&mut self, waits: &[usize]) -> Option<usize> {
        self.notice_standstill();
        let up = *self.up.get_or_insert_with(Instant::now);
        let chain = self.chain(waits);
        let silent = chain.iter().find(|(_, answer)| answer.is_none());
        // After a standstill nobody has been asked yet.
        let asked = |rank: usize| self.asked.get(&rank).is_some_and(|asked| asked.elapsed() >= self.patience);
        let over = up.elapsed() >= 2 * self.patience;
        if !over && chain.iter().any(|(rank, _)| !asked(*rank)) {
            return None;
        }
        self.closed = true;
        let idle = chain.iter().find(|(_, answer)| *answer == Some(WaitState::Elsewhere));
        silent.or(idle).map(|(rank, _)| *rank).or(waits.first().copied()).or(Some(self.health.rank))
    }

    /// What others said, or did not say, before a standstill is worth nothing after it: they are asked anew, and have all the time
    /// to answer.
    fn notice_standstill(&mut self) {
        let (before, now) = (self.looked, Instant::now());
        self.looked = now;
        if now - before < STANDSTILL {
            return;
        }
        self.asked.clear();
        self.up = self.up.map(|up| (up + (now - before)).min(now));
    }

    /// Those whom this rank waits for, whom they wait for, and so on, with what they last said.
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
            if let Some((_, WaitState::Waiting(next))) = answer {
                queue.extend(next);
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
            // Where the job has ended, this rank waits for as long as it lives, though its threads have gone on: who has not heard of
            // the end yet and asks, about whatever operation, must not take it for idle.
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing in here panics with a lock held; a map is whole anyway.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::health::Board;

    /// Rank 0 has asked rank 1, who said that it waits for rank 2, who is idle. Then the machine stands still, for so long that both
    /// the time is up and all answers are old.
    #[test]
    fn nobody_is_blamed_for_a_standstill() {
        let health = Health::new(0, Board::new(3), Arc::default(), None);
        let waiters = Arc::<Waiters>::default();
        let topic = Topic::collectives(7, &waiters);
        let _seat = Arc::clone(&waiters).enter();
        let deadline = Deadline { started: Instant::now(), timeout: Duration::from_millis(1200) };
        let mut inquest = Inquest::new(&health, &topic, deadline);
        let answer = || {
            health.registry.answered(topic.id, 1, WaitState::Waiting(vec![2]));
            health.registry.answered(topic.id, 2, WaitState::Elsewhere);
        };
        while inquest.asked.len() < 2 {
            answer();
            inquest.pursue(&[1]);
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(2 * deadline.timeout);
        assert_eq!(inquest.left(), Some(Duration::ZERO));
        assert_eq!(inquest.verdict(&[1]), None, "all answers are from before");
        let blamed = loop {
            answer();
            inquest.pursue(&[1]);
            match inquest.verdict(&[1]) {
                None => std::thread::sleep(Duration::from_millis(10)),
                Some(rank) => break rank,
            }
        };
        assert_eq!(blamed, 2);
    }

    /// A rank whose operation was given up answers until its process ends. Others may ask before they hear of the end.
    #[test]
    fn who_has_given_up_is_not_idle() {
        for blames in [true, false] {
            let health = Health::new(0, Board::new(3), Arc::default(), None);
            let waiters = Arc::<Waiters>::default();
            let topic = Topic::collectives(7, &waiters);
            let seat = Arc::clone(&waiters).enter();
            let deadline = Deadline { started: Instant::now(), timeout: Duration::from_millis(200) };
            let mut inquest = Inquest::new(&health, &topic, deadline);
            while blames && inquest.verdict(&[1]).is_none() || !inquest.public {
                inquest.pursue(&[1]);
                std::thread::sleep(Duration::from_millis(5));
            }
            drop(inquest);
            drop(seat);
            // About the operation, and about one that the rank has not come to.
            for asked in [topic.id, topic.id + 1] {
                let left = health.registry.wait_state(asked);
                assert_eq!(left == WaitState::Waiting(vec![1]), blames, "{left:?}");
            }
        }
    }
}
