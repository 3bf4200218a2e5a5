//! Block quantization to 8 or 4 bits for collectives, bit-identical to [`zero_optim::BlockCodes`].

use zero_optim::BlockCodes;

use crate::launch::{Address, Dtype, Launch, Source, THREADS};

/// Matches `CodesRange` of `cu/block_codes.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct CodesRange {
    values: Address,
    codes: Address,
    count: u64,
    first_block: u32,
    unused: u32,
}

/// Matches `CodesArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CodesArgs {
    ranges: [CodesRange; CODES_RANGES],
    senders: u64,
    apart: u64,
    used: u32,
    is_fp4: u32,
    adds: u32,
    unused: u32,
}

/// The senders of the codes from which values are restored.
#[derive(Clone, Copy, Debug)]
pub struct Senders {
    /// Number of senders.
    pub count: usize,
    /// Number of bytes from the codes of one sender to those of the next.
    pub apart: usize,
    /// Whether their values are added to the existing values.
    pub adds: bool,
}

/// Values and their codes. Blocks are counted from the first value.
#[derive(Clone, Copy, Debug)]
pub struct Coded {
    /// Device address of the values.
    pub values: Address,
    /// Device address of the scales and codes, [`BlockCodes::bytes`] of the number of values.
    pub codes: Address,
    /// Number of values.
    pub count: u64,
}

/// Maximum number of ranges of one launch.
pub const CODES_RANGES: usize = 120;
/// Number of blocks of elements that a block of threads processes: one per warp.
const BLOCKS: u64 = THREADS as u64 / 32;

/// Writes the scales and codes of values of type `dtype`. Returns `None` without values.
///
/// # Panics
/// Fails if there are more than [`CODES_RANGES`] ranges.
pub fn quantize(dtype: Dtype, codes: BlockCodes, coded: &[Coded]) -> Option<Launch<CodesArgs>> {
    over("quantize", dtype, codes, coded, Senders { count: 0, apart: 0, adds: false })
}

/// Restores values from the scales and codes of `senders`; `coded` has the addresses of the first sender's scales and
/// codes. Adds the values of all senders in f32, in their order, and rounds the sum to `dtype`. Returns `None` without
/// values.
///
/// # Panics
/// Fails if there are more than [`CODES_RANGES`] ranges.
pub fn dequantize(dtype: Dtype, codes: BlockCodes, coded: &[Coded], senders: Senders) -> Option<Launch<CodesArgs>> {
    over("dequantize", dtype, codes, coded, senders)
}

fn over(
    kernel: &str,
    dtype: Dtype,
    codes: BlockCodes,
    coded: &[Coded],
    Senders { count, apart, adds }: Senders,
) -> Option<Launch<CodesArgs>> {
    let mut ranges = [CodesRange::default(); CODES_RANGES];
    let (mut used, mut first_block) = (0, 0);
    for &Coded { values, codes: at, count } in coded.iter().filter(|range| range.count > 0) {
        ranges[used] = CodesRange { values, codes: at, count, first_block, unused: 0 };
        first_block += count.div_ceil(codes.block() as u64).div_ceil(BLOCKS) as u32;
        used += 1;
    }
    let (senders, apart, is_fp4) = (count as u64, apart as u64, u32::from(codes == BlockCodes::Fp4));
    let args = CodesArgs { ranges, senders, apart, used: used as u32, is_fp4, adds: adds.into(), unused: 0 };
    (used > 0).then(|| Launch::new(Source::BlockCodes, kernel, dtype, [first_block, 1, 1], args))
}
