//! Broadcasts a row to all rows of a matrix (a bias), and sums all rows (its gradient), bit-identical to the CPU.

use crate::launch::{Address, Dtype, Launch, Source, THREADS};

/// Matches `SpreadArgs` of `cu/rows.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SpreadArgs {
    from: Address,
    y: Address,
    rows: u64,
    size: u64,
}

/// Matches `RowSumsArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowSumsArgs {
    x: Address,
    partials: Address,
    rows: u64,
    size: u64,
}

/// Matches `PartialSumsArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PartialSumsArgs {
    partials: Address,
    to: Address,
    blocks: u64,
    size: u64,
    add: u64,
}

/// How a sum combines with the existing value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Onto {
    /// Overwrites the existing value.
    Nothing,
    /// Adds the complete sum to the existing value.
    Sum,
    /// Starts the sum with the existing value.
    Start,
}

/// Number of rows that are added into one partial sum.
pub const BLOCK: u32 = 64;

/// Maximum number of blocks in y for [`spread`]: enough to fill any device.
const MOST_ROWS: u32 = 1024;
/// Number of threads in a block, if each thread processes several columns.
const WIDE_THREADS: u32 = 128;

/// Copies `from`, of `size` elements, to each of the `rows` rows of y. Returns `None` if there are no elements.
pub fn spread(dtype: Dtype, [rows, size]: [u32; 2], from: Address, y: Address) -> Option<Launch<SpreadArgs>> {
    let args = SpreadArgs { from, y, rows: rows.into(), size: size.into() };
    let grid = [size.div_ceil(THREADS), rows.min(MOST_ROWS), 1];
    (rows > 0 && size > 0).then(|| Launch::new(Source::Rows, "spread", dtype, grid, args))
}

/// Sums each block of [`BLOCK`] rows of x; the sums are f32 of `[blocks, size]`. There must be at least one row and one
/// column.
pub fn sums(dtype: Dtype, [rows, size]: [u32; 2], x: Address, partials: Address) -> Launch<RowSumsArgs> {
    let (args, blocks) = (RowSumsArgs { x, partials, rows: rows.into(), size: size.into() }, rows.div_ceil(BLOCK));
    // Columns per 8-byte access, if x and each of its rows are aligned to 8 bytes.
    let columns = if dtype == Dtype::F32 { 2 } else { 4 };
    if x.is_multiple_of(8) && size.is_multiple_of(columns) {
        let grid = [(size / columns).div_ceil(WIDE_THREADS), blocks, 1];
        return Launch { threads: WIDE_THREADS, ..Launch::new(Source::Rows, "row_sums_wide", dtype, grid, args) };
    }
    Launch::new(Source::Rows, "row_sums", dtype, [size.div_ceil(THREADS), blocks, 1], args)
}

/// Adds the partial sums of [`sums`]. The result `to` is f32 of `[size]`.
pub fn total([rows, size]: [u32; 2], partials: Address, to: Address, onto: Onto) -> Launch<PartialSumsArgs> {
    let add = match onto {
        Onto::Nothing => 0,
        Onto::Sum => 1,
        Onto::Start => 2,
    };
    let args = PartialSumsArgs { partials, to, blocks: rows.div_ceil(BLOCK).into(), size: size.into(), add };
    let grid = [size.div_ceil(THREADS), 1, 1];
    Launch { source: Source::Rows, entry: "partial_sums".into(), grid, threads: THREADS, shared_bytes: 0, args }
}
