//! Embedding lookup and the gradient of the table, bit-identical to the CPU.

use crate::launch::{Address, Dtype, Launch, MOST, Source, THREADS, threads_for};

/// Matches `GatherArgs` of `cu/embedding.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatherArgs {
    table: Address,
    indices: Address,
    y: Address,
    count: u64,
    size: u64,
    entries: u64,
}

/// Matches `SortArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SortArgs {
    indices: Address,
    keys: Address,
    count: u64,
    run: u64,
    distance: u64,
}

/// Matches `ScatterArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScatterArgs {
    dy: Address,
    keys: Address,
    to: Address,
    count: u64,
    size: u64,
    entries: u64,
    add: u64,
}

/// The sizes of a lookup in a table of `[entries, size]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lookup {
    /// Number of indices.
    pub count: u32,
    /// Number of rows of the table.
    pub entries: u32,
    /// Number of elements per row.
    pub size: u32,
    /// Type of the table and of the rows that are looked up.
    pub dtype: Dtype,
}

/// Gathers the table's rows at u32 indices of `[count]` into y, `[count, size]`. An index not below `entries` gives a
/// row of NaN; [`ELSEWHERE`](crate::indices::ELSEWHERE) gives a row of zeros. Returns `None` if there is nothing to
/// look up.
pub fn gather(of: &Lookup, table: Address, indices: Address, y: Address) -> Option<Launch<GatherArgs>> {
    let (count, size, entries) = (u64::from(of.count), u64::from(of.size), of.entries.into());
    let args = GatherArgs { table, indices, y, count, size, entries };
    // One row per block; blocks loop over the rows beyond the grid's limit.
    let threads = threads_for(of.size.div_ceil(of.dtype.pack()), THREADS);
    let grid = [of.count.min(MOST[0]), 1, 1];
    let launch = Launch { threads, ..Launch::new(Source::Embedding, "gather", of.dtype, grid, args) };
    (count > 0 && size > 0).then_some(launch)
}

/// Keys that one block sorts.
const CHUNK: u64 = 2048;

/// Returns the number of u64 that [`sort`] needs for `count` positions.
#[must_use]
pub fn keys(count: u32) -> u64 {
    u64::from(count).next_power_of_two().max(CHUNK)
}

/// Sorts the positions of u32 indices of `[count]` by index, then by position, into `keys`, u64 of [`keys`]. Returns
/// the launches in order.
pub fn sort(count: u32, indices: Address, keys: Address) -> impl Iterator<Item = Launch<SortArgs>> {
    let all = self::keys(count);
    let launch = move |entry: &str, run: u64, distance: u64| Launch {
        source: Source::Embedding,
        entry: entry.into(),
        grid: [u32::try_from(all / CHUNK).expect("at most 2²¹ chunks of 2³² keys"), 1, 1],
        threads: (CHUNK / 2) as u32,
        shared_bytes: if entry == "sort_step" { 0 } else { 8 * CHUNK as u32 },
        args: SortArgs { indices, keys, count: count.into(), run, distance },
    };
    let doubled = |from: u64| std::iter::successors(Some(from), |run| run.checked_mul(2));
    let longer_runs = doubled(2 * CHUNK).take_while(move |&run| run <= all).flat_map(move |run| {
        let distances = std::iter::successors(Some(run / 2), |distance| Some(distance / 2));
        let steps =
            distances.take_while(|&distance| distance >= CHUNK).map(move |distance| ("sort_step", run, distance));
        steps.chain([("sort_rest", run, 0)])
    });
    std::iter::once(("sort_chunks", 0, 0))
        .chain(longer_runs)
        .map(move |(entry, run, distance)| launch(entry, run, distance))
}

/// For each index `id`, adds the rows of dy, `[count, size]`, at all positions with this index, in the order of
/// positions. Writes the sum to row `id` of `to`, f32 of `[entries, size]`. With `add`, adds the sum to that row
/// instead. Leaves other rows unchanged. `keys` must be the output of [`sort`]. Returns `None` if there is nothing to
/// add.
pub fn scatter(of: &Lookup, dy: Address, keys: Address, to: Address, add: bool) -> Option<Launch<ScatterArgs>> {
    let (count, size, entries) = (of.count.into(), of.size.into(), of.entries.into());
    let args = ScatterArgs { dy, keys, to, count, size, entries, add: add.into() };
    let packs = of.size.div_ceil(of.dtype.pack());
    let threads = threads_for(packs, THREADS);
    let grid = [of.count, packs.div_ceil(threads), 1];
    let launch = Launch { threads, ..Launch::new(Source::Embedding, "scatter", of.dtype, grid, args) };
    (count > 0 && size > 0).then_some(launch)
}
