//! Converts between f32 and the working dtype of parameters, on the threads that run operations.

use std::borrow::Cow;
use std::ops::Range;

use bytemuck::{cast_slice, cast_slice_mut};
use candle_core::{CpuStorage, DType};
use half::{bf16, f16};

use crate::error::ZeroError;
use crate::storage::not_floats;
use crate::threads::{round_into, rounded, widen};

/// Rounds f32 values to `dtype`: f32, bf16 or f16.
pub fn working<'a>(values: impl Into<Cow<'a, [f32]>>, dtype: DType) -> CpuStorage {
    let values = values.into();
    match dtype {
        DType::BF16 => CpuStorage::BF16(rounded(&values)),
        DType::F16 => CpuStorage::F16(rounded(&values)),
        _ => CpuStorage::F32(values.into_owned()),
    }
}

/// Converts values of the working dtype to f32.
///
/// # Errors
/// Fails if the storage is not f32, bf16 or f16.
pub fn to_f32(values: &CpuStorage) -> Result<Vec<f32>, ZeroError> {
    let wide = |len: usize| vec![0.0; len];
    match values {
        CpuStorage::F32(values) => Ok(values.clone()),
        CpuStorage::BF16(rounded) => {
            let mut values = wide(rounded.len());
            widen(rounded, &mut values)?;
            Ok(values)
        }
        CpuStorage::F16(rounded) => {
            let mut values = wide(rounded.len());
            widen(rounded, &mut values)?;
            Ok(values)
        }
        _ => Err(not_floats()),
    }
}

/// Rounds master values into a range of 16-bit parameters.
pub(crate) fn round_to(master: &[f32], parameters: &mut CpuStorage, at: Range<usize>) -> Result<(), ZeroError> {
    match parameters {
        CpuStorage::BF16(parameters) => round_into(master, &mut parameters[at])?,
        CpuStorage::F16(parameters) => round_into(master, &mut parameters[at])?,
        _ => return Err(ZeroError::internal("a released parameter cannot be updated")),
    }
    Ok(())
}

/// Rounds values into a range of parameters of `dtype` in a disk buffer.
pub(crate) fn round_bytes(values: &[f32], dtype: DType, bytes: &mut [u8], at: Range<usize>) -> Result<(), ZeroError> {
    match dtype {
        DType::BF16 => round_into(values, &mut cast_slice_mut::<u8, bf16>(bytes)[at])?,
        DType::F16 => round_into(values, &mut cast_slice_mut::<u8, f16>(bytes)[at])?,
        _ => cast_slice_mut::<u8, f32>(bytes)[at].copy_from_slice(values),
    }
    Ok(())
}

/// Converts a range of parameters of `dtype` in a disk buffer to f32.
pub(crate) fn widen_bytes(bytes: &[u8], at: Range<usize>, dtype: DType, values: &mut [f32]) -> Result<(), ZeroError> {
    match dtype {
        DType::BF16 => widen(&cast_slice::<u8, bf16>(bytes)[at], values)?,
        DType::F16 => widen(&cast_slice::<u8, f16>(bytes)[at], values)?,
        _ => values.copy_from_slice(&cast_slice::<u8, f32>(bytes)[at]),
    }
    Ok(())
}
