//! The streams of a lane to some of its ranks.

use std::time::Duration;

use super::{Broken, Wait, Wires};
use crate::collective::step::Membership;

/// Some of the ranks of a group.
pub(crate) struct Subgroup {
    /// The ranks, numbered within the subgroup, with the id of the whole group.
    pub(crate) membership: Membership,
    /// Their ranks in the whole group.
    pub(crate) ranks: Vec<usize>,
}

/// The streams to the ranks of a subgroup.
pub(super) struct Among<'a> {
    /// The streams to all ranks of the group.
    pub(super) wires: &'a mut dyn Wires,
    /// For each rank of the subgroup, its rank in the whole group.
    pub(super) ranks: &'a [usize],
}

impl Wires for Among<'_> {
    fn chunk(&self) -> usize {
        self.wires.chunk()
    }

    fn push(&mut self, peer: usize, bytes: &[u8]) -> Result<usize, Broken> {
        self.wires.push(self.ranks[peer], bytes)
    }

    fn pull(&mut self, peer: usize, into: &mut [u8]) -> Result<usize, Broken> {
        self.wires.pull(self.ranks[peer], into)
    }

    fn arrived(&mut self, peer: usize, length: usize) -> Result<bool, Broken> {
        self.wires.arrived(self.ranks[peer], length)
    }

    fn view(&self, peer: usize, length: usize) -> &[u8] {
        self.wires.view(self.ranks[peer], length)
    }

    fn consume(&mut self, peer: usize) {
        self.wires.consume(self.ranks[peer]);
    }

    fn is_taken(&self, peer: usize) -> bool {
        self.wires.is_taken(self.ranks[peer])
    }

    fn is_network(&self) -> bool {
        self.wires.is_network()
    }

    fn mark(&self) -> u32 {
        self.wires.mark()
    }

    fn wait(&mut self, mark: u32, waits: &[Wait], limit: Duration) {
        let of_group = |wait: &Wait| match *wait {
            Wait::Room(peer) => Wait::Room(self.ranks[peer]),
            Wait::Data(peer) => Wait::Data(self.ranks[peer]),
        };
        let waits: Vec<Wait> = waits.iter().map(of_group).collect();
        self.wires.wait(mark, &waits, limit);
    }
}
