//! From f32 to where parameters are kept in the working dtype, and back.

use std::ops::Range;

use bytemuck::{cast_slice, cast_slice_mut};
use candle_core::{CpuStorage, DType};
use half::{bf16, f16};
use zero_optim::{read_half, rounded, write_half};

use crate::error::ZeroError;
use crate::parameters::not_floats;

/// f32 values as a parameter of `dtype`, f32, bf16 or f16, holds them.
pub fn working(values: Vec<f32>, dtype: DType) -> CpuStorage {
    match dtype {
        DType::BF16 => CpuStorage::BF16(rounded(&values)),
        DType::F16 => CpuStorage::F16(rounded(&values)),
        _ => CpuStorage::F32(values),
    }
}

/// Values of the working dtype as f32.
///
/// # Errors
/// If the storage is none of f32, bf16 and f16.
pub fn to_f32(values: &CpuStorage) -> Result<Vec<f32>, ZeroError> {
    let wide = |len: usize| vec![0.0; len];
    match values {
        CpuStorage::F32(values) => Ok(values.clone()),
        CpuStorage::BF16(rounded) => {
            let mut values = wide(rounded.len());
            read_half(rounded, &mut values)?;
            Ok(values)
        }
        CpuStorage::F16(rounded) => {
            let mut values = wide(rounded.len());
            read_half(rounded, &mut values)?;
            Ok(values)
        }
        _ => Err(not_floats()),
    }
}

/// Writes a master to a part of 16-bit parameters.
pub(crate) fn round_to(master: &[f32], parameters: &mut CpuStorage, at: Range<usize>) -> Result<(), ZeroError> {
    match parameters {
        CpuStorage::BF16(parameters) => write_half(master, &mut parameters[at])?,
        CpuStorage::F16(parameters) => write_half(master, &mut parameters[at])?,
        _ => return Err(ZeroError::internal("a released parameter cannot be updated")),
    }
    Ok(())
}

/// Writes values to a part of parameters of a dtype that lie in a buffer of the disk's.
pub(crate) fn round_bytes(values: &[f32], dtype: DType, bytes: &mut [u8], at: Range<usize>) -> Result<(), ZeroError> {
    match dtype {
        DType::BF16 => write_half(values, &mut cast_slice_mut::<u8, bf16>(bytes)[at])?,
        DType::F16 => write_half(values, &mut cast_slice_mut::<u8, f16>(bytes)[at])?,
        _ => cast_slice_mut::<u8, f32>(bytes)[at].copy_from_slice(values),
    }
    Ok(())
}

/// Reads them.
pub(crate) fn widen_bytes(bytes: &[u8], at: Range<usize>, dtype: DType, values: &mut [f32]) -> Result<(), ZeroError> {
    match dtype {
        DType::BF16 => read_half(&cast_slice::<u8, bf16>(bytes)[at], values)?,
        DType::F16 => read_half(&cast_slice::<u8, f16>(bytes)[at], values)?,
        _ => values.copy_from_slice(&cast_slice::<u8, f32>(bytes)[at]),
    }
    Ok(())
}
