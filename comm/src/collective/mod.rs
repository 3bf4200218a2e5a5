//! The parts of a collective, independent of the transport.

pub(crate) mod carried;
pub(crate) mod deadline;
pub(crate) mod parts;
pub(crate) mod reduction;
pub(crate) mod signature;
pub(crate) mod stats;
pub(crate) mod step;
