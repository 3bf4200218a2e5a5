//! Tables of numbers. The last columns hold a class or numbers to predict, and the other columns hold features.
//!
//! In CSV files, fields are separated by commas and trimmed of white space; there is no quoting. Blank lines are
//! skipped. The first line that is not blank is a header if none of its fields is a number. Columns are matched by
//! position, so files that name their columns must have the same names in the same order.

use std::path::Path;

use super::files::{self, Lines, Source};
use super::options::DataOptions;
use super::records::{Columns, Records, SampleShape, Samples};
use zero_engine::{At, DataError};

/// All rows, in memory.
pub(super) struct Rows {
    /// The features of all rows: `width` values per row.
    features: Vec<f32>,
    labels: Vec<u32>,
    width: usize,
    /// The columns of the first file that names them.
    named: Option<Columns>,
}

impl Rows {
    /// Reads tables whose last column is a class.
    pub(super) fn read(sources: &[Source], options: &DataOptions) -> Result<Self, DataError> {
        let mut rows = Self::read_columns(sources, Some(options.vocabulary))?;
        let used = options.records(rows.labels.len() as u64)?;
        let (start, end) = (used.start as usize, used.end as usize);
        rows.labels.truncate(end);
        rows.labels.drain(..start);
        rows.features.truncate(end * rows.width);
        rows.features.drain(..start * rows.width);
        Ok(rows)
    }

    /// Reads tables of numbers. Returns all rows, one after the other, and their length.
    pub(super) fn numbers(sources: &[Source]) -> Result<(Vec<f32>, usize), DataError> {
        Self::read_columns(sources, None).map(|rows| (rows.features, rows.width))
    }

    /// Reads tables. Without `classes`, all columns are features.
    fn read_columns(sources: &[Source], classes: Option<usize>) -> Result<Self, DataError> {
        let mut rows = Rows { features: Vec::new(), labels: Vec::new(), width: 0, named: None };
        for source in sources {
            match source.rows()? {
                files::Rows::Lines(lines) => rows.push_lines(lines, &source.path, classes)?,
                files::Rows::Cells(names, cells) => {
                    rows.same_names(names, &source.path, None)?;
                    for row in cells {
                        let (at, cells) = row?;
                        let fields: Vec<&str> = cells.iter().map(String::as_str).collect();
                        rows.push(&fields, &source.path, at, classes)?;
                    }
                }
            }
        }
        if rows.features.is_empty() && rows.labels.is_empty() {
            let sources = sources.iter().map(|source| source.path.display().to_string()).collect();
            return Err(DataError::Empty { sources });
        }
        Ok(rows)
    }

    fn push_lines(&mut self, lines: Lines, path: &Path, classes: Option<usize>) -> Result<(), DataError> {
        let (mut is_first, mut header) = (true, None);
        for line in lines {
            let (number, line) = line?;
            // Invalid UTF-8 becomes a field that is not a number. The code below reports such fields.
            let line = String::from_utf8_lossy(&line);
            let fields: Vec<&str> = line.split(',').map(str::trim).collect();
            let is_header = is_first && fields.iter().all(|field| field.parse::<f64>().is_err());
            is_first = false;
            if is_header {
                let names: Vec<String> = fields.into_iter().map(|name| name.trim_matches('"').to_string()).collect();
                header = Some((names, At::Line(number)));
                continue;
            }
            self.push(&fields, path, At::Line(number), classes)?;
            // If the header and the row differ in their numbers of fields, the header is a comment.
            if let Some((names, at)) = header.take().filter(|(names, _)| names.len() == fields.len()) {
                self.same_names(names, path, Some(at))?;
            }
        }
        Ok(())
    }

    /// Checks that a file names the same columns, in the same order, as the files before it.
    fn same_names(&mut self, names: Vec<String>, path: &Path, at: Option<At>) -> Result<(), DataError> {
        let columns = Columns { path: path.into(), at, names };
        match &self.named {
            None => self.named = Some(columns),
            Some(first) => columns.same_as(first)?,
        }
        Ok(())
    }

    fn push(&mut self, fields: &[&str], path: &Path, at: At, classes: Option<usize>) -> Result<(), DataError> {
        let Some((label, features)) = fields.split_last() else { return Ok(()) };
        let features = if classes.is_some() { features } else { fields };
        if self.features.is_empty() && self.labels.is_empty() {
            if features.is_empty() {
                let message = "the row has one column, the label; give a table with features in the columns before the \
                               label (in CSV files, columns are separated by commas)";
                return Err(DataError::Damaged { path: path.into(), at: Some(at), message: message.into() });
            }
            self.width = features.len();
        } else if features.len() != self.width {
            let found = fields.len();
            let expected = self.width + found - features.len();
            return Err(DataError::Ragged { path: path.into(), at, expected, found });
        }
        for (i, text) in features.iter().enumerate() {
            // Also rejects numbers that are finite in f64 but not in f32.
            let Some(feature) = text.parse::<f32>().ok().filter(|feature| feature.is_finite()) else {
                return Err(DataError::Number { path: path.into(), at, column: i + 1, text: (*text).into() });
            };
            self.features.push(feature);
        }
        let Some(classes) = classes else { return Ok(()) };
        match label.parse::<u32>() {
            Ok(label) if (label as usize) < classes => self.labels.push(label),
            _ => return Err(DataError::Label { path: path.into(), at, text: (*label).into(), classes }),
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

    fn columns(&self) -> Option<&Columns> {
        self.named.as_ref()
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
