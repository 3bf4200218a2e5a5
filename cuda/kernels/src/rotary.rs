//! Rotary position embedding, with the bits of the CPU's.

use crate::launch::{Address, Dtype, Launch, Source};

/// `RotaryArgs` of `cu/rotary.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Args {
    x: Address,
    cos: Address,
    sin: Address,
    y: Address,
    pairs: u64,
    time: u32,
    heads: u32,
    half: u32,
    back: u32,
}

/// Which way pairs are turned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// By the position's angle: forward.
    Forth,
    /// By its opposite: backward.
    Back,
}

/// Rotates x, `[batch, time, heads, size]` with an even size, to y, which may be x. The tables hold the f32 cosines and sines of
/// `[positions, size / 2]`, at least `time` positions. `None` if there is nothing to rotate.
pub fn rotary(
    dtype: Dtype,
    [batch, time, heads, size]: [u32; 4],
    [cos, sin]: [Address; 2],
    [x, y]: [Address; 2],
    turn: Turn,
) -> Option<Launch<Args>> {
    let half = size / 2;
    let pairs = u64::from(batch) * u64::from(time) * u64::from(heads) * u64::from(half);
    let args = Args { x, cos, sin, y, pairs, time, heads, half, back: u32::from(turn == Turn::Back) };
    Launch::over(Source::Rotary, "rotary", dtype, pairs, args)
}
