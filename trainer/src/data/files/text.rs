//! Reads a text file as one document, in parts.

use std::io::Read;

use zero_engine::{At, DataError};

use super::super::binary;
use super::streams::{Document, Reader};
use crate::data::tokens::pieces::{Cuts, piece_end};

/// Minimum size of a part in bytes, except for the last part. A part of this size has enough pieces for parallel
/// encoding.
const PART: usize = 8 << 20;

/// The parts of a text.
pub(super) struct Parts {
    reader: Reader,
    /// The bytes that were read but not returned yet, and the position of the first of them in the file.
    buffer: Vec<u8>,
    offset: u64,
    /// Total length of the complete pieces in the buffer.
    pieces: usize,
    is_at_end: bool,
    /// Whether binary files are accepted.
    accepts_binary: bool,
    cuts: Cuts,
}

impl Parts {
    pub(super) fn new(reader: Reader, cuts: Cuts, accepts_binary: bool) -> Self {
        Self { reader, buffer: vec![], offset: 0, pieces: 0, is_at_end: false, accepts_binary, cuts }
    }

    /// Extends the pieces until a part is complete, and returns its length.
    fn end(&mut self) -> Option<usize> {
        if self.is_at_end {
            return Some(self.buffer.len());
        }
        while self.pieces < PART {
            self.pieces += piece_end(&self.buffer[self.pieces..], self.cuts)?;
        }
        Some(self.pieces)
    }

    fn read(&mut self) -> Result<(), DataError> {
        // Doubling the buffer ensures that a text without line breaks is searched only a few times.
        let count = self.buffer.len().max(PART) as u64;
        let read = self.reader.bytes.by_ref().take(count).read_to_end(&mut self.buffer);
        let at = At::Byte(self.offset + self.buffer.len() as u64);
        self.is_at_end = read.map_err(|error| self.reader.failed(at, error))? == 0;
        // Among plain files, only those for the byte tokenizer need this check: other tokenizers require UTF-8, and
        // report the position of an invalid byte themselves. Archives are checked too, because an unpacked tar file may
        // be valid UTF-8.
        if self.offset == 0
            && (self.cuts == Cuts::Anywhere || self.reader.is_unpacked())
            && !self.accepts_binary
            && let Some(kind) = binary::kind(&self.buffer)
        {
            return Err(DataError::Binary { path: self.reader.path.clone(), kind });
        }
        Ok(())
    }
}

impl Iterator for Parts {
    type Item = Result<Document, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        let end = loop {
            match self.end() {
                Some(end) => break end,
                None => {
                    if let Err(error) = self.read() {
                        return Some(Err(error));
                    }
                }
            }
        };
        if end == 0 {
            return None;
        }
        let rest = self.buffer.split_off(end);
        let (text, start) = (std::mem::replace(&mut self.buffer, rest), self.offset);
        (self.offset, self.pieces) = (start + end as u64, 0);
        Some(Ok(Document { at: At::Byte(start), text, is_continued: start > 0 }))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;
    use std::path::Path;

    use super::*;

    fn parts(text: &[u8], cuts: Cuts) -> Vec<Document> {
        let reader = Reader::new(Cursor::new(text.to_vec()), Path::new("a.txt"), None);
        Parts::new(reader, cuts, false).map(Result::unwrap).collect()
    }

    /// Each part ends where a piece of the whole text ends, so the parts have the same tokens as the whole text.
    #[test]
    fn parts_end_at_piece_boundaries() {
        let line = "a line of text, éééé\n\n  indented\n";
        let text = line.repeat(5 * PART / 2 / line.len());
        let mut ends = vec![];
        while let Some(end) = piece_end(&text.as_bytes()[ends.last().copied().unwrap_or(0)..], Cuts::Words) {
            ends.push(ends.last().unwrap_or(&0) + end);
        }
        let parts = parts(text.as_bytes(), Cuts::Words);
        assert_eq!(parts.iter().map(|part| part.is_continued).collect::<Vec<_>>(), [false, true, true]);
        let mut offset = 0;
        for part in &parts {
            assert!(offset == 0 || ends.contains(&offset), "{offset}");
            assert_eq!(part.at, At::Byte(offset as u64));
            offset += part.text.len();
        }
        assert_eq!(parts.into_iter().flat_map(|part| part.text).collect::<Vec<_>>(), text.as_bytes());
    }

    #[test]
    fn a_text_without_line_breaks_is_one_part_or_cut_anywhere() {
        let text = vec![b'x'; 3 * PART + 1];
        assert_eq!(parts(&text, Cuts::Words).len(), 1);
        assert_eq!(
            parts(&text, Cuts::Anywhere).iter().map(|part| part.text.len()).collect::<Vec<_>>(),
            [PART, PART, PART, 1]
        );
        assert_eq!(parts(b"", Cuts::Words), []);
    }
}
