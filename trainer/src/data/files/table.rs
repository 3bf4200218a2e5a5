//! Reads tables in Parquet and Arrow files in batches of rows.
//!
//! The decoders should return an error for any malformed file. If one panics, [`guarded`] converts the panic to an
//! error.

use std::fs::File;
use std::path::{Path, PathBuf};

use arrow_array::{Array, RecordBatch};
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_schema::{ArrowError, Schema};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use zero_engine::{At, DataError};

use super::super::guard::caught;
use super::streams::{Document, Documents, Records};
use super::values::{field, is_text, object, plain, text};

/// Maximum number of rows that become documents or records at a time. Parquet files are also decoded in batches of this
/// size; Arrow files define their own batches.
const BATCH: usize = 1024;

/// The file format of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Container {
    Parquet,
    ArrowFile,
    ArrowStream,
}

impl Container {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Parquet => "a Parquet file",
            Self::ArrowFile | Self::ArrowStream => "an Arrow file",
        }
    }
}

/// The rows of a file. They may have only some of its columns.
pub(super) struct Table {
    batches: Box<dyn Iterator<Item = Result<RecordBatch, ArrowError>> + Send>,
    path: PathBuf,
    /// The rest of the current batch.
    rest: Option<RecordBatch>,
    /// The index of the next row, and the total number of rows if the file states it.
    row: u64,
    rows: Option<u64>,
    is_at_end: bool,
}

impl Table {
    /// Opens a file. `choose` returns the indices of the columns that are decoded, in ascending order.
    pub(super) fn open(
        path: &Path,
        container: Container,
        choose: impl FnOnce(&Schema) -> Result<Vec<usize>, DataError>,
    ) -> Result<Self, DataError> {
        let damaged = |message| DataError::Damaged { path: path.into(), at: None, message };
        let (batches, rows): (Box<dyn Iterator<Item = _> + Send>, _) = match container {
            Container::Parquet => {
                let open = || ParquetRecordBatchReaderBuilder::try_new(File::open(path)?);
                let builder = guarded(open).map_err(damaged)?;
                let columns = choose(builder.schema())?;
                let rows = u64::try_from(builder.metadata().file_metadata().num_rows()).unwrap_or_default();
                let mask = ProjectionMask::roots(builder.parquet_schema(), columns);
                let reader = guarded(|| builder.with_projection(mask).with_batch_size(BATCH).build());
                (Box::new(reader.map_err(damaged)?), Some(rows))
            }
            Container::ArrowFile => {
                super::arrow::check(path, false)?;
                let open = |columns| FileReader::try_new_buffered(File::open(path)?, columns);
                let columns = choose(&guarded(|| open(None)).map_err(damaged)?.schema())?;
                (Box::new(guarded(|| open(Some(columns))).map_err(damaged)?), None)
            }
            Container::ArrowStream => {
                super::arrow::check(path, true)?;
                let open = |columns| StreamReader::try_new_buffered(File::open(path)?, columns);
                let columns = choose(&guarded(|| open(None)).map_err(damaged)?.schema())?;
                (Box::new(guarded(|| open(Some(columns))).map_err(damaged)?), None)
            }
        };
        Ok(Self { batches, path: path.into(), rest: None, row: 0, rows, is_at_end: false })
    }

    fn damaged(&self, message: String) -> DataError {
        DataError::Damaged { path: self.path.clone(), at: Some(At::Row(self.row)), message }
    }
}

/// Returns batches of 1 to [`BATCH`] rows, each with the index of its first row.
impl Iterator for Table {
    type Item = Result<(u64, RecordBatch), DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.is_at_end {
            if let Some(rest) = self.rest.take().filter(|rest| rest.num_rows() > 0) {
                let (first, rows) = (self.row, rest.num_rows().min(BATCH));
                self.row += rows as u64;
                self.rest = Some(rest.slice(rows, rest.num_rows() - rows));
                return Some(Ok((first, rest.slice(0, rows))));
            }
            match guarded(|| self.batches.next().transpose()) {
                Ok(Some(batch)) => self.rest = Some(batch),
                Ok(None) => {
                    self.is_at_end = true;
                    if let Some(rows) = self.rows.filter(|rows| *rows != self.row) {
                        return Some(Err(self.damaged(format!("the file ends here, but it should have {rows} rows"))));
                    }
                }
                Err(message) => {
                    self.is_at_end = true;
                    return Some(Err(self.damaged(message)));
                }
            }
        }
        None
    }
}

