//! Dropout, with the bits of the CPU's.

use crate::launch::{Address, Dtype, Launch, MOST, Source};

/// `DropoutArgs` of `cu/dropout.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Args {
    x: Address,
    y: Address,
    samples: u64,
    size: u64,
    first_sample: u64,
    key: [u32; 2],
    probability: f32,
    scale: f32,
}

/// What decides which elements are kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mask {
    /// Of the generator.
    pub key: [u32; 2],
    /// The first row's number; others follow.
    pub first_sample: u64,
    /// With which an element becomes 0.
    pub probability: f32,
    /// What others are multiplied by.
    pub scale: f32,
}

/// Drops elements of x, `[samples, size]`, to y, which may be x. `None` if there are none.
pub fn dropout(dtype: Dtype, [samples, size]: [u64; 2], mask: &Mask, [x, y]: [Address; 2]) -> Option<Launch<Args>> {
    let &Mask { key, first_sample, probability, scale } = mask;
    let args = Args { x, y, samples, size, first_sample, key, probability, scale };
    let launch = Launch::over(Source::Dropout, "dropout", dtype, size.div_ceil(dtype.pack().into()), args)?;
    // What is beyond is taken in turns.
    let rows = samples.min(MOST[1].into()) as u32;
    (rows > 0).then_some(Launch { grid: [launch.grid[0], rows, 1], ..launch })
}
