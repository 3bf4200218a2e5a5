//! The lines of a file, with their numbers.

use std::io::BufRead;

use zero_engine::{At, DataError};

use super::streams::Reader;

/// Iterates over the lines that are not blank. Each line comes without its line break, and with its number, counted
/// from 1.
pub(in super::super) struct Lines {
    reader: Reader,
    number: u64,
}

impl Lines {
    pub(super) fn new(reader: Reader) -> Self {
        Self::starting_at(1, reader)
    }

    /// Reads the rest of a file. `first` is the number of the next line.
    pub(super) fn starting_at(first: u64, reader: Reader) -> Self {
        Self { reader, number: first - 1 }
    }
}

impl Iterator for Lines {
    type Item = Result<(u64, Vec<u8>), DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let mut line = vec![];
            match self.reader.bytes.read_until(b'\n', &mut line) {
                Ok(0) => return None,
                Ok(_) => self.number += 1,
                Err(error) => return Some(Err(self.reader.failed(At::Line(self.number + 1), error))),
            }
            line.pop_if(|last| *last == b'\n');
            if !line.trim_ascii().is_empty() {
                return Some(Ok((self.number, line)));
            }
        }
    }
}
