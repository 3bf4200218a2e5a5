//! Converts indices of any type to u32, checks their range, and records the first fault for the host.

use std::ops::Range;

use crate::launch::{Address, Launch, Source};

/// Types of indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexType {
    /// Unsigned bytes.
    U8,
    /// The type that kernels take.
    U32,
    /// candle's widest type.
    I64,
    /// i64 targets of a loss. The target −100 is allowed, and becomes [`NO_TARGET`].
    Targets,
}

/// The index of a row without a target.
pub const NO_TARGET: u32 = u32::MAX - 1;

/// Marks an index that belongs to another rank. It is used if each rank has a part of a table, or of the classes of a
/// loss.
pub const ELSEWHERE: u32 = u32::MAX - 2;

/// Matches `Fault` of `cu/fault.cuh`: the first fault. Initially zeros, in host memory that the device writes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fault {
    /// The kind of fault; 0 if none occurred.
    pub what: u64,
    /// Details of the fault; their meaning depends on `what`.
    pub details: [u64; 3],
}

/// Matches `IndicesArgs` of `cu/indices.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Args {
    from: Address,
    to: Address,
    fault: Address,
    what: u64,
    count: u64,
    limit: u64,
    begin: u64,
    own: u64,
}

const THREADS: u32 = 1024;

/// The valid indices of a table, or the classes of a loss, and this rank's part of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Indices are below this.
    pub all: u32,
    /// This rank's indices, which become 0, 1, …; others become [`ELSEWHERE`].
    pub own: Range<u32>,
}

impl Limits {
    /// Returns limits for a rank that has all indices below `all`.
    #[must_use]
    pub fn whole(all: u32) -> Self {
        Self { all, own: 0..all }
    }
}

/// Converts `count` indices to u32. An index not below the limit becomes 2³² − 1. For the first such index, and if no
/// fault is recorded yet, the kernel records `what` (not 0) with the index, its position and the limit in the [`Fault`]
/// at `fault`. For [`IndexType::Targets`], the kernel also writes the number of indices other than [`NO_TARGET`], after
/// the last index.
pub fn indices(
    of: IndexType,
    count: u32,
    limits: &Limits,
    [from, to]: [Address; 2],
    fault: Address,
    what: u64,
) -> Launch<Args> {
    let entry = match of {
        IndexType::U8 => "indices_u8",
        IndexType::U32 => "indices_u32",
        IndexType::I64 => "indices_i64",
        IndexType::Targets => "targets_i64",
    };
    let (begin, own) = (limits.own.start.into(), limits.own.len() as u64);
    let args = Args { from, to, fault, what, count: count.into(), limit: limits.all.into(), begin, own };
    let (source, entry) = (Source::Indices, entry.into());
    Launch { source, entry, grid: [1, 1, 1], threads: THREADS, shared_bytes: 8 * THREADS, args }
}
