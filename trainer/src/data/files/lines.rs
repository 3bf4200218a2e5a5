//! The lines of a file, with their numbers.

use std::io::BufRead;
use std::path::{Path, PathBuf};

use zero_engine::DataError;

use super::streams::Reader;

/// Returns each line that is not blank, without its line break, and its number, counted from 1.
pub(in super::super) struct Lines {
    reader: Reader,
    path: PathBuf,
    number: u64,
}

impl Lines {
    pub(super) fn new(reader: Reader, path: &Path) -> Self {
        Self { reader, path: path.into(), number: 0 }
    }
}

impl Iterator for Lines {
    type Item = Result<(u64, Vec<u8>), DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let mut line = vec![];
            match self.reader.read_until(b'\n', &mut line) {
                Ok(0) => return None,
                Ok(_) => self.number += 1,
                Err(error) => return Some(Err(DataError::io(&self.path)(error))),
            }
            line.pop_if(|last| *last == b'\n');
            if !line.trim_ascii().is_empty() {
                return Some(Ok((self.number, line)));
            }
        }
    }
}
