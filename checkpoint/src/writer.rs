//! Writes a safetensors file in portions and computes its checksums.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use crc32fast::Hasher;
use rustix::io::Errno;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use crate::error::CheckpointError;
use crate::tensors::MAX_HEADER;

/// Size of the write buffer in bytes; larger writes bypass it. Writes go through the page cache, because O_DIRECT is no
/// faster for new files.
pub(crate) const BUFFER: usize = 64 << 10;

/// A file whose header has been written. Tensors are appended in the header's order.
pub(crate) struct TensorWriter {
    path: PathBuf,
    file: BufWriter<File>,
    crc32: Hasher,
    written: u64,
    promised: u64,
}

impl TensorWriter {
    /// Creates a file and writes its header with these tensors, given by name, dtype and shape.
    pub(crate) fn create(
        path: &Path,
        tensors: impl IntoIterator<Item = (String, Dtype, Vec<usize>)>,
        metadata: Option<HashMap<String, String>>,
    ) -> Result<Self, CheckpointError> {
        let mut end = 0usize;
        let info = |(name, dtype, shape): (String, Dtype, Vec<usize>)| {
            let start = end;
            end += shape.iter().product::<usize>() * dtype.bitsize() / 8;
            (name, TensorInfo { dtype, shape, data_offsets: (start, end) })
        };
        let tensors: Vec<_> = tensors.into_iter().map(info).collect();
        let refused = |reason: String| CheckpointError::mismatch(path, reason);
        let metadata = Metadata::new(metadata, tensors).map_err(|e| refused(e.to_string()))?;
        let mut header = serde_json::to_vec(&metadata).map_err(|e| refused(e.to_string()))?;
        // The data begins at a multiple of eight bytes, so that it may be mapped as floats.
        header.resize(header.len().next_multiple_of(8), b' ');
        if header.len() as u64 > MAX_HEADER {
            return Err(refused(format!(
                "the header would have {} bytes; readers accept at most {MAX_HEADER}",
                header.len()
            )));
        }
        let file = File::create(path).map_err(CheckpointError::io(path))?;
        reserve(&file, (8 + header.len() + end) as u64).map_err(CheckpointError::io(path))?;
        let mut writer = Self {
            path: path.to_path_buf(),
            file: BufWriter::with_capacity(BUFFER, file),
            crc32: Hasher::new(),
            written: 0,
            promised: (8 + header.len() + end) as u64,
        };
        writer.write(&(header.len() as u64).to_le_bytes())?;
        writer.write(&header)?;
        Ok(writer)
    }

    /// Appends bytes of the tensors and returns their CRC-32.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<u32, CheckpointError> {
        self.file.write_all(bytes).map_err(CheckpointError::io(&self.path))?;
        let mut part = Hasher::new();
        part.update(bytes);
        // Each byte is hashed once: the file's checksum is combined from the checksums of its parts.
        self.crc32.combine(&part);
        self.written += bytes.len() as u64;
        Ok(part.finalize())
    }

    /// Syncs the file and returns its size in bytes and its CRC-32.
    pub(crate) fn finish(self) -> Result<(u64, u32), CheckpointError> {
        if self.written != self.promised {
            let reason = format!("{} bytes were written, but the header promises {}", self.written, self.promised);
            return Err(CheckpointError::damaged(&self.path, reason));
        }
        let file = self.file.into_inner().map_err(|e| CheckpointError::io(&self.path)(e.into_error()))?;
        file.sync_all().map_err(CheckpointError::io(&self.path))?;
        Ok((self.written, self.crc32.finalize()))
    }
}

/// Reserves space where the file system can, so that a full disk fails before anything is written.
fn reserve(file: &File, bytes: u64) -> std::io::Result<()> {
    match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, bytes) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(()),
        other => other.map_err(Into::into),
    }
}
