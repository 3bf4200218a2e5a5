//! `tensorboard`: writes an event file without TensorFlow.
//!
//! The file is a sequence of TFRecords: length, masked CRC-32C of the length, data, masked CRC-32C of the data. Each
//! record holds an `Event` message of `tensorflow/core/util/event.proto`, with only the fields that a scalar needs.

use std::fs;
use std::path::PathBuf;

use super::metric::{Record, Scalar};
use super::worker::{Sink, Trouble};
use crate::append::Appended;
use zero_engine::Error;

pub(super) struct TensorBoard {
    folder: PathBuf,
    /// The number of samples at which the run resumes, or `None` for a new run. The run writes the events of later
    /// samples again.
    resumed: Option<u64>,
    file: Option<Appended>,
}

impl TensorBoard {
    pub(super) fn new(folder: PathBuf, resumed: Option<u64>) -> Self {
        Self { folder, resumed, file: None }
    }

    /// Opens a new file whose first event has the time `time`.
    fn open(&self, time: f64) -> Result<Appended, Error> {
        fs::create_dir_all(&self.folder).map_err(Error::io(&self.folder))?;
        // TensorBoard reads the files of a folder in the order of their names.
        let name = format!("events.out.tfevents.{time:017.6}.{}.zero-train", std::process::id());
        let mut file = Appended::open(&self.folder.join(name), 0)?;
        let mut version = double(1, time);
        version.extend(bytes(3, b"brain.Event:2"));
        let mut begin = frame(&version);
        if let Some(samples) = self.resumed {
            begin.extend(frame(&session(samples + 1, time)));
        }
        file.append(&begin)?;
        Ok(file)
    }
}

impl Sink for TensorBoard {
    fn write(&mut self, records: &[Record]) -> Result<(), Trouble> {
        let file = match (&mut self.file, records.first()) {
            (_, None) => return Ok(()),
            (Some(file), _) => file,
            (None, Some(first)) => {
                let file = self.open(first.time)?;
                self.file.insert(file)
            }
        };
        let events = records.iter().flat_map(|record| record.scalars.iter().map(move |scalar| (record, scalar)));
        let frames: Vec<u8> = events.flat_map(|(record, scalar)| frame(&event(record, scalar))).collect();
        Ok(file.append(&frames)?)
    }

    fn help(&self) -> String {
        "free some disk space, or set `tensorboard.output_path` to another folder".into()
    }
}

/// Encodes `Event { wall_time: 1, step: 2, summary: 5 { value: 1 { tag: 1, simple_value: 2 } } }`.
fn event(record: &Record, scalar: &Scalar) -> Vec<u8> {
    let mut value = bytes(1, scalar.metric.tag.as_bytes());
    value.push(2 << 3 | 5);
    value.extend((scalar.value as f32).to_le_bytes());
    let mut event = at(record.samples, record.time);
    event.extend(bytes(5, &bytes(1, &value)));
    event
}

/// Encodes `Event { wall_time: 1, step: 2, session_log: 7 { status: 1 } }` with the status START. TensorBoard then
/// ignores the events of this and later steps in earlier files.
fn session(step: u64, wall_time: f64) -> Vec<u8> {
    let mut event = at(step, wall_time);
    event.extend(bytes(7, &[1 << 3, 1]));
    event
}

fn at(step: u64, wall_time: f64) -> Vec<u8> {
    let mut event = double(1, wall_time);
    event.push(2 << 3);
    event.extend(varint(step));
    event
}

fn double(field: u8, value: f64) -> Vec<u8> {
    let mut out = vec![field << 3 | 1];
    out.extend(value.to_le_bytes());
    out
}

fn bytes(field: u8, value: &[u8]) -> Vec<u8> {
    let mut out = vec![field << 3 | 2];
    out.extend(varint(value.len() as u64));
    out.extend(value);
    out
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut out = vec![];
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
    out
}

fn frame(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut out = length.to_vec();
    out.extend(masked(&length).to_le_bytes());
    out.extend(data);
    out.extend(masked(data).to_le_bytes());
    out
}

/// Returns TFRecord's masked checksum. The CRC is rotated and offset, because a CRC of data that contains CRCs is weak.
fn masked(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xA282_EAD8)
}

#[cfg(test)]
mod tests {
    use super::super::metric::{Kind, Metric};
    use super::*;

    /// Compares an event with the bytes that TensorFlow's own writer produces for the same event.
    #[test]
    fn an_event_matches_tensorflows_bytes() {
        static METRIC: Metric = Metric { tag: "a", name: "a", label: None, kind: Kind::Gauge, scale: 1.0, help: "" };
        let scalar = Scalar { metric: &METRIC, value: 0.5 };
        let record = Record { samples: 300, time: 1.0, scalars: vec![scalar], ..Record::default() };
        let expected = [
            0x09, 0, 0, 0, 0, 0, 0, 0xF0, 0x3F, // wall_time 1.0
            0x10, 0xAC, 0x02, // step 300
            0x2A, 0x0A, 0x0A, 0x08, 0x0A, 0x01, b'a', 0x15, 0, 0, 0, 0x3F, // summary
        ];
        assert_eq!(event(&record, &scalar), expected);
    }

    /// Compares the table-driven checksum with a bitwise CRC-32C.
    #[test]
    fn the_checksum_matches_its_definition() {
        let data = b"brain.Event:2";
        let crc = !data.iter().fold(!0u32, |crc, &byte| {
            (0..8).fold(crc ^ u32::from(byte), |c, _| if c & 1 == 1 { c >> 1 ^ 0x82F6_3B78 } else { c >> 1 })
        });
        assert_eq!(masked(data), crc.rotate_right(15).wrapping_add(0xA282_EAD8));
    }
}
