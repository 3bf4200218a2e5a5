//! Ranks as processes of one host: streams as rings in a segment of shared memory.
//!
//! The segment is an anonymous memory file of the group's first rank. The others open it through that process's entry in
//! `/proc`, which the kernel allows to processes of the same user only; it never has a name in any file system, so nothing
//! is left behind whatever happens.
#![allow(unsafe_code)]

mod ring;
mod segment;
mod wires;

use std::sync::Arc;
use std::time::Instant;

use crate::error::CommError;
use crate::health::{Failure, Health};
use crate::signature::Signature;
use crate::step::{Collective, Membership};
use crate::stream::gather_all;

pub(crate) use segment::Segment;
pub(crate) use wires::ShmWires;

/// Maps one segment into all members of a group, who talk over `endpoint` meanwhile. `Err` inside if one of them cannot.
pub(crate) fn share(
    endpoint: &mut dyn Collective,
    membership: &Membership,
    deadline: Instant,
) -> Result<Result<Arc<Segment>, String>, (Failure, Signature)> {
    let created = match membership.rank {
        0 => Segment::create(membership.size(), membership.group).map(Some),
        _ => Ok(None),
    };
    let ticket = match &created {
        Ok(Some((_, ticket))) => ticket.encode(),
        _ => Default::default(),
    };
    let tickets = gather_all(endpoint, membership, &ticket, 0, deadline)?;
    let opened = match created {
        Ok(None) => segment::Ticket::decode(&tickets[0])
            .ok_or_else(|| "the first rank has no segment".to_string())
            .and_then(|ticket| Segment::open(&ticket, membership.size(), membership.group)),
        Ok(Some((segment, _))) => Ok(segment),
        Err(detail) => Err(detail),
    };
    let votes = gather_all(endpoint, membership, &[u8::from(opened.is_ok())], 1, deadline)?;
    let refused = votes.iter().position(|vote| vote != &[1]);
    Ok(match (opened, refused) {
        (Err(detail), _) => Err(detail),
        (Ok(_), Some(rank)) => Err(format!("rank {} cannot map it", membership.members[rank])),
        (Ok(segment), None) => Ok(Arc::new(segment)),
    })
}

/// Which processes can share memory in this way: the same boot, the same network, the same process numbers, the same user.
pub(crate) fn host_identity() -> String {
    let link = |name: &str| std::fs::read_link(name).map(|path| path.to_string_lossy().into_owned());
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let names = ["/proc/self/ns/net", "/proc/self/ns/pid"].map(|name| link(name).unwrap_or_default());
    format!("{}/{}/{}/{}", boot.trim(), names[0], names[1], rustix::process::geteuid().as_raw())
}

/// The error of a group that was told to use shared memory and cannot.
pub(crate) fn unavailable(health: &Health, detail: String) -> CommError {
    CommError::Io { rank: health.rank, detail: format!("no shared memory between the ranks: {detail}") }
}
