//! Streams over non-blocking sockets, with a checksum after each chunk.
//!
//! TCP's own checksum has only 16 bits, and devices that forward a packet recompute it. If a chunk does not match its
//! CRC-32, the job ends before the chunk is used. The four bytes of the checksum follow the bytes of the chunk. `push`
//! and `pull` report the last byte of a chunk only when the whole checksum has been transferred.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crc32fast::Hasher;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::stream::{Broken, Wait, Wires};

/// Size of a chunk in bytes: large enough to amortize a system call, and small enough that a received chunk is still in
/// the L2 cache when it is reduced.
pub const CHUNK: usize = 256 * 1024;

/// One rank's sockets of one lane.
pub(crate) struct TcpWires {
    /// By rank in the group.
    peers: Vec<Option<Peer>>,
}

struct Peer {
    stream: TcpStream,
    sending: Option<Tail>,
    receiving: Tail,
    /// Memory for the current chunk and its checksum, used for a chunk that is reduced directly from this memory.
    /// Consists of words, so that elements are aligned.
    staging: Vec<u64>,
    staged: usize,
}

/// The state of the transfer of the current chunk's checksum.
#[derive(Default)]
struct Tail {
    /// CRC of the bytes received so far; used by the receiving end.
    crc32: Hasher,
    bytes: [u8; TAIL],
    /// Number of checksum bytes sent or received.
    moved: usize,
    /// Whether all bytes of the chunk were transferred, but the last byte is not reported yet.
    last: bool,
}

/// Size of a checksum in bytes.
const TAIL: usize = 4;

impl Tail {
    /// Returns how many bytes of the chunk to report after a transfer of `moved` bytes. These belong first to the
    /// `rest` of the chunk, and then to the checksum.
    fn report(&mut self, moved: usize, rest: usize) -> usize {
        // If the last byte is not reported yet, `rest` is that byte, and it has been transferred already.
        let own = if self.last { 0 } else { moved.min(rest) };
        self.moved += moved - own;
        let is_last = self.last || own == rest;
        match (is_last, self.moved == TAIL) {
            (false, _) => own,
            (true, true) => rest,
            (true, false) => {
                self.last = true;
                own.saturating_sub(1)
            }
        }
    }
}

impl TcpWires {
    pub(crate) fn new(streams: Vec<Option<TcpStream>>) -> io::Result<TcpWires> {
        let peer = |stream: Option<TcpStream>| -> io::Result<Option<Peer>> {
            let Some(stream) = stream else { return Ok(None) };
            stream.set_nonblocking(true)?;
            Ok(Some(Peer { stream, sending: None, receiving: Tail::default(), staging: Vec::new(), staged: 0 }))
        };
        Ok(TcpWires { peers: streams.into_iter().map(peer).collect::<io::Result<_>>()? })
    }

    fn peer(&mut self, peer: usize) -> Result<&mut Peer, Broken> {
        self.peers[peer].as_mut().ok_or_else(|| Broken { detail: "not connected".into() })
    }
}

