//! The header of every message, in which a rank states its operation before any payload.
//!
//! Ranks should run the same program, but nothing guarantees that they do. Each message therefore starts with job,
//! attempt, group, operation, sequence number, element type and length, and a receiver compares them with its own
//! before it touches the payload. If they differ, the operation fails with a
//! [`CommError::Mismatch`](crate::CommError::Mismatch) that describes the operations of both ranks.

use std::fmt;

use sha2::{Digest, Sha256};

use crate::buffers::dtype::Dtype;
use crate::collective::reduction::ReduceOp;

/// The kinds of operation of a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Operation {
    /// `all_reduce`
    AllReduce = 0,
    /// `all_gather`
    AllGather = 1,
    /// `reduce_scatter`
    ReduceScatter = 2,
    /// `broadcast`
    Broadcast = 3,
    /// `send`
    Send = 4,
    /// `recv`
    Recv = 5,
    /// `barrier`
    Barrier = 6,
    /// `split`. The statistics count its traffic as an `all_gather`.
    Split = 7,
    /// `all_to_all`
    AllToAll = 8,
}

impl Operation {
    /// Every kind, in the order of the codes.
    pub const ALL: [Operation; 9] = [
        Operation::AllReduce,
        Operation::AllGather,
        Operation::ReduceScatter,
        Operation::Broadcast,
        Operation::Send,
        Operation::Recv,
        Operation::Barrier,
        Operation::Split,
        Operation::AllToAll,
    ];

    /// Returns the name of the method: `all_reduce`, …
    pub fn name(self) -> &'static str {
        match self {
            Operation::AllReduce => "all_reduce",
            Operation::AllGather => "all_gather",
            Operation::ReduceScatter => "reduce_scatter",
            Operation::Broadcast => "broadcast",
            Operation::Send => "send",
            Operation::Recv => "recv",
            Operation::Barrier => "barrier",
            Operation::Split => "split",
            Operation::AllToAll => "all_to_all",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One operation as one rank sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Signature {
    pub(crate) operation: Operation,
    /// Index of the operation: among the collectives of the group, or among the messages from one rank to another.
    pub(crate) sequence: u64,
    /// Number of vectors; 0 for a barrier.
    pub(crate) vectors: u16,
    /// `None` for a barrier, and if the vectors differ in type.
    pub(crate) dtype: Option<Dtype>,
    /// Total number of elements of all vectors, or of bytes if the vectors differ in type. In a header of an
    /// all_to_all, the number of elements that the sender of the header sends to its receiver.
    pub(crate) length: u64,
    pub(crate) reduce: Option<ReduceOp>,
    /// Other values that must agree: the root of a broadcast, or a digest of the counts and, if there are several
    /// vectors, of their types. In a header of an all_to_all, the number of elements that the sender of the header
    /// expects from its receiver.
    pub(crate) layout: u64,
    /// Whether the buffers are in device memory.
    pub(crate) on_device: bool,
}

impl Signature {
    /// Returns whether `other`, from a peer, belongs to the same operation. The `send` of a message and the `recv` that
    /// waits for it are the same operation. In an all_to_all, each rank must expect the number of elements that
    /// the other sends.
    pub(crate) fn agrees_with(&self, other: &Signature) -> bool {
        let operation = |operation| if operation == Operation::Recv { Operation::Send } else { operation };
        let (length, layout) = match self.operation {
            Operation::AllToAll => (self.layout, self.length),
            _ => (self.length, self.layout),
        };
        operation(self.operation) == operation(other.operation)
            && Signature { operation: other.operation, length, layout, ..*self } == *other
    }

    /// Returns the total size of all vectors in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.length * self.dtype.map_or(1, |dtype| dtype.size() as u64)
    }

    /// Returns the signature of the part of an all_to_all between this rank and one peer, given the elements that this
    /// rank sends and expects.
    pub(crate) fn between(&self, sent: usize, expected: usize) -> Signature {
        Signature { length: sent as u64, layout: expected as u64, ..*self }
    }

    /// Returns a signature that is equal on all ranks: for an all_to_all, the signature without counts.
    pub(crate) fn of_all(&self) -> Signature {
        if self.operation == Operation::AllToAll { self.between(0, 0) } else { *self }
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}", self.operation, self.sequence)?;
        if self.vectors > 1 {
            write!(f, " of {} buffers with", self.vectors)?;
        }
        match self.dtype {
            Some(dtype) if self.vectors > 1 => write!(f, " {} {dtype}", self.length)?,
            Some(dtype) => write!(f, " of {} {dtype}", self.length)?,
            None if self.vectors > 1 => write!(f, " {} bytes", self.length)?,
            None => {}
        }
        match self.reduce {
            Some(ReduceOp::Max) => f.write_str(" (max)")?,
            Some(ReduceOp::Sum) => f.write_str(" (sum)")?,
            None => {}
        }
        match self.operation {
            Operation::Broadcast => write!(f, " from rank {} of the group", self.layout)?,
            Operation::AllGather | Operation::ReduceScatter => write!(f, " (counts {:08x})", self.layout as u32)?,
            Operation::AllReduce if self.vectors > 1 => write!(f, " (lengths {:08x})", self.layout as u32)?,
            Operation::AllToAll => write!(f, " to the other rank and {} from it", self.layout)?,
            _ => {}
        }
        if self.on_device { f.write_str(" on the device") } else { Ok(()) }
    }
}

