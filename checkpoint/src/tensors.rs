//! A safetensors file of which ranges are read, without loading it.
//!
//! Nothing in the file is trusted: the header's length has a bound, its offsets must fit the shapes (`safetensors`
//! checks that), and a read beyond the end is an error.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use crate::error::CheckpointError;

/// A header larger than this is refused before it is read.
const MAX_HEADER: u64 = 16 << 20;

/// An open safetensors file.
pub(crate) struct TensorFile {
    pub(crate) path: PathBuf,
    pub(crate) metadata: Metadata,
    file: File,
    data_start: u64,
}

impl TensorFile {
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = File::open(path).map_err(CheckpointError::io(path))?;
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0).map_err(CheckpointError::io(path))?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER {
            return Err(CheckpointError::damaged(path, format!("its header claims {length} bytes")));
        }
        let mut header = vec![0; length as usize];
        file.read_exact_at(&mut header, 8).map_err(CheckpointError::io(path))?;
        let metadata: Metadata =
            serde_json::from_slice(&header).map_err(|e| CheckpointError::damaged(path, e.to_string()))?;
        Ok(Self { path: path.to_path_buf(), metadata, file, data_start: 8 + length })
    }

    pub(crate) fn info(&self, tensor: &str) -> Result<&TensorInfo, CheckpointError> {
        let missing = || CheckpointError::damaged(&self.path, format!("`{tensor}` is missing"));
        self.metadata.info(tensor).ok_or_else(missing)
    }

    /// Elements of a float tensor from the one with index `start` on, as many as `out` holds.
    pub(crate) fn read(&self, tensor: &str, start: usize, out: &mut [f32]) -> Result<(), CheckpointError> {
        let info = self.info(tensor)?;
        let elements: usize = info.shape.iter().product();
        if start.checked_add(out.len()).is_none_or(|end| end > elements) {
            let reason = format!("`{tensor}` has {elements} elements, not {start} and {} more", out.len());
            return Err(CheckpointError::damaged(&self.path, reason));
        }
        let at = |width: usize| self.data_start + (info.data_offsets.0 + start * width) as u64;
        let read = |bytes: &mut [u8], at| self.file.read_exact_at(bytes, at).map_err(CheckpointError::io(&self.path));
        if info.dtype == Dtype::F32 {
            return read(bytemuck::cast_slice_mut(out), at(4));
        }
        let mut bits = vec![0u16; out.len()];
        read(bytemuck::cast_slice_mut(&mut bits), at(2))?;
        let widen: fn(u16) -> f32 = match info.dtype {
            Dtype::BF16 => |bits| half::bf16::from_bits(bits).to_f32(),
            Dtype::F16 => |bits| half::f16::from_bits(bits).to_f32(),
            other => return Err(CheckpointError::mismatch(&self.path, format!("`{tensor}` is {other:?}, no float"))),
        };
        for (value, bits) in out.iter_mut().zip(bits) {
            *value = widen(bits);
        }
        Ok(())
    }
}
