//! The data of an operation: an owned vector of one element type.
//!
//! An operation takes its buffers by value and returns them when it is done. Therefore, no other code can read or free
//! memory that a worker or a peer is still using, and no copy is needed to hand over data. The vector is in host memory
//! or, in groups with devices, in the memory of a device.

use half::{bf16, f16};

use crate::buffers::dtype::Dtype;
use crate::device::DeviceBuffer;
use crate::error::CommError;

/// An owned vector of one of the supported element types.
#[derive(Debug, Clone, PartialEq)]
pub enum Buffer {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// Brain floats; sums are computed in f32 and rounded once.
    Bf16(Vec<bf16>),
    /// IEEE half floats; sums are computed in f32 and rounded once.
    F16(Vec<f16>),
    /// 64-bit integers; sums wrap.
    I64(Vec<i64>),
    /// Bytes; sums wrap.
    U8(Vec<u8>),
    /// Values of one of these types in the memory of a device, for groups created by
    /// [`Communicator::with_devices`](crate::Communicator::with_devices).
    Device(DeviceBuffer),
}

macro_rules! for_each_dtype {
    ($buffer:expr, $vector:ident => $value:expr, $device:ident => $elsewhere:expr) => {
        match $buffer {
            Buffer::Device($device) => $elsewhere,
            Buffer::F32($vector) => $value,
            Buffer::Bf16($vector) => $value,
            Buffer::F16($vector) => $value,
            Buffer::I64($vector) => $value,
            Buffer::U8($vector) => $value,
        }
    };
}

impl Buffer {
    /// Creates a buffer of `len` zeros.
    pub fn zeros(dtype: Dtype, len: usize) -> Buffer {
        match dtype {
            Dtype::F32 => Buffer::F32(vec![0.0; len]),
            Dtype::Bf16 => Buffer::Bf16(vec![bf16::ZERO; len]),
            Dtype::F16 => Buffer::F16(vec![f16::ZERO; len]),
            Dtype::I64 => Buffer::I64(vec![0; len]),
            Dtype::U8 => Buffer::U8(vec![0; len]),
        }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        for_each_dtype!(self, vector => vector.len(), device => device.memory().len())
    }

    /// Returns whether the buffer has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the element type.
    pub fn dtype(&self) -> Dtype {
        match self {
            Buffer::F32(_) => Dtype::F32,
            Buffer::Bf16(_) => Dtype::Bf16,
            Buffer::F16(_) => Dtype::F16,
            Buffer::I64(_) => Dtype::I64,
            Buffer::U8(_) => Dtype::U8,
            Buffer::Device(device) => device.memory().dtype(),
        }
    }

    /// Returns the size of all elements in bytes.
    pub fn size_bytes(&self) -> usize {
        self.len() * self.dtype().size()
    }

    /// Returns whether the values are in the memory of a device.
    pub fn is_on_device(&self) -> bool {
        matches!(self, Buffer::Device(_))
    }

    /// Returns the elements as bytes in native byte order.
    ///
    /// # Panics
    /// Panics if the values are in the memory of a device.
    pub fn as_bytes(&self) -> &[u8] {
        for_each_dtype!(self, vector => bytemuck::cast_slice(vector), device => elsewhere(device))
    }

    /// Returns the elements as mutable bytes in native byte order.
    ///
    /// # Panics
    /// Panics if the values are in the memory of a device.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        for_each_dtype!(self, vector => bytemuck::cast_slice_mut(vector), device => elsewhere(device))
    }
}

fn elsewhere(device: &DeviceBuffer) -> ! {
    panic!("{device:?} is not in host memory; copy it with DeviceMemory::to_host")
}

macro_rules! element {
    ($type:ty, $variant:ident, $into:ident, $as_ref:ident, $name:literal) => {
        impl From<Vec<$type>> for Buffer {
            fn from(vector: Vec<$type>) -> Buffer {
                Buffer::$variant(vector)
            }
        }

        impl TryFrom<Buffer> for Vec<$type> {
            type Error = CommError;

            fn try_from(buffer: Buffer) -> Result<Self, CommError> {
                buffer.$into()
            }
        }

        impl Buffer {
            #[doc = concat!("Returns the vector of ", $name, ", or [`CommError::Dtype`] or [`CommError::OnDevice`].")]
            pub fn $into(self) -> Result<Vec<$type>, CommError> {
                match self {
                    Buffer::$variant(vector) => Ok(vector),
                    Buffer::Device(device) => Err(CommError::OnDevice { device: device.memory().device() }),
                    other => Err(CommError::Dtype { expected: Dtype::$variant, found: other.dtype() }),
                }
            }

            #[doc = concat!("Returns the elements as a slice of ", $name, "; `None` for another type or on a device.")]
            pub fn $as_ref(&self) -> Option<&[$type]> {
                match self {
                    Buffer::$variant(vector) => Some(vector),
                    _ => None,
                }
            }
        }
    };
}

element!(f32, F32, into_f32, as_f32, "f32");
element!(bf16, Bf16, into_bf16, as_bf16, "bf16");
element!(f16, F16, into_f16, as_f16, "f16");
element!(i64, I64, into_i64, as_i64, "i64");
element!(u8, U8, into_u8, as_u8, "u8");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_report_their_size_and_return_their_vector() {
        for dtype in Dtype::ALL {
            let buffer = Buffer::zeros(dtype, 7);
            assert_eq!((buffer.len(), buffer.dtype(), buffer.size_bytes()), (7, dtype, 7 * dtype.size()));
            assert_eq!(buffer.as_bytes().len(), buffer.size_bytes());
            assert_eq!(Dtype::from_code(dtype as u8), Some(dtype));
        }
        assert_eq!(Buffer::from(vec![1.5f32]).into_f32(), Ok(vec![1.5]));
        let error = Buffer::from(vec![1u8]).into_f32();
        assert_eq!(error, Err(CommError::Dtype { expected: Dtype::F32, found: Dtype::U8 }));
    }
}