/// Maps the result of a non-blocking transfer. Returns `None` if the transfer would block, and an error if the stream
/// has ended.
fn transferred(result: io::Result<usize>) -> Result<Option<usize>, Broken> {
    match result {
        Ok(0) => Err(Broken { detail: "the peer closed the connection".into() }),
        Ok(count) => Ok(Some(count)),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Checks that the received data matches its checksum.
fn intact(found: u32, sent: [u8; TAIL]) -> Result<(), Broken> {
    match found == u32::from_le_bytes(sent) {
        true => Ok(()),
        false => Err(Broken { detail: "the received data is damaged: its checksum does not match".into() }),
    }
}

impl Wires for TcpWires {
    fn chunk(&self) -> usize {
        CHUNK
    }

    fn push(&mut self, peer: usize, bytes: &[u8]) -> Result<usize, Broken> {
        let Peer { stream, sending, .. } = self.peer(peer)?;
        // The first push of a chunk offers the whole chunk.
        let tail =
            sending.get_or_insert_with(|| Tail { bytes: crc32fast::hash(bytes).to_le_bytes(), ..Tail::default() });
        let own = if tail.last { &[] } else { bytes };
        let written = stream.write_vectored(&[IoSlice::new(own), IoSlice::new(&tail.bytes[tail.moved..])]);
        let Some(count) = transferred(written)? else { return Ok(0) };
        let reported = tail.report(count, bytes.len());
        if reported == bytes.len() {
            *sending = None;
        }
        Ok(reported)
    }

    fn pull(&mut self, peer: usize, into: &mut [u8]) -> Result<usize, Broken> {
        let Peer { stream, receiving: tail, .. } = self.peer(peer)?;
        let rest = into.len();
        let own = if tail.last { &mut [] } else { &mut *into };
        let read = stream.read_vectored(&mut [IoSliceMut::new(own), IoSliceMut::new(&mut tail.bytes[tail.moved..])]);
        let Some(count) = transferred(read)? else { return Ok(0) };
        if !tail.last {
            tail.crc32.update(&into[..count.min(rest)]);
        }
        let reported = tail.report(count, rest);
        if reported == rest {
            let Tail { crc32, bytes, .. } = std::mem::take(tail);
            intact(crc32.finalize(), bytes)?;
        }
        Ok(reported)
    }

    fn arrived(&mut self, peer: usize, length: usize) -> Result<bool, Broken> {
        let peer = self.peer(peer)?;
        let whole = length + TAIL;
        if peer.staged == whole {
            return Ok(true);
        }
        peer.staging.resize(CHUNK / size_of::<u64>() + 1, 0);
        let staging: &mut [u8] = bytemuck::cast_slice_mut(&mut peer.staging);
        while peer.staged < whole {
            match transferred(peer.stream.read(&mut staging[peer.staged..whole]))? {
                Some(count) => peer.staged += count,
                None => return Ok(false),
            }
        }
        let mut tail = [0; TAIL];
        tail.copy_from_slice(&staging[length..whole]);
        intact(crc32fast::hash(&staging[..length]), tail)?;
        Ok(true)
    }

    fn view(&self, peer: usize, length: usize) -> &[u8] {
        self.peers[peer].as_ref().map_or(&[], |peer| &bytemuck::cast_slice(&peer.staging)[..length])
    }

    fn consume(&mut self, peer: usize) {
        if let Some(peer) = &mut self.peers[peer] {
            peer.staged = 0;
        }
    }

    fn is_taken(&self, _peer: usize) -> bool {
        false
    }

    fn is_network(&self) -> bool {
        true
    }

    /// Returns 0. Sockets need no mark, because `poll` also reports data that arrived before the call.
    fn mark(&self) -> u32 {
        0
    }

    fn wait(&mut self, _mark: u32, waits: &[Wait], limit: Duration) {
        let polled = waits.iter().filter_map(|wait| {
            let (peer, flags) = match wait {
                Wait::Room(peer) => (peer, PollFlags::OUT),
                Wait::Data(peer) => (peer, PollFlags::IN),
            };
            let peer = self.peers[*peer].as_ref()?;
            Some(PollFd::new(&peer.stream, flags))
        });
        let mut polled: Vec<PollFd<'_>> = polled.collect();
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        // An error is ignored, because the caller tries the streams again in any case.
        let _ = poll(&mut polled, Some(&limit));
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Returns the two ends of a connection: one as wires, the other as a raw stream.
    fn pair() -> (TcpWires, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        (TcpWires::new(vec![Some(near)]).unwrap(), far)
    }

    fn push_all(wires: &mut TcpWires, bytes: &[u8]) {
        let mut sent = 0;
        while sent < bytes.len() {
            sent += wires.push(0, &bytes[sent..]).unwrap();
        }
    }

    fn pull_all(wires: &mut TcpWires, into: &mut [u8]) -> Result<(), Broken> {
        let mut received = 0;
        while received < into.len() {
            received += wires.pull(0, &mut into[received..])?;
        }
        Ok(())
    }

    /// Returns the bytes that are sent for a chunk: the chunk and its checksum.
    fn on_the_wire(chunk: &[u8]) -> Vec<u8> {
        let (mut wires, mut far) = pair();
        push_all(&mut wires, chunk);
        let mut bytes = vec![0; chunk.len() + TAIL];
        far.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes[..chunk.len()], *chunk);
        bytes
    }

    #[test]
    fn chunks_arrive_however_the_stream_is_fragmented() {
        for length in [1, 2, 3, 4, 5, 100, 1000] {
            let chunk: Vec<u8> = (0..length).map(|i| (i * 37 + 11) as u8).collect();
            let bytes = [on_the_wire(&chunk), on_the_wire(&chunk)].concat();
            for cut in 1..=bytes.len().min(40) {
                let (mut wires, mut far) = pair();
                let bytes = bytes.clone();
                let sender = std::thread::spawn(move || {
                    for part in bytes.chunks(cut) {
                        far.write_all(part).unwrap();
                        std::thread::yield_now();
                    }
                    far
                });
                let mut into = vec![0; length];
                pull_all(&mut wires, &mut into).unwrap();
                assert_eq!(into, chunk, "{length} bytes cut every {cut}");
                while !wires.arrived(0, length).unwrap() {}
                assert_eq!(wires.view(0, length), chunk);
                wires.consume(0);
                sender.join().unwrap();
            }
        }
    }

    #[test]
    fn every_flipped_bit_is_detected_before_a_chunk_is_used() {
        let chunk = *b"sixteen bytes...";
        let bytes = on_the_wire(&chunk);
        for bit in 0..8 * bytes.len() {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            for staged in [false, true] {
                let (mut wires, mut far) = pair();
                far.write_all(&damaged).unwrap();
                let said = match staged {
                    false => pull_all(&mut wires, &mut [0; 16]).unwrap_err(),
                    true => loop {
                        match wires.arrived(0, 16) {
                            Ok(false) => {}
                            Ok(true) => panic!("bit {bit} was not found"),
                            Err(broken) => break broken,
                        }
                    },
                };
                assert!(said.detail.contains("the received data is damaged"), "{}", said.detail);
            }
        }
    }
}
