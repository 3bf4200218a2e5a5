//! Rotary position embedding, bit-identical to the CPU.

use crate::launch::{Address, Dtype, Launch, MOST, Source, THREADS, threads_for};

/// Matches `RotaryArgs` of `cu/rotary.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Args {
    x: Address,
    cos: Address,
    sin: Address,
    positions: Address,
    y: Address,
    tokens: u64,
    time: u32,
    heads: u32,
    half: u32,
    back: u32,
}

/// The direction of rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// By the position's angle: forward.
    Forth,
    /// By the opposite angle: backward.
    Back,
}

/// Rotates x, `[batch, time, heads, size]` with an even size, and writes y, which may be x. The tables hold the f32
/// cosines and sines of `[positions, size / 2]`. `positions` is the address of the tokens' positions, u32 of `[batch,
/// time]`; if it is 0, the first token of each row is position 0. Returns `None` if there is nothing to rotate.
pub fn rotary(
    dtype: Dtype,
    [batch, time, heads, size]: [u32; 4],
    [cos, sin]: [Address; 2],
    positions: Address,
    [x, y]: [Address; 2],
    turn: Turn,
) -> Option<Launch<Args>> {
    let (half, tokens) = (size / 2, u64::from(batch) * u64::from(time));
    let args = Args { x, cos, sin, positions, y, tokens, time, heads, half, back: u32::from(turn == Turn::Back) };
    // One token per block; blocks loop over the tokens beyond the grid's limit.
    let grid = [tokens.min(MOST[0].into()) as u32, 1, 1];
    let packs = u64::from(heads) * u64::from(half.div_ceil(dtype.pack()));
    let threads = threads_for(packs.min(THREADS.into()) as u32, THREADS);
    let launch = Launch { threads, ..Launch::new(Source::Rotary, "rotary", dtype, grid, args) };
    (tokens > 0 && packs > 0).then_some(launch)
}
