//! Bytes in memory and bytes sent: what a program is expected to use, and what it used.

pub(crate) mod expected;
pub(crate) mod ledger;
pub(crate) mod memory;
pub(crate) mod network;
