//! The messages of PyTorch's `TCPStore` that the client needs.
//!
//! The protocol (torch/csrc/distributed/c10d): a client starts with `VALIDATE` and a magic number. Numbers are
//! little-endian; strings and values are preceded by their length as u64. `SET` has no answer. `GET` fails for a
//! missing key, so the client sends `WAIT` first. The server answers `WAIT` with one byte when all its keys are set.
//! The answer to `PING` is the number that the client sent.

use std::io::{self, Write};
use std::net::TcpStream;
use std::time::Instant;

use crate::auth::read_by;

const VALIDATE: u8 = 0;
const SET: u8 = 1;
const GET: u8 = 3;
const WAIT: u8 = 6;
const PING: u8 = 13;
const MAGIC: u32 = 0x3C85_F7CE;
const STOP_WAITING: u8 = 0;

/// Number of bytes of `hello`.
pub(super) const HELLO_BYTES: usize = 10;

/// Returns the first message of a client: a validation and a ping with `number`.
pub(super) fn hello(number: u32) -> [u8; HELLO_BYTES] {
    let mut bytes = [0; HELLO_BYTES];
    bytes[0] = VALIDATE;
    bytes[1..5].copy_from_slice(&MAGIC.to_le_bytes());
    bytes[5] = PING;
    bytes[6..].copy_from_slice(&number.to_le_bytes());
    bytes
}

pub(super) fn is_hello(bytes: &[u8; HELLO_BYTES]) -> bool {
    bytes[..6] == hello(0)[..6]
}

fn string(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

pub(super) fn set(stream: &mut TcpStream, key: &str, value: &[u8]) -> io::Result<()> {
    stream.write_all(&[&[SET], &string(key.as_bytes())[..], &string(value)].concat())
}

/// Returns `None` if the key is not set by the deadline; the connection is unusable then.
pub(super) fn get(stream: &mut TcpStream, key: &str, deadline: Instant, limit: usize) -> io::Result<Option<Vec<u8>>> {
    let one = 1u64.to_le_bytes();
    stream.write_all(&[&[WAIT], &one[..], &string(key.as_bytes())].concat())?;
    let mut answer = [0];
    match read_by(stream, &mut answer, deadline) {
        Err(error) if error.kind() == io::ErrorKind::TimedOut => return Ok(None),
        other => other?,
    }
    if answer[0] != STOP_WAITING {
        return Err(io::Error::other("the store cancelled the wait"));
    }
    stream.write_all(&[&[GET], &string(key.as_bytes())[..]].concat())?;
    let mut length = [0; 8];
    read_by(stream, &mut length, deadline)?;
    let length = u64::from_le_bytes(length);
    if length > limit as u64 {
        return Err(io::Error::other(format!("the store returned a value of {length} bytes, more than the limit")));
    }
    let mut value = vec![0; length as usize];
    read_by(stream, &mut value, deadline)?;
    Ok(Some(value))
}
