//! Tables of numbers: features, and a class in the last column.
//!
//! Fields are separated by commas and trimmed of white space; there is no quoting. The first line of a file is a header
//! if none of its fields is a number. Blank lines are skipped.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
};

use super::records::{Records, SampleShape, Samples};
use zero_engine::DataError;

/// All rows, in memory.
pub(super) struct Rows {
    /// `width` values per row.
    features: Vec<f32>,
    labels: Vec<u32>,
    width: usize,
}

impl Rows {
    pub(super) fn read(files: &[PathBuf], classes: usize) -> Result<Self, DataError> {
        let mut rows = Rows { features: Vec::new(), labels: Vec::new(), width: 0 };
        for path in files {
            let file = File::open(path).map_err(DataError::io(path))?;
            for (i, line) in BufReader::new(file).split(b'\n').enumerate() {
                let line = line.map_err(DataError::io(path))?;
                // Invalid UTF-8 becomes a field that is not a number, which is reported below.
                let line = String::from_utf8_lossy(&line);
                let fields: Vec<&str> = line.split(',').map(str::trim).collect();
                let is_header = i == 0 && fields.iter().all(|field| field.parse::<f64>().is_err());
                if !is_header && !line.trim().is_empty() {
                    rows.push(&fields, path, i as u64 + 1, classes)?;
                }
            }
        }
        if rows.labels.is_empty() {
            let sources = files.iter().map(|path| path.display().to_string()).collect();
            return Err(DataError::Empty { sources });
        }
        Ok(rows)
    }

    fn push(&mut self, fields: &[&str], path: &Path, line: u64, classes: usize) -> Result<(), DataError> {
        let Some((label, features)) = fields.split_last() else { return Ok(()) };
        if self.labels.is_empty() {
            self.width = features.len();
        } else if features.len() != self.width {
            let (expected, found) = (self.width + 1, fields.len());
            return Err(DataError::Ragged { path: path.into(), line, expected, found });
        }
        for (i, text) in features.iter().enumerate() {
            // Also rejects numbers that are finite in f64 but not in f32.
            let Some(feature) = text.parse::<f32>().ok().filter(|feature| feature.is_finite()) else {
                return Err(DataError::Number { path: path.into(), line, column: i + 1, text: (*text).into() });
            };
            self.features.push(feature);
        }
        match label.parse::<u32>() {
            Ok(label) if (label as usize) < classes => self.labels.push(label),
            _ => return Err(DataError::Label { path: path.into(), line, text: (*label).into(), classes }),
        }
        Ok(())
    }
}

impl Records for Rows {
    fn samples(&self) -> usize {
        self.labels.len()
    }

    fn shape(&self) -> SampleShape {
        SampleShape::Features(self.width)
    }

    fn append(&self, index: usize, samples: &mut Samples) -> Result<(), DataError> {
        let Some(&label) = self.labels.get(index) else {
            return Err(DataError::Index { index, samples: self.labels.len() });
        };
        samples.features.extend_from_slice(&self.features[index * self.width..(index + 1) * self.width]);
        samples.targets.push(label);
        Ok(())
    }
}
