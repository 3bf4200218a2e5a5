//! A safetensors file of which ranges are read, without loading it.
//!
//! Nothing in the file is trusted: the header's length has a bound, its offsets must fit the shapes (`safetensors`
//! checks that), and a read beyond the end is an error.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crc32fast::Hasher;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use crate::error::CheckpointError;

/// A header larger than this is refused before it is read, and never written: the limit of the safetensors libraries.
pub(crate) const MAX_HEADER: u64 = 100_000_000;
/// Bytes that are read at a time where a tensor is read as a whole.
const PORTION: usize = 1 << 20;

/// An open safetensors file.
pub(crate) struct TensorFile {
    pub(crate) path: PathBuf,
    pub(crate) metadata: Metadata,
    /// Of length and header.
    pub(crate) header_crc32: Hasher,
    file: File,
    /// Where the data begin in the file.
    pub(crate) data_start: u64,
}

impl TensorFile {
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = File::open(path).map_err(CheckpointError::io(path))?;
        let mut prefix = [0; 8];
        file.read_exact_at(&mut prefix, 0).map_err(CheckpointError::io(path))?;
        let length = u64::from_le_bytes(prefix);
        let size = file.metadata().map_err(CheckpointError::io(path))?.len();
        if length > MAX_HEADER || length > size.saturating_sub(8) {
            return Err(CheckpointError::damaged(path, format!("its header claims {length} bytes of {size}")));
        }
        let mut header = vec![0; length as usize];
        file.read_exact_at(&mut header, 8).map_err(CheckpointError::io(path))?;
        let metadata: Metadata =
            serde_json::from_slice(&header).map_err(|e| CheckpointError::damaged(path, e.to_string()))?;
        let mut header_crc32 = Hasher::new();
        header_crc32.update(&prefix);
        header_crc32.update(&header);
        Ok(Self { path: path.to_path_buf(), metadata, header_crc32, file, data_start: 8 + length })
    }

    /// A one-dimensional tensor of so many f32.
    pub(crate) fn floats(&self, tensor: &str, elements: usize) -> Result<&TensorInfo, CheckpointError> {
        let info = self.info(tensor)?;
        if info.dtype != Dtype::F32 || info.shape != [elements] {
            let reason = format!("`{tensor}` is {:?} {:?}, not F32 [{elements}]", info.dtype, info.shape);
            return Err(CheckpointError::damaged(&self.path, reason));
        }
        Ok(info)
    }

    /// Where a tensor ends in the file.
    pub(crate) fn end(&self, info: &TensorInfo) -> u64 {
        self.data_start + info.data_offsets.1 as u64
    }

    /// Reads a tensor as a whole, a portion of whole elements at a time; gives the checksum of its bytes.
    pub(crate) fn portions(
        &self,
        info: &TensorInfo,
        mut take: impl FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<Hasher, CheckpointError> {
        let (start, end) = info.data_offsets;
        let mut crc32 = Hasher::new();
        let mut buffer = vec![0; PORTION.min(end - start)];
        for at in (start..end).step_by(PORTION) {
            let bytes = &mut buffer[..PORTION.min(end - at)];
            self.file.read_exact_at(bytes, self.data_start + at as u64).map_err(CheckpointError::io(&self.path))?;
            crc32.update(bytes);
            take(bytes)?;
        }
        Ok(crc32)
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