/// Size of an encoded [`Header`] in bytes.
pub(crate) const HEADER_BYTES: usize = 64;
const MAGIC: u32 = u32::from_le_bytes(*b"ZRO1");

/// The header of a message: its job, attempt, group and operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    /// Digest of the job's run id.
    pub(crate) job: u64,
    /// Attempt of the job: ranks of a restarted job must not connect to ranks of the previous attempt that are still
    /// running.
    pub(crate) attempt: u32,
    /// Identifies the communicator within the job.
    pub(crate) group: u64,
    pub(crate) signature: Signature,
    /// Offset of the sender's buffer in the sender's arena, if peers may access the buffer in place. May differ between
    /// ranks. The offsets of several vectors follow the header.
    pub(crate) place: Option<u64>,
}

impl Header {
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let signature = &self.signature;
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.attempt.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.job.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.group.to_le_bytes());
        bytes[24..32].copy_from_slice(&signature.sequence.to_le_bytes());
        bytes[32..40].copy_from_slice(&signature.length.to_le_bytes());
        bytes[40..48].copy_from_slice(&signature.layout.to_le_bytes());
        bytes[48] = signature.operation as u8;
        bytes[49] = signature.dtype.map_or(0, |dtype| dtype as u8);
        bytes[50] = match signature.reduce {
            None => 0,
            Some(ReduceOp::Sum) => 1,
            Some(ReduceOp::Max) => 2,
        };
        bytes[52] = u8::from(signature.on_device);
        bytes[53..55].copy_from_slice(&signature.vectors.to_le_bytes());
        if let Some(place) = self.place {
            bytes[51] = 1;
            bytes[56..64].copy_from_slice(&place.to_le_bytes());
        }
        bytes
    }

    /// Returns `None` if the bytes are not a header.
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Header> {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let half_word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        if half_word(0) != MAGIC {
            return None;
        }
        let dtype = match bytes[49] {
            0 => None,
            code => Some(Dtype::from_code(code)?),
        };
        let reduce = match bytes[50] {
            0 => None,
            1 => Some(ReduceOp::Sum),
            2 => Some(ReduceOp::Max),
            _ => return None,
        };
        let operation = *Operation::ALL.get(usize::from(bytes[48]))?;
        let signature = Signature {
            operation,
            sequence: word(24),
            vectors: u16::from_le_bytes([bytes[53], bytes[54]]),
            dtype,
            length: word(32),
            reduce,
            layout: word(40),
            on_device: bytes[52] == 1,
        };
        let place = (bytes[51] == 1).then(|| word(56));
        Some(Header { job: word(8), attempt: half_word(4), group: word(16), signature, place })
    }

    /// Returns `None` if `other` belongs to the same operation. Otherwise returns the descriptions of this and the
    /// other operation.
    pub(crate) fn difference(&self, other: &Header) -> Option<(String, String)> {
        let origin = |header: &Header| (header.job, header.attempt, header.group);
        if origin(self) != origin(other) {
            let describe = |header: &Header| {
                let Header { job, attempt, group, signature, .. } = header;
                format!("{signature} in group {group:x} of job {job:x}, attempt {attempt}")
            };
            return Some((describe(self), describe(other)));
        }
        let agree = self.signature.agrees_with(&other.signature);
        (!agree).then(|| (self.signature.to_string(), other.signature.to_string()))
    }
}

