//! Dropout, bit-identical to the CPU's.

use crate::launch::{Address, Dtype, Launch, MOST, Source};

/// Matches `DropoutArgs` of `cu/dropout.cu`.
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

/// The parameters that determine which elements are kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mask {
    /// The generator's key.
    pub key: [u32; 2],
    /// The number of the first row; further rows count on from it.
    pub first_sample: u64,
    /// The probability that an element is set to 0.
    pub probability: f32,
    /// The factor for the kept elements.
    pub scale: f32,
}

/// Applies dropout to x, `[samples, size]`, and writes y, which may be x. Returns `None` if there are no elements.
pub fn dropout(dtype: Dtype, [samples, size]: [u64; 2], mask: &Mask, [x, y]: [Address; 2]) -> Option<Launch<Args>> {
    let &Mask { key, first_sample, probability, scale } = mask;
    let args = Args { x, y, samples, size, first_sample, key, probability, scale };
    let launch = Launch::over(Source::Dropout, "dropout", dtype, size.div_ceil(dtype.pack().into()), args)?;
    // Blocks loop over the samples beyond the grid's limit.
    let rows = samples.min(MOST[1].into()) as u32;
    (rows > 0).then_some(Launch { grid: [launch.grid[0], rows, 1], ..launch })
}
