//! Block quantization of values in GPU memory, for collectives that send codes.

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Result, bail};
use zero_kernels::block_codes::{self, CODES_RANGES, Coded, Senders};
use zero_optim::BlockCodes;

use super::{Array, Gpu, address, elements_of, kernel_dtype};

const OP: &str = "codes";

/// Writes the scales and codes of ranges of f32, bf16 or f16 values, one range after the other, as u8. Blocks are
/// counted from the start of each range.
///
/// # Errors
/// Fails if a range is out of bounds or memory is exhausted. Returns errors of the driver.
pub fn quantized(codes: BlockCodes, values: &CudaStorage, ranges: &[Range<usize>]) -> Result<CudaStorage> {
    let bytes = ranges.iter().map(|range| codes.bytes(range.len())).sum();
    let (gpu, dtype) = (Gpu::new(&values.device)?, kernel_dtype(OP, values.dtype())?);
    let written = gpu.room(OP, DType::U8, bytes)?;
    for some in coded(codes, values, ranges, &written)?.chunks(CODES_RANGES) {
        // SAFETY: the ranges are within the values, and `written` has room for all codes.
        unsafe { gpu.launch_some(block_codes::quantize(dtype, codes, some)) }?;
    }
    Ok(written)
}

/// Restores `len` values of `dtype` from the codes of ranges, which follow each other.
///
/// # Errors
/// Fails if a range is out of bounds, codes are missing, or memory is exhausted. Returns errors of the driver.
pub fn dequantized(
    codes: BlockCodes,
    from: &CudaStorage,
    ranges: &[Range<usize>],
    (dtype, len): (DType, usize),
) -> Result<CudaStorage> {
    let restored = Gpu::new(&from.device)?.room(OP, dtype, len)?;
    restore(codes, from, (1, false), ranges, &restored)?;
    Ok(restored)
}

/// Adds the values of several senders to an array, in the order of the senders. Each sender's part of `from` has the
/// codes of the ranges, one range after the other.
///
/// # Errors
/// Fails in the same cases as [`dequantized`].
pub fn add_codes(
    codes: BlockCodes,
    from: &CudaStorage,
    senders: usize,
    ranges: &[Range<usize>],
    to: &mut Array,
) -> Result<()> {
    restore(codes, from, (senders, true), ranges, to.storage())
}

/// Overwrites or adds to ranges of values.
fn restore(
    codes: BlockCodes,
    from: &CudaStorage,
    (senders, adds): (usize, bool),
    ranges: &[Range<usize>],
    to: &CudaStorage,
) -> Result<()> {
    let apart: usize = ranges.iter().map(|range| codes.bytes(range.len())).sum();
    if from.dtype() != DType::U8 || elements_of(from) < senders * apart {
        bail!("{OP}: {senders} senders need {} bytes, got {}", senders * apart, elements_of(from));
    }
    let gpu = Gpu::new(&from.device)?;
    for some in coded(codes, to, ranges, from)?.chunks(CODES_RANGES) {
        let senders = Senders { count: senders, apart, adds };
        let launch = block_codes::dequantize(kernel_dtype(OP, to.dtype())?, codes, some, senders);
        // SAFETY: the ranges are within the values, and every sender's codes are within `from`.
        unsafe { gpu.launch_some(launch) }?;
    }
    Ok(())
}

/// Returns the places of ranges of values, and of their codes.
fn coded(codes: BlockCodes, values: &CudaStorage, ranges: &[Range<usize>], bytes: &CudaStorage) -> Result<Vec<Coded>> {
    let (first, mut at, len) = (address(OP, values)?, address(OP, bytes)?, elements_of(values));
    let place = |range: &Range<usize>| {
        if range.end > len || range.start > range.end {
            bail!("{OP}: the range {range:?} is outside the {len} values");
        }
        let values = first + (range.start * values.dtype().size_in_bytes()) as u64;
        let coded = Coded { values, codes: at, count: range.len() as u64 };
        at += codes.bytes(range.len()) as u64;
        Ok(coded)
    };
    ranges.iter().map(place).collect()
}
