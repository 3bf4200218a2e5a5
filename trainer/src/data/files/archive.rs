//! Compressed files: gzip and zstd, of one or several members.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;
use zero_engine::DataError;

use super::streams::Reader;

/// How the bytes of a file are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Archive {
    Gzip,
    Zstd,
}

impl Archive {
    /// Recognizes an archive by its first bytes.
    pub(super) fn recognize(start: &[u8]) -> Option<Self> {
        match start {
            [0x1f, 0x8b, 8, ..] => Some(Self::Gzip),
            // A skippable frame may come first.
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Some(Self::Zstd),
            _ => None,
        }
    }

    /// Returns a reader of the unpacked bytes. It reads all members, and fails if the last one is cut.
    pub(super) fn unpack(self, packed: impl io::BufRead + Send + 'static) -> io::Result<Box<dyn Read + Send>> {
        Ok(match self {
            Self::Gzip => Box::new(MultiGzDecoder::new(packed)),
            Self::Zstd => Box::new(zstd::stream::read::Decoder::with_buffer(packed)?),
        })
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip archive",
            Self::Zstd => "zstd archive",
        }
    }
}

/// Opens a file for reading from its start, unpacked.
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
