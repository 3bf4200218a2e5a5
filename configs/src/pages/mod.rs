//! Generates pages of the documentation.

pub(super) mod deepspeed;
pub(super) mod reference;
