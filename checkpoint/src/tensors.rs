//! Reads ranges of a safetensors file without loading it.
//!
//! Nothing in the file is trusted: the length of the header is bounded, its offsets must match the shapes (checked by
//! `safetensors`), and a read past the end is an error.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crc32fast::Hasher;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::error::CheckpointError;

/// Maximum size of a header in bytes. A larger header is neither read nor written. The safetensors libraries accept
/// headers of 100 MB, which take seconds and a gigabyte of memory to parse. The headers of the largest models have less
/// than one megabyte.
pub(crate) const MAX_HEADER: u64 = 16 << 20;
/// Maximum number of tensors in a file.
const MAX_TENSORS: usize = 65_536;
/// The first bytes of the text file that `git clone` leaves in place of a large file if Git LFS is not installed. Read
/// as the length of a header, these bytes are far above [`MAX_HEADER`].
const LFS_POINTER: &[u8; 8] = b"version ";
/// Number of bytes read at a time when a whole tensor is read.
const PORTION: usize = 1 << 20;

/// An open safetensors file.
pub(crate) struct TensorFile {
    pub(crate) path: PathBuf,
    pub(crate) metadata: Metadata,
    /// CRC-32 of the length prefix and the header.
    pub(crate) header_crc32: Hasher,
    file: File,
    /// Offset at which the data begins.
    pub(crate) data_start: u64,
}

/// Parses the header of a safetensors file. Rejects duplicate names, because readers disagree on which tensor such a
/// name denotes.
pub(crate) fn parse(header: &[u8]) -> Result<Metadata, String> {
    let Names(names) = serde_json::from_slice(header).map_err(|e| e.to_string())?;
    if names.len() > MAX_TENSORS {
        return Err(format!("the header lists {} tensors; at most {MAX_TENSORS} are supported", names.len()));
    }
    serde_json::from_slice(header).map_err(|e| e.to_string())
}

/// The keys of a JSON object, without duplicates.
struct Names(BTreeSet<String>);

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = Names;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object with one entry per tensor")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Names, A::Error> {
                let mut names = BTreeSet::new();
                while let Some((name, IgnoredAny)) = map.next_entry::<String, IgnoredAny>()? {
                    if let Some(name) = names.replace(name) {
                        return Err(serde::de::Error::custom(format!("the header lists `{name}` twice")));
                    }
                }
                Ok(Names(names))
            }
        }
        deserializer.deserialize_map(Keys)
    }
}

