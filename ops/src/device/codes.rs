//! Block quantization of values in GPU memory, for collectives that send codes.

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Result, bail};
use zero_kernels::block_codes::{self, CODES_RANGES, Coded};
use zero_optim::BlockCodes;

use super::{Gpu, address, elements_of, kernel_dtype};

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

/// Restores `len` values of `dtype` from the codes of several senders. Each sender's part of `from` has the codes of the
/// ranges, one range after the other. Adds the values of the senders in f32, in their order, and rounds the sum.
///
/// # Errors
/// Fails if a range is out of bounds, the number of bytes is wrong, or memory is exhausted. Returns errors of the driver.
pub fn dequantized(
    codes: BlockCodes,
    from: &CudaStorage,
    senders: usize,
    ranges: &[Range<usize>],
    (dtype, len): (DType, usize),
) -> Result<CudaStorage> {
    let apart: usize = ranges.iter().map(|range| codes.bytes(range.len())).sum();
    if from.dtype() != DType::U8 || elements_of(from) < senders * apart {
        bail!("{OP}: {senders} senders need {} bytes, got {}", senders * apart, elements_of(from));
    }
    let gpu = Gpu::new(&from.device)?;
    let restored = gpu.room(OP, dtype, len)?;
    for some in coded(codes, &restored, ranges, from)?.chunks(CODES_RANGES) {
        let launch = block_codes::dequantize(kernel_dtype(OP, dtype)?, codes, some, [senders, apart]);
        // SAFETY: the ranges are within the values, and every sender's codes are within `from`.
        unsafe { gpu.launch_some(launch) }?;
    }
    Ok(restored)
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
