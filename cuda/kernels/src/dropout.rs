//! Dropout, bit-identical to the CPU.

use crate::launch::{Address, Dtype, Launch, MOST, Source};

/// Matches `DropoutArgs` of `cu/dropout.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Args {
    x: Address,
    y: Address,
    samples: u64,
    rows: u64,
    width: u64,
    stride: u64,
    place: u64,
    apart: u64,
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
    /// The number of the first sample; the numbers of further samples follow it.
    pub first_sample: u64,
    /// The probability that an element is set to 0.
    pub probability: f32,
    /// The factor for the kept elements.
    pub scale: f32,
}

/// The memory layout of the elements, `[samples, rows, width]`, and their indices in whole samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleLayout {
    /// Number of samples.
    pub samples: u64,
    /// Number of rows of each sample.
    pub rows: u64,
    /// Number of elements of a row.
    pub width: u64,
    /// Number of elements from one sample to the next.
    pub stride: u64,
    /// Index of the first element in its sample.
    pub first: u64,
    /// Difference between the indices of the first elements of consecutive rows.
    pub apart: u64,
}

impl SampleLayout {
    /// Returns the layout of whole samples of `size` elements.
    #[must_use]
    pub fn whole([samples, size]: [u64; 2]) -> Self {
        Self { samples, rows: 1, width: size, stride: size, first: 0, apart: size }
    }
}

/// Applies dropout to x and writes y, which may be x and has the same layout. Returns `None` if there are no elements.
pub fn dropout(dtype: Dtype, place: &SampleLayout, mask: &Mask, [x, y]: [Address; 2]) -> Option<Launch<Args>> {
    let &Mask { key, first_sample, probability, scale } = mask;
    let &SampleLayout { samples, rows, width, stride, first, apart } = place;
    let args = Args { x, y, samples, rows, width, stride, place: first, apart, first_sample, key, probability, scale };
    let size = rows * width;
    let launch = Launch::over(Source::Dropout, "dropout", dtype, size.div_ceil(dtype.pack().into()), args)?;
    // Blocks loop over the samples beyond the grid's limit.
    let blocks = samples.min(MOST[1].into()) as u32;
    (blocks > 0).then_some(Launch { grid: [launch.grid[0], blocks, 1], ..launch })
}