impl TensorFile {
    /// Opens a file that this library has written. Rejects symbolic links, which it never creates.
    pub(crate) fn open_own(path: &Path) -> Result<Self, CheckpointError> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(file) => Self::of(path, file.into()),
            Err(Errno::LOOP) => Err(CheckpointError::damaged(path, "the file is a symbolic link")),
            Err(errno) => Err(CheckpointError::io(path)(errno.into())),
        }
    }

    /// Opens a file of another program. Rejects a truncated file, and one with bytes after the last tensor, before any
    /// tensor is read.
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = Self::of(path, File::open(path).map_err(CheckpointError::io(path))?)?;
        let size = file.file.metadata().map_err(CheckpointError::io(path))?.len();
        let needed = file.data_start.saturating_add(file.metadata.data_len() as u64);
        if size != needed {
            let reason = format!("the file has {size} bytes, but its header describes {needed}; copy it again");
            return Err(CheckpointError::damaged(path, reason));
        }
        Ok(file)
    }

    fn of(path: &Path, file: File) -> Result<Self, CheckpointError> {
        let mut prefix = [0; 8];
        file.read_exact_at(&mut prefix, 0).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => CheckpointError::damaged(path, "the file is empty, or too short for a header"),
            _ => CheckpointError::io(path)(error),
        })?;
        if prefix == *LFS_POINTER {
            let reason = "the file is a Git LFS pointer instead of the weights; run `git lfs pull` in its folder";
            return Err(CheckpointError::refused(path, reason));
        }
        let length = u64::from_le_bytes(prefix);
        let size = file.metadata().map_err(CheckpointError::io(path))?.len();
        if length > MAX_HEADER || length > size.saturating_sub(8) {
            return Err(CheckpointError::damaged(
                path,
                format!("the header claims to have {length} bytes, but the file has {size}"),
            ));
        }
        let mut header = vec![0; length as usize];
        file.read_exact_at(&mut header, 8).map_err(CheckpointError::io(path))?;
        let metadata = parse(&header).map_err(|reason| CheckpointError::damaged(path, reason))?;
        let mut header_crc32 = Hasher::new();
        header_crc32.update(&prefix);
        header_crc32.update(&header);
        Ok(Self { path: path.to_path_buf(), metadata, header_crc32, file, data_start: 8 + length })
    }

    /// Returns a tensor after checking that it is a one-dimensional tensor of `elements` elements of this type.
    pub(crate) fn piece(&self, tensor: &str, dtype: Dtype, elements: usize) -> Result<&TensorInfo, CheckpointError> {
        let info = self.info(tensor)?;
        if info.dtype != dtype || info.shape != [elements] {
            let reason = format!("`{tensor}` is {:?} {:?}, not {dtype:?} [{elements}]", info.dtype, info.shape);
            return Err(CheckpointError::damaged(&self.path, reason));
        }
        Ok(info)
    }

    /// Returns the file offset at which a tensor ends.
    pub(crate) fn end(&self, info: &TensorInfo) -> u64 {
        self.data_start + info.data_offsets.1 as u64
    }

    /// Reads a whole tensor in portions of whole elements. Returns the checksum of its bytes.
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

    /// Reads `out.len()` bytes of a tensor that [`TensorFile::piece`] has checked, starting at byte `start`.
    pub(crate) fn read_bytes(&self, info: &TensorInfo, start: usize, out: &mut [u8]) -> Result<(), CheckpointError> {
        let at = self.data_start + (info.data_offsets.0 + start) as u64;
        self.file.read_exact_at(out, at).map_err(CheckpointError::io(&self.path))
    }

    /// Reads `out.len()` elements of a float tensor, starting at index `start`, and converts them to f32.
    pub(crate) fn read(&self, tensor: &str, start: usize, out: &mut [f32]) -> Result<(), CheckpointError> {
        let info = self.info(tensor)?;
        let elements: usize = info.shape.iter().product();
        if start.checked_add(out.len()).is_none_or(|end| end > elements) {
            let reason = format!(
                "`{tensor}` has {elements} elements, but {} elements starting at element {start} are needed",
                out.len()
            );
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
            other => {
                return Err(CheckpointError::mismatch(
                    &self.path,
                    format!("`{tensor}` is {other:?}, not a float type"),
                ));
            }
        };
        for (value, bits) in out.iter_mut().zip(bits) {
            *value = widen(bits);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: usize) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file.safetensors");
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; data]].concat();
        std::fs::write(&path, bytes).unwrap();
        (folder, path)
    }

    fn refused(header: &str, data: usize) -> String {
        let (_folder, path) = file(header, data);
        TensorFile::open(&path).err().expect("a header that must be refused").to_string()
    }

    #[test]
    fn malformed_headers_are_refused() {
        let tensor = |name: &str, start: usize| {
            format!(r#""{name}":{{"dtype":"F32","shape":[2],"data_offsets":[{start},{}]}}"#, start + 8)
        };
        assert!(TensorFile::open(&file(&format!("{{{},{}}}", tensor("a", 0), tensor("b", 8)), 16).1).is_ok());
        let twice = refused(&format!("{{{},{}}}", tensor("a", 0), tensor("a", 8)), 16);
        assert!(twice.contains("the header lists `a` twice"), "{twice}");
        assert!(refused("[]", 0).contains("damaged") && refused("{", 0).contains("damaged"));
        let many: Vec<String> =
            (0..=MAX_TENSORS).map(|i| format!(r#""{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#)).collect();
        assert!(refused(&format!("{{{}}}", many.join(",")), 0).contains("65537 tensors"));
        let large = format!("{{{}{}}}", tensor("a", 0), " ".repeat(MAX_HEADER as usize));
        assert!(refused(&large, 8).contains("the header claims"));
        // The safetensors library detects overlapping offsets and offsets that do not match the shape.
        assert!(refused(&format!("{{{},{}}}", tensor("a", 0), tensor("b", 4)), 12).contains("damaged"));
        assert!(refused(r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#, 8).contains("damaged"));
    }

    #[test]
    fn files_of_another_length_and_lfs_pointers_are_refused() {
        let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
        for data in [7, 9] {
            let (size, needed) = (8 + header.len() + data, 8 + header.len() + 8);
            let said = refused(header, data);
            assert!(said.contains(&format!("the file has {size} bytes, but its header describes {needed}")), "{said}");
        }
        let (_folder, path) = file("", 0);
        std::fs::write(&path, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 8\n").unwrap();
        let said = TensorFile::open(&path).err().expect("a pointer").to_string();
        assert!(said.contains("run `git lfs pull`"), "{said}");
    }

    #[test]
    fn symbolic_links_are_refused() {
        let (folder, path) = file("{}", 0);
        assert!(TensorFile::open_own(&path).is_ok());
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let said = TensorFile::open_own(&link).err().expect("a link").to_string();
        assert!(said.contains("symbolic link"), "{said}");
    }
}