/// Hashes `values` to a number that is the same on all ranks and differs between `kind`s.
pub(crate) fn digest(kind: &str, values: &[usize]) -> u64 {
    let mut hash = Sha256::new_with_prefix(kind);
    for value in values {
        hash.update((*value as u64).to_le_bytes());
    }
    let bytes = hash.finalize();
    u64::from_le_bytes(std::array::from_fn(|i| bytes[i]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(operation: Operation) -> Header {
        let dtype = Some(Dtype::Bf16);
        let signature = Signature {
            operation,
            sequence: 17,
            vectors: 1,
            dtype,
            length: 4096,
            reduce: None,
            layout: 3,
            on_device: false,
        };
        Header { job: 0x1234, attempt: 2, group: 9, signature, place: None }
    }

    #[test]
    fn headers_round_trip() {
        for operation in Operation::ALL {
            let mut sent = header(operation);
            for reduce in [None, Some(ReduceOp::Sum), Some(ReduceOp::Max)] {
                sent.signature.reduce = reduce;
                sent.signature.on_device = reduce.is_some();
                sent.signature.vectors = if reduce.is_some() { u16::MAX } else { 1 };
                for place in [None, Some(0), Some(u64::MAX)] {
                    sent.place = place;
                    assert_eq!(Header::decode(&sent.encode()), Some(sent));
                }
            }
        }
        let mut damaged = header(Operation::Send).encode();
        damaged[0] ^= 1;
        assert_eq!(Header::decode(&damaged), None);
        let mut unknown = header(Operation::Send).encode();
        unknown[48] = 200;
        assert_eq!(Header::decode(&unknown), None);
    }

    #[test]
    fn a_mismatch_shows_both_operations() {
        let here = header(Operation::Recv);
        assert_eq!(here.difference(&header(Operation::Send)), None);
        let mut there = header(Operation::Send);
        there.signature.length = 2048;
        let (ours, theirs) = here.difference(&there).expect("lengths differ");
        assert_eq!((ours.as_str(), theirs.as_str()), ("recv #17 of 4096 bf16", "send #17 of 2048 bf16"));
        let mut exchange = header(Operation::AllToAll);
        exchange.signature = exchange.signature.between(5, 6);
        let mut other = exchange;
        other.signature = exchange.signature.between(6, 5);
        assert_eq!(exchange.difference(&other), None);
        other.signature = exchange.signature.between(5, 6);
        let (ours, _) = exchange.difference(&other).expect("5 are sent where 6 are expected");
        assert_eq!(ours, "all_to_all #17 of 5 bf16 to the other rank and 6 from it");
        let mut several = header(Operation::AllGather);
        several.signature = Signature { vectors: 3, dtype: None, ..several.signature };
        let (ours, theirs) = several.difference(&header(Operation::AllGather)).expect("the numbers of vectors differ");
        assert_eq!(ours, "all_gather #17 of 3 buffers with 4096 bytes (counts 00000003)");
        assert_eq!(theirs, "all_gather #17 of 4096 bf16 (counts 00000003)");
        let mut old = header(Operation::Send);
        old.attempt = 1;
        let (ours, theirs) = here.difference(&old).expect("attempts differ");
        assert!(ours.contains("attempt 2") && theirs.contains("attempt 1"), "{ours} / {theirs}");
    }
}
