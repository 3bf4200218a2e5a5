//! Shards of mosaicml-streaming (MDS, version 2).
//!
//! A shard begins with the number n of its samples and n + 1 offsets, all u32. A description of the columns and the
//! samples follow. A sample begins with the sizes (u32) of its variable-size columns. The values of all columns follow.
//! All numbers are little-endian. A shard is smaller than 4 GiB and is read into memory completely.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use sha1::Sha1;
use sha2::{Digest, Sha224, Sha256, Sha384, Sha512};
use twox_hash::{XxHash3_64, XxHash3_128, XxHash32, XxHash64};
use zero_engine::{At, DataError};

use super::archive::Archive;
use super::encoding::Encoding;
use super::folder::inside;
use crate::data::fingerprint;

/// The description of a shard in `index.json`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct Entry {
    format: String,
    column_names: Vec<String>,
    column_encodings: Vec<String>,
    column_sizes: Vec<Option<u32>>,
    compression: Option<String>,
    samples: u64,
    raw_data: Stored,
    zip_data: Option<Stored>,
}

/// A file of a shard.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Stored {
    basename: String,
    bytes: u64,
    #[serde(default)]
    hashes: BTreeMap<String, String>,
}

/// A shard and its file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Shard {
    /// The file that is read: the raw file if it exists, or else the compressed file.
    pub(super) path: PathBuf,
    entry: Entry,
    encodings: Vec<Encoding>,
    packing: Option<Packing>,
}

/// The compression of a shard.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Packing {
    Archive(Archive),
    Brotli,
    /// One raw Snappy block, without Snappy's frame format.
    Snappy,
}

impl Packing {
    /// Returns the compression with this name in an index. Ignores the level.
    fn of(compression: &str) -> Option<Self> {
        Some(match compression.split(':').next()? {
            "br" => Self::Brotli,
            "bz2" => Self::Archive(Archive::Bzip2),
            "gz" => Self::Archive(Archive::Gzip),
            "snappy" => Self::Snappy,
            "zstd" => Self::Archive(Archive::Zstd),
            _ => return None,
        })
    }

    fn name(self) -> &'static str {
        match self {
            Self::Archive(archive) => archive.name(),
            Self::Brotli => "Brotli archive",
            Self::Snappy => "Snappy archive",
        }
    }

    /// Decompresses and appends at most `limit` bytes.
    fn unpack(self, packed: Vec<u8>, limit: u64, bytes: &mut Vec<u8>) -> io::Result<()> {
        let mut reader: Box<dyn Read> = match self {
            Self::Archive(archive) => archive.unpack(Cursor::new(packed))?,
            Self::Brotli => Box::new(brotli_decompressor::Decompressor::new(Cursor::new(packed), 1 << 16)),
            Self::Snappy => {
                let stated = snap::raw::decompress_len(&packed)?;
                if stated as u64 > limit {
                    return Err(io::Error::other(format!("its header states {stated} bytes")));
                }
                *bytes = snap::raw::Decoder::new().decompress_vec(&packed)?;
                return Ok(());
            }
        };
        reader.by_ref().take(limit).read_to_end(bytes).map(drop)
    }
}

impl Shard {
    /// Checks an entry of the index of `folder`, and chooses the file to read.
    pub(super) fn new(folder: &Path, entry: Entry) -> Result<Self, String> {
        let Entry { format, column_names, column_encodings, column_sizes, samples, raw_data, zip_data, .. } = &entry;
        if format != "mds" {
            return Err(format!("shards in the format `{format}` are unsupported; only `mds` is supported"));
        }
        if column_names.len() != column_encodings.len() || column_names.len() != column_sizes.len() {
            return Err("a shard lists different numbers of column names, encodings and sizes".into());
        }
        // The number n of samples and the n + 1 offsets take 4·(n + 2) bytes, and no offset is above 4 GiB.
        if raw_data.bytes > u64::from(u32::MAX) || *samples > raw_data.bytes / 4 {
            return Err(format!("a shard cannot hold {samples} samples in {} bytes", raw_data.bytes));
        }
        let raw = inside(folder, &raw_data.basename)?;
        let (path, packing) = match zip_data {
            Some(zip) if !raw.is_file() => {
                let compression = entry.compression.as_deref().unwrap_or("none");
                let packing = Packing::of(compression).ok_or_else(|| {
                    format!(
                        "the compression `{compression}` is unsupported; `br`, `bz2`, `gz`, `snappy`, `zstd` and none are \
                         supported"
                    )
                })?;
                (inside(folder, &zip.basename)?, Some(packing))
            }
            _ => (raw, None),
        };
        let encodings = column_encodings.iter().map(|name| Encoding::parse(name)).collect();
        Ok(Self { path, encodings, packing, entry })
    }

    /// Returns the name and the encoding of each column.
    pub(super) fn columns(&self) -> impl Iterator<Item = (&str, &Encoding)> {
        self.entry.column_names.iter().map(String::as_str).zip(&self.encodings)
    }

    /// Returns a text with the names, the encodings and the sizes of the columns.
    pub(super) fn layout(&self) -> String {
        let Entry { column_names, column_encodings, column_sizes, .. } = &self.entry;
        format!("{column_names:?} {column_encodings:?} {column_sizes:?}")
    }

    /// Returns the encoding of the column with this index, which must exist.
    pub(super) fn encoding(&self, column: usize) -> &Encoding {
        &self.encodings[column]
    }

    /// Returns the name of a column's encoding in the index.
    pub(super) fn encoding_name(&self, column: usize) -> &str {
        &self.entry.column_encodings[column]
    }

