//! Checks the lengths and numbers of rows in an Arrow file or stream before the decoder uses them. The decoder reserves
//! memory for each length, and a failed reservation ends the process. Rows of nulls have no bytes, so a damaged row
//! count could make the decoder return rows forever.
//!
//! Source of the format:
//! <https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc>

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use arrow_ipc::{CompressionType, Message, root_as_footer, root_as_message};
use zero_engine::{At, DataError};

/// Maximum number of bytes to which one compressed byte expands. The smallest zstd block has 4 bytes and expands to at
/// most 128 KiB. One byte of LZ4 adds at most 255 bytes to the content.
const ZSTD: u64 = 32 * 1024;
const LZ4: u64 = 255;
/// The marker that newer writers put before the length of a message's metadata.
const CONTINUATION: [u8; 4] = [0xff; 4];

/// A position in the file, and a description of the fault there.
type Fault = (u64, String);

struct Lengths {
    file: File,
    length: u64,
}

/// Checks an Arrow file, which has a footer, or an Arrow stream, which has no footer.
pub(super) fn check(path: &Path, is_stream: bool) -> Result<(), DataError> {
    let opened = File::open(path).and_then(|file| Ok(Lengths { length: file.metadata()?.len(), file }));
    let lengths = opened.map_err(DataError::io(path))?;
    let checked = if is_stream { lengths.check_stream() } else { lengths.check_file() };
    checked.map_err(|(at, message)| DataError::Damaged { path: path.into(), at: Some(At::Byte(at)), message })
}

/// Reads the metadata of the message at `at`.
fn parsed(at: u64, metadata: &[u8]) -> Result<Message<'_>, Fault> {
    root_as_message(metadata).map_err(|error| (at, error.to_string()))
}

impl Lengths {
    fn check_stream(&self) -> Result<(), Fault> {
        let mut at = 0;
        loop {
            let cut = |_| (at, "the Arrow stream is truncated: it has no end-of-stream marker".into());
            let mut start = at + 4;
            let mut length = self.array::<4>(at).map_err(cut)?;
            if length == CONTINUATION {
                length = self.array::<4>(start).map_err(cut)?;
                start += 4;
            }
            if length == [0; 4] {
                return Ok(());
            }
            let metadata = self.bytes(start, i32::from_le_bytes(length).into())?;
            let body = start + metadata.len() as u64;
            let message = parsed(at, &metadata)?;
            at = self.check_message(body, message.bodyLength(), message)?;
        }
    }

    fn check_file(&self) -> Result<(), Fault> {
        let at = self.length.saturating_sub(10);
        let length = i32::from_le_bytes(self.array(at)?);
        let start = at.saturating_sub(length.try_into().unwrap_or(0));
        let footer = self.bytes(start, length.into())?;
        let footer = root_as_footer(&footer).map_err(|error| (start, error.to_string()))?;
        for block in footer.dictionaries().into_iter().chain(footer.recordBatches()).flatten() {
            let at = u64::try_from(block.offset()).map_err(|_| (start, "a block has a negative offset".into()))?;
            let message = self.bytes(at, block.metaDataLength().into())?;
            let prefix = if message.starts_with(&CONTINUATION) { 8 } else { 4 };
            let metadata = message.get(prefix..).ok_or_else(|| (at, "a message is empty".into()))?;
            self.check_message(at + message.len() as u64, block.bodyLength(), parsed(at, metadata)?)?;
        }
        Ok(())
    }

    /// Checks a message, whose body begins at `start`. Returns the end of the body.
    fn check_message(&self, start: u64, length: i64, message: Message<'_>) -> Result<u64, Fault> {
        let end = self.end(start, length, self.length)?;
        let dictionary = || message.header_as_dictionary_batch()?.data();
        let Some(batch) = message.header_as_record_batch().or_else(dictionary) else { return Ok(end) };
        let most = match batch.compression().map(|compression| compression.codec()) {
            None => None,
            Some(CompressionType::ZSTD) => Some(ZSTD),
            Some(CompressionType::LZ4_FRAME) => Some(LZ4),
            // The decoder rejects other compressions.
            Some(_) => return Ok(end),
        };
        let mut unpacked = 0_u64;
        for buffer in batch.buffers().into_iter().flatten() {
            let at = start.saturating_add(u64::try_from(buffer.offset()).unwrap_or(u64::MAX));
            let packed = self.end(at, buffer.length(), end)? - at;
            let Some(most) = most.filter(|_| packed >= 8) else {
                unpacked = unpacked.saturating_add(packed);
                continue;
            };
            // −1 means that the buffer is not compressed.
            let stated = u64::try_from(i64::from_le_bytes(self.array(at)?)).unwrap_or(packed - 8);
            let is_possible = stated <= most * (packed - 8);
            if !is_possible || Vec::<u8>::new().try_reserve_exact(stated as usize).is_err() {
                return Err((
                    at,
                    format!("a compressed buffer of {packed} bytes claims to hold {stated} bytes, which is impossible"),
                ));
            }
            unpacked = unpacked.saturating_add(stated);
        }
        // A row takes at least one bit, except in columns of nulls or runs, which no sample can use.
        if u64::try_from(batch.length()).map_or(true, |rows| rows.div_ceil(8) > unpacked) {
            return Err((
                start,
                format!(
                    "a batch of {unpacked} bytes has {} rows, so it is damaged, or all values of its columns are null",
                    batch.length()
                ),
            ));
        }
        Ok(end)
    }

    /// Returns the end of a part. Fails if the end is beyond `limit`.
    fn end(&self, start: u64, length: i64, limit: u64) -> Result<u64, Fault> {
        let end = u64::try_from(length).ok().and_then(|length| start.checked_add(length));
        let fault = || {
            (start.min(self.length), format!("a part of {length} bytes begins here, but it does not fit into the file"))
        };
        end.filter(|end| *end <= limit).ok_or_else(fault)
    }

    fn bytes(&self, start: u64, length: i64) -> Result<Vec<u8>, Fault> {
        let length = self.end(start, length, self.length)? - start;
        let mut bytes = vec![0; length as usize];
        self.file.read_exact_at(&mut bytes, start).map_err(|error| (start, error.to_string()))?;
        Ok(bytes)
    }

    fn array<const N: usize>(&self, start: u64) -> Result<[u8; N], Fault> {
        let mut bytes = [0; N];
        self.file.read_exact_at(&mut bytes, start).map_err(|error| (start, error.to_string()))?;
        Ok(bytes)
    }
}
