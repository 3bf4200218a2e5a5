//! Reads records from JSON lines and JSON arrays, and the texts in them.

use std::io::{BufRead, Cursor, Read};

use serde_json::Value;
use zero_engine::{At, DataError};

use super::lines::Lines;
use super::streams::{Document, Documents, Object, Reader, Records};

const NO_OBJECT: &str = "a record must be a JSON object";

/// Opens the records of a file: the elements of an array, or one object per line. Skips a byte order mark.
pub(super) fn open(reader: Reader) -> Result<Records, DataError> {
    let mut reader = reader.without_mark()?;
    // The white space before the first record, in the line of the record.
    let (mut skipped, mut place) = (vec![], LinePosition::default());
    loop {
        let bytes = match reader.bytes.fill_buf() {
            Ok(bytes) => bytes,
            Err(error) => return Err(reader.failed(At::Line(place.line), error)),
        };
        let blank = bytes.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        bytes[..blank].iter().for_each(|&byte| place.advance(byte));
        match bytes[..blank].iter().rposition(|&byte| byte == b'\n') {
            Some(end) => skipped = bytes[end + 1..blank].to_vec(),
            None => skipped.extend(&bytes[..blank]),
        }
        match bytes.get(blank) {
            Some(b'[') => {
                place.advance(b'[');
                reader.bytes.consume(blank + 1);
                return Ok(Box::new(Array { reader, place, records: 0, is_at_end: false }));
            }
            None if blank > 0 => reader.bytes.consume(blank),
            _ => {
                reader.bytes.consume(blank);
                reader.bytes = Box::new(Cursor::new(skipped).chain(reader.bytes));
                return Ok(Box::new(objects(reader, place.line)));
            }
        }
    }
}

/// Reads one object per line. `first` is the number of the next line.
fn objects(reader: Reader, first: u64) -> impl Iterator<Item = Result<(At, Object), DataError>> + use<> {
    let path = reader.path.clone();
    Lines::starting_at(first, reader).map(move |line| {
        let (line, bytes) = line?;
        let failed = |message| DataError::Json { path: path.clone(), line, message };
        match serde_json::from_slice(&bytes) {
            Ok(Value::Object(record)) => Ok((At::Line(line), record)),
            Ok(_) => Err(failed(NO_OBJECT.into())),
            Err(error) => Err(failed(reason(&error, 0))),
        }
    })
}

/// Returns the text under `text_key` of each record as a document.
pub(super) fn texts(reader: Reader, text_key: &str) -> Result<Documents, DataError> {
    let (path, text_key) = (reader.path.clone(), text_key.to_string());
    let documents = open(reader)?.map(move |record| {
        let (at, mut record) = record?;
        let message = match record.remove(&text_key) {
            Some(Value::String(text)) => return Ok(Document { at, text: text.into_bytes(), is_continued: false }),
            None if !record.is_empty() => {
                let keys: Vec<&str> = record.keys().map(String::as_str).collect();
                format!("no key `{text_key}`; the keys are {}", keys.join(", "))
            }
            _ => format!("the key `{text_key}` is missing or not a string"),
        };
        let path = path.clone();
        Err(match at {
            At::Line(line) => DataError::Json { path, line, message },
            at => DataError::Conversation {
                path,
                at,
                message,
                help: "set `data.text_key` to the key that contains the text".into(),
            },
        })
    });
    let is_used =
        |document: &Result<Document, DataError>| document.as_ref().map_or(true, |document| !document.text.is_empty());
    Ok(Box::new(documents.filter(is_used)))
}

/// The elements of a JSON array. Each element is read and parsed on its own.
struct Array {
    reader: Reader,
    /// The position of the next byte.
    place: LinePosition,
    records: u64,
    is_at_end: bool,
}

/// A position: the line, counted from 1, and the number of bytes before the position in this line.
#[derive(Clone, Copy)]
struct LinePosition {
    line: u64,
    column: usize,
}

impl Default for LinePosition {
    fn default() -> Self {
        Self { line: 1, column: 0 }
    }
}

impl LinePosition {
    fn advance(&mut self, byte: u8) {
        match byte {
            b'\n' => *self = Self { line: self.line + 1, column: 0 },
            _ => self.column += 1,
        }
    }
}

impl Array {
    fn failed(&self, LinePosition { line, column }: LinePosition, message: &str) -> DataError {
        DataError::Json { path: self.reader.path.clone(), line, message: format!("column {column}: {message}") }
    }

    /// Reads up to the next byte that `is_end` accepts. Consumes this byte, but does not append it.
    fn read_until(
        &mut self,
        element: &mut Vec<u8>,
        mut is_end: impl FnMut(u8) -> bool,
    ) -> Result<Option<u8>, DataError> {
        loop {
            let bytes = match self.reader.bytes.fill_buf() {
                Ok(bytes) => bytes,
                Err(error) => return Err(self.reader.failed(At::Line(self.place.line), error)),
            };
            if bytes.is_empty() {
                return Ok(None);
            }
            let length = bytes.iter().position(|&byte| is_end(byte));
            let read = &bytes[..length.unwrap_or(bytes.len())];
            let end = length.map(|length| bytes[length]);
            read.iter().chain(&end).for_each(|&byte| self.place.advance(byte));
            element.extend(read);
            let read = read.len() + usize::from(end.is_some());
            self.reader.bytes.consume(read);
            if end.is_some() {
                return Ok(end);
            }
        }
    }