    /// Returns the index of a column.
    pub(super) fn column(&self, name: &str) -> Result<usize, DataError> {
        let index = self.columns().position(|(column, _)| column == name);
        index.ok_or_else(|| DataError::Column {
            path: self.path.clone(),
            column: name.into(),
            columns: self.entry.column_names.clone(),
        })
    }

    fn damaged(&self, at: Option<At>, message: impl Into<String>) -> DataError {
        DataError::Damaged { path: self.path.clone(), at, message: message.into() }
    }

    /// Reads and decompresses the shard. Checks its length and its checksums.
    pub(super) fn load(&self) -> Result<Samples, DataError> {
        let check = |bytes: &[u8], stored: &Stored| {
            if bytes.len() as u64 != stored.bytes {
                let message = format!("{} bytes, but index.json states {}", bytes.len(), stored.bytes);
                return Err(self.damaged(None, message));
            }
            match stored.hashes.iter().find(|(name, hash)| hex(name, bytes).is_some_and(|found| found != **hash)) {
                Some((name, _)) => {
                    Err(self.damaged(None, format!("the {name} checksum differs from the checksum in index.json")))
                }
                None => Ok(()),
            }
        };
        let failed_io = || DataError::io(&self.path);
        let bytes = match (self.packing, &self.entry.zip_data) {
            (Some(packing), Some(zip)) => {
                let packed = fs::read(&self.path).map_err(failed_io())?;
                check(&packed, zip)?;
                let mut bytes = vec![];
                // Reading one additional byte detects data that is too long.
                let unpacked = packing.unpack(packed, self.entry.raw_data.bytes + 1, &mut bytes);
                let at = Some(At::Byte(bytes.len() as u64));
                let failed =
                    |error| self.damaged(at, format!("the {} is truncated or damaged: {error}", packing.name()));
                unpacked.map_err(failed)?;
                bytes
            }
            _ => {
                let mut bytes = vec![];
                let file = BufReader::new(File::open(&self.path).map_err(failed_io())?);
                file.take(self.entry.raw_data.bytes + 1).read_to_end(&mut bytes).map_err(failed_io())?;
                bytes
            }
        };
        check(&bytes, &self.entry.raw_data)?;
        let samples = u32_at(&bytes, 0).map(u64::from);
        if samples != Some(self.entry.samples) {
            let stated = self.entry.samples;
            return Err(self.damaged(None, format!("{} samples, but index.json states {stated}", samples.unwrap_or(0))));
        }
        let Entry { samples, column_sizes, .. } = &self.entry;
        Ok(Samples { path: self.path.clone(), samples: *samples as usize, sizes: column_sizes.clone(), bytes })
    }
}

/// The samples of a shard, in memory.
pub(super) struct Samples {
    path: PathBuf,
    samples: usize,
    /// The size of each column, if all its values have the same size.
    sizes: Vec<Option<u32>>,
    bytes: Vec<u8>,
}

impl Samples {
    pub(super) fn len(&self) -> usize {
        self.samples
    }

    /// Returns the bytes of a sample in a column.
    pub(super) fn value(&self, sample: usize, column: usize) -> Result<&[u8], DataError> {
        let at = Some(At::Row(sample as u64));
        let message = || "the sample extends beyond the end of the shard".into();
        let cut = || DataError::Damaged { path: self.path.clone(), at, message: message() };
        let offset = |i: usize| u32_at(&self.bytes, 4 * (i + 1)).map(|offset| offset as usize);
        let range = offset(sample).zip(offset(sample + 1));
        let sample = range.and_then(|(start, end)| self.bytes.get(start..end)).ok_or_else(cut)?;
        let (mut heads, mut before, mut size, mut all) = (0, 0usize, 0usize, 0usize);
        for (i, stated) in self.sizes.iter().enumerate() {
            let own = match stated {
                Some(size) if *size > 0 => *size,
                _ => {
                    heads += 4;
                    u32_at(sample, heads - 4).ok_or_else(cut)?
                }
            } as usize;
            all += own;
            match i {
                _ if i < column => before += own,
                _ if i == column => size = own,
                _ => {}
            }
        }
        let start = heads + before;
        let value = sample.get(start..start + size).ok_or_else(cut)?;
        match heads + all == sample.len() {
            true => Ok(value),
            false => Err(DataError::Damaged {
                path: self.path.clone(),
                at,
                message: format!("the sample has {} bytes, but its columns have {}", sample.len(), heads + all),
            }),
        }
    }
}

fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    bytes.get(offset..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))
}

/// Returns the checksum in hexadecimal. Returns `None` for an unknown algorithm.
pub(super) fn hex(algorithm: &str, bytes: &[u8]) -> Option<String> {
    Some(match algorithm {
        "sha1" => fingerprint::hex(&Sha1::digest(bytes)),
        "sha224" => fingerprint::hex(&Sha224::digest(bytes)),
        "sha256" => fingerprint::hex(&Sha256::digest(bytes)),
        "sha384" => fingerprint::hex(&Sha384::digest(bytes)),
        "sha512" => fingerprint::hex(&Sha512::digest(bytes)),
        "xxh32" => format!("{:08x}", XxHash32::oneshot(0, bytes)),
        "xxh64" => format!("{:016x}", XxHash64::oneshot(0, bytes)),
        "xxh3_64" => format!("{:016x}", XxHash3_64::oneshot(bytes)),
        "xxh128" | "xxh3_128" => format!("{:032x}", XxHash3_128::oneshot(bytes)),
        _ => return None,
    })
}
