//! Streams over non-blocking sockets.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::stream::{Broken, Wait, Wires};

/// Bytes of a chunk: enough to make a system call worth its while, and what is reduced is still in the second-level cache.
pub const CHUNK: usize = 256 * 1024;

/// One rank's sockets of one lane.
pub(crate) struct TcpWires {
    /// By rank in the group.
    peers: Vec<Option<Peer>>,
}

struct Peer {
    stream: TcpStream,
    /// The present chunk, when it is to be reduced where it lies; words, for the alignment.
    staging: Vec<u64>,
    staged: usize,
}

impl TcpWires {
    pub(crate) fn new(streams: Vec<Option<TcpStream>>) -> io::Result<TcpWires> {
        let peer = |stream: Option<TcpStream>| -> io::Result<Option<Peer>> {
            let Some(stream) = stream else { return Ok(None) };
            stream.set_nonblocking(true)?;
            Ok(Some(Peer { stream, staging: Vec::new(), staged: 0 }))
        };
        Ok(TcpWires { peers: streams.into_iter().map(peer).collect::<io::Result<_>>()? })
    }

    fn peer(&mut self, peer: usize) -> Result<&mut Peer, Broken> {
        self.peers[peer].as_mut().ok_or_else(|| Broken { detail: "there is no connection".into() })
    }
}

/// The result of a non-blocking transfer: nothing now is `None`, the end of the stream an error.
fn transferred(result: io::Result<usize>) -> Result<Option<usize>, Broken> {
    match result {
        Ok(0) => Err(Broken { detail: "the connection was closed".into() }),
        Ok(count) => Ok(Some(count)),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

impl Wires for TcpWires {
    fn chunk(&self) -> usize {
        CHUNK
    }

    fn push(&mut self, peer: usize, bytes: &[u8]) -> Result<usize, Broken> {
        let peer = self.peer(peer)?;
        Ok(transferred(peer.stream.write(bytes))?.unwrap_or(0))
    }

    fn pull(&mut self, peer: usize, into: &mut [u8]) -> Result<usize, Broken> {
        let peer = self.peer(peer)?;
        Ok(transferred(peer.stream.read(into))?.unwrap_or(0))
    }

    fn arrived(&mut self, peer: usize, length: usize) -> Result<bool, Broken> {
        let peer = self.peer(peer)?;
        peer.staging.resize(CHUNK / size_of::<u64>(), 0);
        while peer.staged < length {
            let rest = &mut bytemuck::cast_slice_mut(&mut peer.staging)[peer.staged..length];
            match transferred(peer.stream.read(rest))? {
                Some(count) => peer.staged += count,
                None => return Ok(false),
            }
        }
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

    /// Sockets remember what has happened.
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
        // An error means no more than that the caller looks again.
        let _ = poll(&mut polled, Some(&limit));
    }
}
