//! Converts tensors to communication buffers and back. Dtypes that communicators do not support travel as bytes.

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use zero_comm::{Buffer, Dtype};

use zero_partition::ZeroError;

use crate::error::Error;

/// Supported dtypes. A dtype's index is its code.
const DTYPES: [DType; 9] =
    [DType::F32, DType::BF16, DType::F16, DType::F64, DType::I64, DType::I32, DType::I16, DType::U32, DType::U8];

/// Returns a dtype's code in an announcement; -1 if the dtype is unsupported.
pub(crate) fn dtype_code(dtype: DType) -> i64 {
    DTYPES.iter().position(|&d| d == dtype).map_or(-1, |code| code as i64)
}

/// Returns the dtype with this code.
pub(crate) fn dtype_of(code: i64) -> Option<DType> {
    DTYPES.get(usize::try_from(code).ok()?).copied()
}

/// Allocates a zeroed buffer for `elements` elements.
pub(crate) fn room(dtype: DType, elements: usize) -> Buffer {
    match dtype {
        DType::F32 => Buffer::zeros(Dtype::F32, elements),
        DType::BF16 => Buffer::zeros(Dtype::Bf16, elements),
        DType::F16 => Buffer::zeros(Dtype::F16, elements),
        DType::I64 => Buffer::zeros(Dtype::I64, elements),
        other => Buffer::zeros(Dtype::U8, elements * other.size_in_bytes()),
    }
}

/// Copies a tensor's elements to a host buffer, in row-major order.
pub(crate) fn buffer_of(tensor: &Tensor) -> Result<Buffer, Error> {
    let tensor = tensor.contiguous()?.to_device(&Device::Cpu)?;
    let (storage, layout) = tensor.storage_and_layout();
    let (start, end) = layout.contiguous_offsets().unwrap_or_default();
    let range = start..end;
    match &*storage {
        Storage::Cpu(CpuStorage::F32(values)) => Ok(Buffer::F32(values[range].to_vec())),
        Storage::Cpu(CpuStorage::BF16(values)) => Ok(Buffer::Bf16(values[range].to_vec())),
        Storage::Cpu(CpuStorage::F16(values)) => Ok(Buffer::F16(values[range].to_vec())),
        Storage::Cpu(CpuStorage::I64(values)) => Ok(Buffer::I64(values[range].to_vec())),
        Storage::Cpu(CpuStorage::U8(values)) => Ok(Buffer::U8(values[range].to_vec())),
        Storage::Cpu(CpuStorage::U32(values)) => Ok(bytes(&values[range], u32::to_le_bytes)),
        Storage::Cpu(CpuStorage::I32(values)) => Ok(bytes(&values[range], i32::to_le_bytes)),
        Storage::Cpu(CpuStorage::I16(values)) => Ok(bytes(&values[range], i16::to_le_bytes)),
        Storage::Cpu(CpuStorage::F64(values)) => Ok(bytes(&values[range], f64::to_le_bytes)),
        _ => Err(Error::Batch(format!(
            "a tensor of dtype {:?} cannot be sent to another pipeline stage",
            tensor.dtype()
        ))),
    }
}

/// Converts a buffer that [`buffer_of`] made to storage of `dtype`.
pub(crate) fn storage_of(buffer: Buffer, dtype: DType) -> Result<CpuStorage, Error> {
    Ok(match (buffer, dtype) {
        (Buffer::F32(values), DType::F32) => CpuStorage::F32(values),
        (Buffer::Bf16(values), DType::BF16) => CpuStorage::BF16(values),
        (Buffer::F16(values), DType::F16) => CpuStorage::F16(values),
        (Buffer::I64(values), DType::I64) => CpuStorage::I64(values),
        (Buffer::U8(values), DType::U8) => CpuStorage::U8(values),
        (Buffer::U8(bytes), DType::U32) => CpuStorage::U32(values(&bytes, u32::from_le_bytes)),
        (Buffer::U8(bytes), DType::I32) => CpuStorage::I32(values(&bytes, i32::from_le_bytes)),
        (Buffer::U8(bytes), DType::I16) => CpuStorage::I16(values(&bytes, i16::from_le_bytes)),
        (Buffer::U8(bytes), DType::F64) => CpuStorage::F64(values(&bytes, f64::from_le_bytes)),
        (other, dtype) => {
            return Err(Error::Zero(ZeroError::Internal(format!(
                "received a buffer of {} for a tensor of {dtype:?}",
                other.dtype()
            ))));
        }
    })
}

fn bytes<T: Copy, const N: usize>(values: &[T], to_bytes: impl Fn(T) -> [u8; N]) -> Buffer {
    Buffer::U8(values.iter().flat_map(|&value| to_bytes(value)).collect())
}

fn values<T, const N: usize>(bytes: &[u8], from_bytes: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks().0.iter().map(|&word| from_bytes(word)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_round_trips() {
        let values = Tensor::arange(0u32, 12, &Device::Cpu).and_then(|t| t.reshape((3, 4))).expect("a tensor");
        for dtype in DTYPES {
            // A view that is not contiguous and has an offset.
            let tensor = values.to_dtype(dtype).and_then(|t| t.narrow(0, 1, 2)).and_then(|t| t.t()).expect("a view");
            let buffer = buffer_of(&tensor).expect("a buffer");
            assert_eq!((buffer.len(), buffer.dtype()), {
                let room = room(dtype, 8);
                (room.len(), room.dtype())
            });
            let back = storage_of(buffer, dtype).expect("storage");
            let back = Tensor::from_storage(Storage::Cpu(back), (4, 2), candle_core::op::BackpropOp::none(), false);
            let numbers =
                |t: &Tensor| t.to_dtype(DType::F64).and_then(|t| t.flatten_all()).and_then(|t| t.to_vec1::<f64>());
            assert_eq!(numbers(&back).expect("numbers"), numbers(&tensor).expect("numbers"));
            assert_eq!(dtype_of(dtype_code(dtype)), Some(dtype));
        }
        assert_eq!((dtype_of(-1), dtype_of(DTYPES.len() as i64)), (None, None));
    }
}
