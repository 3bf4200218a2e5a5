//! Compressed files: bzip2, gzip and zstd, with one or several members.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

use bzip2::bufread::MultiBzDecoder;
use flate2::bufread::MultiGzDecoder;
use zero_engine::DataError;

use super::streams::Reader;

/// Base-2 logarithm of the largest window of a zstd file, the maximum of `zstd --long`. The decoder keeps a window in
/// memory.
const WINDOW_LOG: u32 = 31;

/// The compression of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Archive {
    Bzip2,
    Gzip,
    Zstd,
}

impl Archive {
    /// Recognizes an archive by its first bytes.
    pub(super) fn recognize(start: &[u8]) -> Option<Self> {
        match start {
            // The digit is the block size. The six bytes after it begin the first block, or the footer of an empty
            // file.
            [b'B', b'Z', b'h', b'1'..=b'9', 0x31, 0x41, 0x59, 0x26, 0x53, 0x59, ..]
            | [b'B', b'Z', b'h', b'1'..=b'9', 0x17, 0x72, 0x45, 0x38, 0x50, 0x90, ..] => Some(Self::Bzip2),
            [0x1f, 0x8b, 8, ..] => Some(Self::Gzip),
            // A skippable frame may come first.
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Some(Self::Zstd),
            _ => None,
        }
    }

    /// Returns a reader of the decompressed bytes. It reads all members, and fails if the last member is truncated.
    pub(super) fn unpack(self, packed: impl io::BufRead + Send + 'static) -> io::Result<Box<dyn Read + Send>> {
        Ok(match self {
            Self::Bzip2 => Box::new(MultiBzDecoder::new(packed)),
            Self::Gzip => Box::new(MultiGzDecoder::new(packed)),
            Self::Zstd => {
                let mut decoder = zstd::stream::read::Decoder::with_buffer(packed)?;
                decoder.window_log_max(WINDOW_LOG)?;
                Box::new(decoder)
            }
        })
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Bzip2 => "bzip2 archive",
            Self::Gzip => "gzip archive",
            Self::Zstd => "zstd archive",
        }
    }
}

/// Opens a file and decompresses it from its start.
pub(super) fn open(path: &Path, archive: Option<Archive>) -> Result<Reader, DataError> {
    let open = || {
        let packed = BufReader::new(File::open(path)?);
        Ok(match archive {
            None => Reader::new(packed, path, None),
            Some(archive) => Reader::new(BufReader::new(archive.unpack(packed)?), path, Some(archive.name())),
        })
    };
    open().map_err(DataError::io(path))
}
