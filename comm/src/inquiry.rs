//! Who is to blame when the time for a collective is up.
//!
//! The peer that a rank waits for may itself be waiting, for a third one, who is the one that has stopped: from what is missing
//! alone, a rank would often name the wrong one. So in the second half of its time it asks those whom it waits for whom they
//! wait for, and then those in turn. Who does not answer, or waits for nobody, is to blame. Questions go over the control
//! connections, where a thread of their own answers them, so only a process that has stopped as a whole stays silent.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::health::{Health, SLICE};

/// What a rank says when it is asked about a collective. Ranks are ranks of the world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Whereabouts {
    /// It waits for these.
    Waiting(Vec<usize>),
    /// It is not in that collective, or has not waited long.
    Elsewhere,
}

/// Where a rank leaves whom it waits for, and finds what others have answered.
#[derive(Default)]
pub(crate) struct Desk {
    /// By group.
    waiting: Mutex<BTreeMap<u64, Vec<usize>>>,
    /// By group and rank of the world.
    answers: Mutex<BTreeMap<(u64, usize), (Instant, Whereabouts)>>,
}

impl Desk {
    /// What to answer to a question about a group.
    pub(crate) fn whereabouts(&self, group: u64) -> Whereabouts {
        let waiting = lock(&self.waiting);
        match waiting.get(&group) {
            Some(ranks) => Whereabouts::Waiting(ranks.clone()),
            // A rank that is kept in one group is late for all others.
            None if waiting.is_empty() => Whereabouts::Elsewhere,
            None => Whereabouts::Waiting(waiting.values().flatten().copied().collect()),
        }
    }

    /// Files the answer of a rank.
    pub(crate) fn answered(&self, group: u64, rank: usize, whereabouts: Whereabouts) {
        lock(&self.answers).insert((group, rank), (Instant::now(), whereabouts));
    }
}

/// One rank's search for the one who keeps it waiting, as long as one collective.
pub(crate) struct Inquest<'a> {
    health: &'a Health,
    group: u64,
    started: Instant,
    /// When it was first seen that the time is up. Not the deadline: the machine may have stood still since.
    up: Option<Instant>,
    /// How long others may take to answer: a quarter of the time.
    patience: Duration,
    /// Whether others can know that this rank waits.
    public: bool,
    /// Who was asked, and when first.
    asked: BTreeMap<usize, Instant>,
}

impl<'a> Inquest<'a> {
    pub(crate) fn new(health: &'a Health, group: u64, deadline: Instant) -> Inquest<'a> {
        let started = Instant::now();
        let patience = deadline.saturating_duration_since(started) / 4;
        Inquest { health, group, started, up: None, patience, public: false, asked: BTreeMap::new() }
    }

    /// Leaves word that this rank waits, and asks when it has waited long. To be called every now and then.
    pub(crate) fn pursue(&mut self, waits: &[usize]) {
        let waited = self.started.elapsed();
        if waited < self.patience.min(SLICE) {
            return;
        }
        lock(&self.health.desk.waiting).insert(self.group, waits.to_vec());
        self.public = true;
        if waited < 2 * self.patience {
            return;
        }
        for (rank, _) in self.chain(waits) {
            self.asked.entry(rank).or_insert_with(Instant::now);
            self.health.ask(rank, self.group);
        }
    }

    /// Whom to blame, now that the time is up; `None` if somebody may still answer.
    pub(crate) fn verdict(&mut self, waits: &[usize]) -> Option<usize> {
        let up = *self.up.get_or_insert_with(Instant::now);
        let chain = self.chain(waits);
        let silent = chain.iter().find(|(_, answer)| answer.is_none());
        // A machine that stood still passes deadlines in its sleep: then nobody has been asked yet.
        let asked = |rank: usize| self.asked.get(&rank).is_some_and(|asked| asked.elapsed() >= self.patience);
        let over = up.elapsed() >= 2 * self.patience;
        if !over && chain.iter().any(|(rank, _)| !asked(*rank)) {
            return None;
        }
        let idle = chain.iter().find(|(_, answer)| *answer == Some(Whereabouts::Elsewhere));
        silent.or(idle).map(|(rank, _)| *rank).or(waits.first().copied()).or(Some(self.health.rank))
    }

    /// Those whom this rank waits for, whom they wait for, and so on, with what they last said.
    fn chain(&self, waits: &[usize]) -> Vec<(usize, Option<Whereabouts>)> {
        let answers = lock(&self.health.desk.answers);
        let mut queue: VecDeque<usize> = waits.iter().copied().collect();
        let mut seen = BTreeSet::from([self.health.rank]);
        let mut chain = Vec::new();
        while let Some(rank) = queue.pop_front() {
            if !seen.insert(rank) {
                continue;
            }
            let answer = answers.get(&(self.group, rank)).filter(|(when, _)| when.elapsed() < self.patience);
            if let Some((_, Whereabouts::Waiting(next))) = answer {
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
            lock(&self.health.desk.waiting).remove(&self.group);
            lock(&self.health.desk.answers).retain(|(group, _), _| *group != self.group);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing in here panics with a lock held; a map is whole anyway.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
