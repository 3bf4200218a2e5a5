//! How the payload of an operation was transferred, for the counters.

use std::ops::AddAssign;

/// The way in which the payload of an operation was transferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Carried {
    /// Whether ranks accessed each other's buffers directly; in a coalesced operation, whether they did so for at least
    /// one buffer. Other payload was copied through rings or sockets.
    pub(crate) in_place: bool,
    /// Number of bytes that this rank wrote to sockets.
    pub(crate) network_bytes: usize,
    /// Number of payload bytes that were added by sending 16-bit values as f32.
    pub(crate) widening: usize,
    /// Whether the operation ran ahead of the host.
    pub(crate) ahead: bool,
}

impl Carried {
    pub(crate) const IN_PLACE: Carried = Carried { in_place: true, network_bytes: 0, widening: 0, ahead: false };

    pub(crate) fn streamed(network_bytes: usize) -> Carried {
        Carried { in_place: false, network_bytes, ..Carried::IN_PLACE }
    }
}

impl AddAssign for Carried {
    fn add_assign(&mut self, part: Carried) {
        self.in_place &= part.in_place;
        self.network_bytes += part.network_bytes;
        self.widening += part.widening;
        self.ahead &= part.ahead;
    }
}