/// Runs a decoder. Converts an error or a panic to a message.
fn guarded<T, E: std::fmt::Display>(decode: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    match caught(decode) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(message) => Err(format!("the file is malformed, and its decoder failed: {message}")),
    }
}

/// Returns an iterator over all items that `items` creates. `items` receives each batch with the index of its first
/// row.
fn of_batches<T, I>(table: Table, items: I) -> impl Iterator<Item = Result<T, DataError>> + use<T, I>
where
    I: Fn(&Path, u64, &RecordBatch) -> Result<Vec<Result<T, DataError>>, String>,
{
    let path = table.path.clone();
    table.flat_map(move |batch| {
        let made = batch.and_then(|(first, batch)| {
            let damaged = |message| DataError::Damaged { path: path.clone(), at: Some(At::Row(first)), message };
            guarded(|| items(&path, first, &batch)).map_err(damaged)
        });
        made.unwrap_or_else(|error| vec![Err(error)])
    })
}

fn cell(path: &Path, at: At, column: &str, message: impl Into<String>) -> DataError {
    DataError::Cell { path: path.into(), at, column: column.into(), message: message.into() }
}

/// Opens the texts of a column.
pub(super) fn documents(path: &Path, container: Container, column: &str) -> Result<Documents, DataError> {
    let table = Table::open(path, container, |schema| {
        let Some((index, field)) = schema.column_with_name(column) else {
            let columns = schema.fields().iter().map(|field| field.name().clone()).collect();
            return Err(DataError::Column { path: path.into(), column: column.into(), columns });
        };
        match is_text(field.data_type()) {
            true => Ok(vec![index]),
            false => Err(cell(path, At::Row(0), column, format!("has the type {}, not text", field.data_type()))),
        }
    })?;
    let column = column.to_string();
    Ok(Box::new(of_batches(table, move |path, first, batch| {
        let texts = plain(batch.column(0))?;
        let document = |row| {
            let at = At::Row(first + row as u64);
            match text(&texts, row) {
                Some("") => None,
                Some(text) => Some(Ok(Document { at, text: text.into(), is_continued: false })),
                None => Some(Err(cell(path, at, &column, "is null"))),
            }
        };
        Ok((0..texts.len()).filter_map(document).collect())
    })))
}

/// Opens the rows as records. If the table has some of `columns`, only these columns are decoded.
pub(super) fn records(path: &Path, container: Container, columns: &[&str]) -> Result<Records, DataError> {
    let table = Table::open(path, container, |schema| {
        let all = 0..schema.fields().len();
        let known: Vec<usize> = all.clone().filter(|&i| columns.contains(&schema.field(i).name().as_str())).collect();
        Ok(if known.is_empty() { all.collect() } else { known })
    })?;
    Ok(Box::new(of_batches(table, |path, first, batch| {
        let schema = batch.schema();
        let columns = || schema.fields().iter().map(|field| field.name().as_str()).zip(batch.columns());
        let record = |row| {
            let at = At::Row(first + row as u64);
            let record = object(columns(), row).map_err(|(column, message)| cell(path, at, column, message));
            Ok((at, record?))
        };
        Ok((0..batch.num_rows()).map(record).collect())
    })))
}

/// A row of a table, with the text of each column.
pub(in super::super) type Cells = (At, Vec<String>);

/// Opens the rows of all columns. Returns the names of the columns, and the rows.
pub(super) fn rows(
    path: &Path,
    container: Container,
) -> Result<(Vec<String>, impl Iterator<Item = Result<Cells, DataError>> + use<>), DataError> {
    let mut names = vec![];
    let table = Table::open(path, container, |schema| {
        names.extend(schema.fields().iter().map(|field| field.name().clone()));
        Ok((0..schema.fields().len()).collect())
    })?;
    let rows = of_batches(table, |path, first, batch| {
        let schema = batch.schema();
        let cells = |row| {
            let at = At::Row(first + row as u64);
            let columns = schema.fields().iter().zip(batch.columns());
            let cells = columns
                .map(|(name, column)| field(column, row).map_err(|message| cell(path, at, name.name(), message)));
            Ok((at, cells.collect::<Result<_, _>>()?))
        };
        Ok((0..batch.num_rows()).map(cells).collect())
    });
    Ok((names, rows))
}
