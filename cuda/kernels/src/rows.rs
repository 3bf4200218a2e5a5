//! A row put into all rows of a matrix, and the sum of all rows: what a bias is, and its gradient, with the bits of the CPU's.

use crate::launch::{Address, Dtype, Launch, Source, THREADS};

/// `SpreadArgs` of `cu/rows.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SpreadArgs {
    from: Address,
    y: Address,
    rows: u64,
    size: u64,
}

/// `RowSumsArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowSumsArgs {
    x: Address,
    partials: Address,
    rows: u64,
    size: u64,
}

/// `PartialSumsArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PartialSumsArgs {
    partials: Address,
    to: Address,
    blocks: u64,
    size: u64,
    add: u64,
}

/// What becomes of what is there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Onto {
    /// It is overwritten.
    Nothing,
    /// The whole sum is added to it.
    Sum,
    /// The sum begins with it.
    Start,
}

/// Rows whose sum is one partial sum.
pub const BLOCK: u32 = 64;

/// Blocks that rows are spread over at most: enough to fill any device.
const MOST_ROWS: u32 = 1024;
/// Threads of a block that take several columns each.
const WIDE_THREADS: u32 = 128;

/// Every one of `rows` of y becomes `from`, of `size` elements. `None` if there are none.
pub fn spread(dtype: Dtype, [rows, size]: [u32; 2], from: Address, y: Address) -> Option<Launch<SpreadArgs>> {
    let args = SpreadArgs { from, y, rows: rows.into(), size: size.into() };
    let grid = [size.div_ceil(THREADS), rows.min(MOST_ROWS), 1];
    (rows > 0 && size > 0).then(|| Launch::new(Source::Rows, "spread", dtype, grid, args))
}

/// The sums of every [`BLOCK`] rows of x, f32 of `[blocks, size]`, for at least one row and column.
pub fn sums(dtype: Dtype, [rows, size]: [u32; 2], x: Address, partials: Address) -> Launch<RowSumsArgs> {
    let (args, blocks) = (RowSumsArgs { x, partials, rows: rows.into(), size: size.into() }, rows.div_ceil(BLOCK));
    // Of 8 bytes, where x begins at a multiple of that and so does each row.
    let columns = if dtype == Dtype::F32 { 2 } else { 4 };
    if x.is_multiple_of(8) && size.is_multiple_of(columns) {
        let grid = [(size / columns).div_ceil(WIDE_THREADS), blocks, 1];
        return Launch { threads: WIDE_THREADS, ..Launch::new(Source::Rows, "row_sums_wide", dtype, grid, args) };
    }
    Launch::new(Source::Rows, "row_sums", dtype, [size.div_ceil(THREADS), blocks, 1], args)
}

/// The sum of what [`sums`] left, f32 of `[size]`.
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