    fn record(&mut self) -> Result<Option<(At, Object)>, DataError> {
        let start = self.place;
        let (mut depth, mut is_string, mut is_escaped) = (0usize, false, false);
        let is_end = |byte| {
            match byte {
                _ if is_escaped => is_escaped = false,
                b'\\' if is_string => is_escaped = true,
                b'"' => is_string = !is_string,
                _ if is_string => {}
                b',' | b']' if depth == 0 => return true,
                b'{' | b'[' => depth += 1,
                b'}' | b']' => depth = depth.saturating_sub(1),
                _ => {}
            }
            false
        };
        let mut element = vec![];
        let end = self.read_until(&mut element, is_end)?;
        let is_blank = element.trim_ascii().is_empty();
        if end == Some(b']') {
            self.is_at_end = true;
            let mut rest = vec![];
            if self.read_until(&mut rest, |byte| !byte.is_ascii_whitespace())?.is_some() {
                return Err(self.failed(self.place, "trailing characters"));
            }
            if is_blank && self.records == 0 {
                return Ok(None);
            }
        }
        if end.is_none() && is_blank {
            return Err(self.failed(self.place, "EOF while parsing a list"));
        }
        self.records += 1;
        let at = At::Record(self.records);
        match serde_json::from_slice(&element) {
            Ok(_) if end.is_none() => Err(self.failed(self.place, "EOF while parsing a list")),
            Ok(Value::Object(record)) => Ok(Some((at, record))),
            Ok(_) => {
                let (message, help) = (NO_OBJECT.into(), "write one object per record".into());
                Err(DataError::Conversation { path: self.reader.path.clone(), at, message, help })
            }
            Err(error) => {
                let before = if error.line() == 1 { start.column } else { 0 };
                let line = start.line + error.line().saturating_sub(1) as u64;
                Err(DataError::Json { path: self.reader.path.clone(), line, message: reason(&error, before) })
            }
        }
    }
}

impl Iterator for Array {
    type Item = Result<(At, Object), DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_at_end {
            return None;
        }
        let record = self.record();
        self.is_at_end |= record.is_err();
        record.transpose()
    }
}

/// Formats the error with its column, without serde_json's line number. `before` is the number of bytes before the
/// element in its line.
pub(in super::super) fn reason(error: &serde_json::Error, before: usize) -> String {
    let message = error.to_string();
    let message = message.split(" at line ").next().unwrap_or(&message);
    format!("column {}: {message}", before + error.column())
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;
    use std::path::Path;

    use serde_json::json;

    use super::*;

    /// Reads with a small buffer, so that elements span several buffers.
    fn read(text: &str) -> Result<Vec<(At, Value)>, String> {
        let bytes = BufReader::with_capacity(3, Cursor::new(text.as_bytes().to_vec()));
        let records = open(Reader::new(bytes, Path::new("a.json"), None)).unwrap();
        let records = records.map(|record| record.map(|(at, record)| (at, Value::Object(record))));
        records.collect::<Result<_, _>>().map_err(|error| error.to_string())
    }

    #[test]
    fn arrays_are_read_element_by_element() {
        let text = " \n[{\"a\": \"],{\\\"\"} ,\n{\"b\": [1, {\"c\": [2]}]}\n]\n ";
        let expected = [(At::Record(1), json!({"a": "],{\""})), (At::Record(2), json!({"b": [1, {"c": [2]}]}))];
        assert_eq!(read(text).unwrap(), expected);
        assert_eq!(read("[ ]").unwrap(), []);
        assert_eq!(read("").unwrap(), []);
        assert_eq!(read("\u{feff}[{\"a\": 1}]").unwrap(), [(At::Record(1), json!({"a": 1}))]);
        assert_eq!(read("\u{feff}{\"a\": 1}").unwrap(), [(At::Line(1), json!({"a": 1}))]);
        let blank = format!("{}{{\"a\": 1}}\n {{", " \n".repeat(50_000));
        assert_eq!(read(&blank).unwrap_err(), "a.json, line 50002: column 2: EOF while parsing an object");
        assert_eq!(read("\n {\"a\": 1}\n\n{}").unwrap(), [(At::Line(2), json!({"a": 1})), (At::Line(4), json!({}))]);
    }

    #[test]
    fn malformed_arrays_name_line_and_column() {
        for (text, message) in [
            ("[{\"a\": 1},\n {\"b\": }]", "a.json, line 2: column 8: expected value"),
            ("[{\"a\": 1}, {\"b\": }]", "a.json, line 1: column 18: expected value"),
            ("[{\"a\": 1},]", "a.json, line 1: column 10: EOF while parsing a value"),
            ("[{\"a\": 1}", "a.json, line 1: column 9: EOF while parsing a list"),
            ("[{\"a\": 1},", "a.json, line 1: column 10: EOF while parsing a list"),
            ("[{\"a\": \"x", "a.json, line 1: column 9: EOF while parsing a string"),
            ("[{\"a\": 1}] x", "a.json, line 1: column 12: trailing characters"),
            ("[{\"a\": 1} {}]", "a.json, line 1: column 11: trailing characters"),
            ("[{}}, {}]", "a.json, line 1: column 4: trailing characters"),
            ("[1]", "a.json, record 1: a record must be a JSON object\n  help: write one object per record"),
            ("{}\n[1]", "a.json, line 2: a record must be a JSON object"),
        ] {
            assert_eq!(read(text).unwrap_err(), message, "{text}");
        }
    }
}
