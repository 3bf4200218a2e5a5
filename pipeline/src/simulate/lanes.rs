//! What is on its way between ranks, each lane in order.

use std::collections::BTreeMap;

use super::Link;
use crate::message::{Channel, Message};
use crate::tier::Item;

/// From when to when, in seconds.
type Times = (f64, f64);

/// Messages between stages, by the place of their ranks on the data axis and channel.
pub(super) struct Channels {
    /// Messages that a channel holds before there is room for them.
    capacity: usize,
    link: Link,
    ways: BTreeMap<(usize, Channel), Way>,
}

/// One channel: the k-th message sent is the k-th received.
#[derive(Default)]
struct Way {
    sent: Vec<(Message, f64, u64)>,
    posted: Vec<f64>,
    arrived: Vec<f64>,
    /// Which in the channel a message is, to its sender and to its receiver: the same, if the programs are valid.
    index: BTreeMap<Message, usize>,
}

impl Channels {
    pub(super) fn new(capacity: usize, link: Link) -> Self {
        Self { capacity, link, ways: BTreeMap::new() }
    }

    pub(super) fn send(&mut self, replica: usize, message: &Message, at: f64, bytes: u64) {
        let way = self.ways.entry((replica, message.channel())).or_default();
        way.index.insert(*message, way.sent.len());
        way.sent.push((*message, at, bytes));
    }

    pub(super) fn post(&mut self, replica: usize, message: &Message, at: f64) {
        self.ways.entry((replica, message.channel())).or_default().posted.push(at);
    }

    /// Moves all messages that have been sent and that there is room for, and tells when they went.
    pub(super) fn settle(&mut self, replica: usize, channel: Channel) -> Vec<(Message, Times)> {
        let (capacity, link) = (self.capacity, self.link);
        let mut gone = vec![];
        let Some(way) = self.ways.get_mut(&(replica, channel)) else { return gone };
        while let Some(&(message, sent, bytes)) = way.sent.get(way.arrived.len()) {
            let index = way.arrived.len();
            let room = match index.checked_sub(capacity) {
                None => Some(0.0),
                Some(waits_for) => way.posted.get(waits_for).copied(),
            };
            let Some(room) = room else { break };
            let start = sent.max(room).max(way.arrived.last().copied().unwrap_or(0.0));
            let end = start + link.seconds(bytes as f64);
            way.arrived.push(end);
            gone.push((message, (start, end)));
        }
        gone
    }

    /// When a message has arrived, if that is known yet.
    pub(super) fn arrival(&self, replica: usize, message: &Message) -> Option<f64> {
        let way = self.ways.get(&(replica, message.channel()))?;
        way.arrived.get(*way.index.get(message)?).copied()
    }
}

/// Collectives of data-parallel groups, by stage.
pub(super) struct Groups {
    members: usize,
    /// By stage, for each collective how many have started it, and when the last of them did.
    started: Vec<Vec<(usize, f64)>>,
    ended: Vec<Vec<f64>>,
}

impl Groups {
    pub(super) fn new(stages: usize, members: usize) -> Self {
        Self { members, started: vec![vec![]; stages], ended: vec![vec![]; stages] }
    }

    /// A member starts its collective number `index`. If it is the last one, from when to when that takes.
    pub(super) fn start(&mut self, stage: usize, index: usize, at: f64, seconds: f64) -> Option<Times> {
        let (started, ended) = (&mut self.started[stage], &mut self.ended[stage]);
        if started.len() == index {
            started.push((0, 0.0));
        }
        let (members, last) = &mut started[index];
        (*members, *last) = (*members + 1, last.max(at));
        // Members start their collectives in order, so the one before has been started by all of them.
        (*members == self.members).then(|| {
            let start = last.max(ended.last().copied().unwrap_or(0.0));
            ended.push(start + seconds);
            (start, start + seconds)
        })
    }

    /// When a collective is done, if that is known yet.
    pub(super) fn end(&self, stage: usize, index: usize) -> Option<f64> {
        self.ended[stage].get(index).copied()
    }
}

/// One rank's disk: requests are served one after the other.
#[derive(Default)]
pub(super) struct Disk {
    free: f64,
    /// When the last request of each item is done.
    done: BTreeMap<Item, f64>,
}

impl Disk {
    pub(super) fn request(&mut self, item: Item, at: f64, seconds: f64) -> Times {
        let start = at.max(self.free);
        self.free = start + seconds;
        self.done.insert(item, self.free);
        (start, self.free)
    }

    pub(super) fn end(&self, item: &Item) -> Option<f64> {
        self.done.get(item).copied()
    }
}

/// Gradient norms, for which all ranks meet.
#[derive(Default)]
pub(super) struct Norms {
    /// For each, when ranks came.
    arrived: Vec<Vec<Option<f64>>>,
}

impl Norms {
    /// A rank comes to norm number `index`. Whether it was not there before.
    pub(super) fn arrive(&mut self, index: usize, rank: usize, at: f64, ranks: usize) -> bool {
        if self.arrived.len() == index {
            self.arrived.push(vec![None; ranks]);
        }
        self.arrived[index][rank].replace(at).is_none()
    }

    /// When all are there, if that is known yet.
    pub(super) fn begin(&self, index: usize) -> Option<f64> {
        self.arrived.get(index)?.iter().copied().try_fold(0.0, |last: f64, at| Some(last.max(at?)))
    }
}
