//! Ranks as processes of one host: streams as rings in a shared-memory segment.
//!
//! The segment is an anonymous memory file that the group's first rank creates and the others open.
#![allow(unsafe_code)]

mod arena;
mod in_place;
mod memfd;
mod ring;
mod segment;
#[cfg(test)]
mod tests;
mod wires;

use std::sync::Arc;
use std::time::Instant;

use crate::collective::signature::Signature;
use crate::collective::step::{Collective, Membership};
use crate::error::CommError;
use crate::health::{Failure, Health};
use crate::stream::gather_all;

use memfd::Ticket;
pub use memfd::shared_memory;

pub use arena::SharedAllocator;
pub(crate) use arena::{Lent, PeerArenas, lend};
pub(crate) use in_place::Neighbours;
pub(crate) use segment::Segment;
pub(crate) use wires::ShmWires;

/// The memory that the members of a group share.
pub(crate) struct Shared {
    pub(crate) segment: Arc<Segment>,
    pub(crate) neighbours: Option<Neighbours>,
}

/// Maps one segment into all members of a group. If every member has an arena, also maps the arena of each member into
/// all others. The members synchronize over `endpoint`. The inner `Err` means that a member cannot map the segment.
pub(crate) fn share(
    endpoint: &mut dyn Collective,
    membership: &Membership,
    arenas: &PeerArenas,
    deadline: Instant,
) -> Result<Result<Shared, String>, (Failure, Signature)> {
    let created = match membership.rank {
        0 => Segment::create(membership.size(), membership.group).map(Some),
        _ => Ok(None),
    };
    let ticket = match &created {
        Ok(Some((_, ticket))) => ticket.encode(),
        _ => Default::default(),
    };
    let arena = arena::ticket().map_or(Default::default(), |ticket| ticket.encode());
    let tickets = gather_all(endpoint, membership, &[ticket, arena].concat(), 0, deadline)?;
    let opened = match created {
        Ok(None) => Ticket::decode(&tickets[0])
            .ok_or_else(|| "the first rank could not create the shared memory segment".to_string())
            .and_then(|ticket| Segment::open(&ticket, membership.size(), membership.group)),
        Ok(Some((segment, _))) => Ok(segment),
        Err(detail) => Err(detail),
    };
    let arenas = tickets.iter().enumerate().map(|(rank, tickets)| match rank {
        rank if rank == membership.rank => Some(None),
        _ => {
            let ticket = Ticket::decode(&tickets[Ticket::BYTES..])?;
            Some(Some(arenas.get(membership.members[rank], &ticket)?))
        }
    });
    let neighbours = arenas.collect::<Option<_>>().map(Neighbours);
    let vote = [u8::from(opened.is_ok()), u8::from(neighbours.is_some())];
    let votes = gather_all(endpoint, membership, &vote, 1, deadline)?;
    let refused = votes.iter().position(|vote| vote[0] != 1);
    // A rank may lend its buffers only if all peers have mapped its arena.
    let neighbours = neighbours.filter(|_| votes.iter().all(|vote| vote[1] == 1));
    Ok(match (opened, refused) {
        (Err(detail), _) => Err(detail),
        (Ok(_), Some(rank)) => Err(format!("rank {} cannot map the shared memory segment", membership.members[rank])),
        (Ok(segment), None) => Ok(Shared { segment: Arc::new(segment), neighbours }),
    })
}

/// Identifies the processes that can share memory: equal boot id, network namespace, process namespace and user.
pub(crate) fn host_identity() -> String {
    let link = |name: &str| std::fs::read_link(name).map(|path| path.to_string_lossy().into_owned());
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let names = ["/proc/self/ns/net", "/proc/self/ns/pid"].map(|name| link(name).unwrap_or_default());
    format!("{}/{}/{}/{}", boot.trim(), names[0], names[1], rustix::process::geteuid().as_raw())
}

/// Returns the error of a group that is configured to use shared memory but cannot.
pub(crate) fn unavailable(health: &Health, detail: String) -> CommError {
    CommError::Io { rank: health.rank, detail: format!("the ranks cannot share memory: {detail}") }
}
