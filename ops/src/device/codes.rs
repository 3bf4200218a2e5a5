//! Block quantization of values in GPU memory, for collectives that send codes.

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Result, bail};
use zero_kernels::block_codes::{self, CODES_RANGES, Coded, Senders};
use zero_optim::BlockCodes;

use super::{Array, Gpu, address, elements_of, kernel_dtype};

const OP: &str = "codes";

/// A range of values, and the offset of its scales and codes in bytes. Blocks are counted from the start of the range.
type CodedRange = (Range<usize>, usize);

/// Writes the scales and codes of ranges of f32, bf16 or f16 values into u8 memory.
///
/// # Errors
/// Fails if values or codes are out of bounds. Returns errors of the driver.
pub fn quantize(codes: BlockCodes, values: &CudaStorage, places: &[CodedRange], to: &mut CudaStorage) -> Result<()> {
    let (gpu, dtype) = (Gpu::new(&values.device)?, kernel_dtype(OP, values.dtype())?);
    for some in coded(codes, values, places, to, 0)?.chunks(CODES_RANGES) {
        // SAFETY: the ranges are within the values, and `to` has room for all codes.
        unsafe { gpu.launch_some(block_codes::quantize(dtype, codes, some)) }?;
    }
    Ok(())
}

/// Restores `len` values of `dtype` from codes.
///
/// # Errors
/// Fails if values or codes are out of bounds, or memory is exhausted. Returns errors of the driver.
pub fn dequantized(
    codes: BlockCodes,
    from: &CudaStorage,
    places: &[CodedRange],
    (dtype, len): (DType, usize),
) -> Result<CudaStorage> {
    let restored = Gpu::new(&from.device)?.room(OP, dtype, len)?;
    restore(codes, from, Senders { count: 1, apart: 0, adds: false }, places, &restored)?;
    Ok(restored)
}

/// Adds the values of several senders to an array, in the order of the senders. The codes of consecutive senders begin
/// `apart` bytes apart; `places` are those of the first sender.
///
/// # Errors
/// Fails in the same cases as [`dequantized`].
pub fn add_codes(
    codes: BlockCodes,
    from: &CudaStorage,
    (senders, apart): (usize, usize),
    places: &[CodedRange],
    to: &mut Array,
) -> Result<()> {
    restore(codes, from, Senders { count: senders, apart, adds: true }, places, to.storage())
}

/// Overwrites or adds to ranges of values.
fn restore(
    codes: BlockCodes,
    from: &CudaStorage,
    senders: Senders,
    places: &[CodedRange],
    to: &CudaStorage,
) -> Result<()> {
    let gpu = Gpu::new(&from.device)?;
    let beyond = senders.count.saturating_sub(1) * senders.apart;
    for some in coded(codes, to, places, from, beyond)?.chunks(CODES_RANGES) {
        let launch = block_codes::dequantize(kernel_dtype(OP, to.dtype())?, codes, some, senders);
        // SAFETY: the ranges are within the values, and every sender's codes are within `from`.
        unsafe { gpu.launch_some(launch) }?;
    }
    Ok(())
}

/// Returns the addresses of ranges of values and of their codes. The codes of the last sender are `beyond` bytes after
/// those of the first.
fn coded(
    codes: BlockCodes,
    values: &CudaStorage,
    places: &[CodedRange],
    bytes: &CudaStorage,
    beyond: usize,
) -> Result<Vec<Coded>> {
    let (first, start, len) = (address(OP, values)?, address(OP, bytes)?, elements_of(values));
    let room = if bytes.dtype() == DType::U8 { elements_of(bytes) } else { 0 };
    let place = |(range, at): &CodedRange| {
        if range.end > len || range.start > range.end {
            bail!("{OP}: the range {range:?} is outside the {len} values");
        }
        let end = at + codes.bytes(range.len()) + beyond;
        if end > room {
            bail!("{OP}: the codes end at byte {end}, beyond the {room} bytes");
        }
        let values = first + (range.start * values.dtype().size_in_bytes()) as u64;
        Ok(Coded { values, codes: start + *at as u64, count: range.len() as u64 })
    };
    places.iter().map(place).collect()
}
