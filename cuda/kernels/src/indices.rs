//! Indices of any type as u32, held against their limit, and what is left for the host where one is above.

use crate::launch::{Address, Launch, Source};

/// Types of indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexType {
    /// Bytes.
    U8,
    /// What kernels take.
    U32,
    /// candle's widest.
    I64,
}

/// `Fault` of `cu/fault.cuh`: what went wrong first. Zeros at first, in memory of the host that the device writes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fault {
    /// 0 as long as nothing did.
    pub what: u64,
    /// What is said about it.
    pub details: [u64; 3],
}

/// `IndicesArgs` of `cu/indices.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Args {
    from: Address,
    to: Address,
    fault: Address,
    what: u64,
    count: u64,
    limit: u64,
}

const THREADS: u32 = 1024;

/// `count` indices to u32. One that is not below `limit` becomes 2³² − 1; the first of them leaves `what`, which is not 0, with the
/// index, its position and the limit in the [`Fault`] at `fault`, if nothing is there yet.
pub fn indices(
    of: IndexType,
    count: u32,
    limit: u32,
    [from, to]: [Address; 2],
    fault: Address,
    what: u64,
) -> Launch<Args> {
    let entry = match of {
        IndexType::U8 => "indices_u8",
        IndexType::U32 => "indices_u32",
        IndexType::I64 => "indices_i64",
    };
    let args = Args { from, to, fault, what, count: count.into(), limit: limit.into() };
    let (source, entry) = (Source::Indices, entry.into());
    Launch { source, entry, grid: [1, 1, 1], threads: THREADS, shared_bytes: 8 * THREADS, args }
}
