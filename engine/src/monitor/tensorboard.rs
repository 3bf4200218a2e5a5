//! `tensorboard`: an event file, written without TensorFlow.
//!
//! The file is a sequence of TFRecords (length, masked CRC-32C of the length, data, masked CRC-32C of the data), each an
//! `Event` message of `tensorflow/core/util/event.proto`. Only the fields that a scalar needs are written.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use super::Scalar;
use crate::error::Error;

#[derive(Debug)]
pub(super) struct Writer {
    path: PathBuf,
    file: File,
}

impl Writer {
    pub(super) fn open(folder: PathBuf) -> Result<Self, Error> {
        fs::create_dir_all(&folder).map_err(Error::io(&folder))?;
        let name = format!("events.out.tfevents.{}.{}.zero-train", wall_time() as u64, std::process::id());
        let path = folder.join(name);
        let file = File::create(&path).map_err(Error::io(&path))?;
        let mut writer = Self { path, file };
        let mut version = double(1, wall_time());
        version.extend(bytes(3, b"brain.Event:2"));
        writer.record(&version)?;
        Ok(writer)
    }

    pub(super) fn write(&mut self, scalars: &[Scalar]) -> Result<(), Error> {
        for scalar in scalars {
            self.record(&event(scalar, wall_time()))?;
        }
        Ok(())
    }

    fn record(&mut self, data: &[u8]) -> Result<(), Error> {
        self.file.write_all(&frame(data)).map_err(Error::io(&self.path))
    }
}

fn wall_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// `Event { wall_time: 1, step: 2, summary: 5 { value: 1 { tag: 1, simple_value: 2 } } }`.
fn event(scalar: &Scalar, wall_time: f64) -> Vec<u8> {
    let mut value = bytes(1, scalar.tag.as_bytes());
    value.push(2 << 3 | 5);
    value.extend((scalar.value as f32).to_le_bytes());
    let mut event = double(1, wall_time);
    event.push(2 << 3);
    event.extend(varint(scalar.samples));
    event.extend(bytes(5, &bytes(1, &value)));
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

/// TFRecord's checksum: a CRC of data that contains CRCs would be weak, so it is rotated and offset.
fn masked(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xA282_EAD8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that TensorFlow's own writer makes of the same event.
    #[test]
    fn known_event() {
        let scalar = Scalar { tag: "a", samples: 300, value: 0.5 };
        let expected = [
            0x09, 0, 0, 0, 0, 0, 0, 0xF0, 0x3F, // wall_time 1.0
            0x10, 0xAC, 0x02, // step 300
            0x2A, 0x0A, 0x0A, 0x08, 0x0A, 0x01, b'a', 0x15, 0, 0, 0, 0x3F, // summary
        ];
        assert_eq!(event(&scalar, 1.0), expected);
    }

    /// The table-driven checksum against a bitwise CRC-32C.
    #[test]
    fn checksum_by_definition() {
        let data = b"brain.Event:2";
        let crc = !data.iter().fold(!0u32, |crc, &byte| {
            (0..8).fold(crc ^ u32::from(byte), |c, _| if c & 1 == 1 { c >> 1 ^ 0x82F6_3B78 } else { c >> 1 })
        });
        assert_eq!(masked(data), crc.rotate_right(15).wrapping_add(0xA282_EAD8));
    }
}
