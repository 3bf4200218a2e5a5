//! The end of an operation in which ranks have used each other's buffers.

use super::{Wait, Watch, Wires};
use crate::collective::step::Membership;
use crate::health::Failure;

/// Tells the peers that this rank no longer uses their buffers. Then waits until they no longer use this rank's
/// buffers.
pub(super) fn exchange_done(wires: &mut dyn Wires, membership: &Membership, watch: &mut Watch) -> Result<(), Failure> {
    let mut peers: Vec<(usize, bool, bool)> = membership.peers().into_iter().map(|peer| (peer, false, false)).collect();
    loop {
        let mark = wires.mark();
        let mut moved = false;
        for (peer, told, heard) in &mut peers {
            if !*told {
                *told = wires.push(*peer, &[DONE]).map_err(watch.broken(*peer))? == 1;
                moved |= *told;
            }
            if !*heard {
                *heard = wires.pull(*peer, &mut [0]).map_err(watch.broken(*peer))? == 1;
                moved |= *heard;
            }
        }
        let slow = peers.iter().filter(|(_, _, heard)| !heard).map(|(peer, ..)| Wait::Data(*peer));
        let full = peers.iter().filter(|(_, told, _)| !told).map(|(peer, ..)| Wait::Room(*peer));
        let waits: Vec<Wait> = slow.chain(full).collect();
        if waits.is_empty() {
            return Ok(());
        }
        if !moved {
            watch.idle(wires, mark, &waits)?;
        }
    }
}

/// The byte that a rank sends when it no longer uses the receiver's buffer.
pub(super) const DONE: u8 = 1;
