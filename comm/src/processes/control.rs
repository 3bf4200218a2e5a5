//! The control connections: one between every two processes, idle as long as the job is healthy.
//!
//! When a process ends for any reason, the kernel closes its connections. Every other process notices this, even while
//! its own lanes sleep on shared memory. A process that leaves in an orderly way sends a goodbye first. A process that
//! fails sends the cause. A process that has waited for long asks the others which ranks they wait for.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::health::{Announce, Board, Cause};
use crate::inquiry::{WaitRegistry, WaitState};

/// This process's ends of the control connections.
pub(crate) struct Control {
    shared: Arc<Shared>,
    monitor: Option<JoinHandle<()>>,
}

struct Shared {
    /// By global rank.
    streams: Vec<Option<TcpStream>>,
    board: Arc<Board>,
    registry: Arc<WaitRegistry>,
    leaving: AtomicBool,
}

/// Delay between the loss of a connection and the failure of all operations. Within this time, ranks still read data
/// that the ending process sent on other connections, and its message with the cause may arrive.
const GRACE: Duration = Duration::from_millis(200);

const GOODBYE: u8 = 0;
const LOST: u8 = 1;
const ABORTED: u8 = 2;
const MISMATCH: u8 = 3;
const QUESTION: u8 = 4;
const ANSWER_WAITING: u8 = 5;
const ANSWER_ELSEWHERE: u8 = 6;

impl Control {
    pub(crate) fn start(
        streams: Vec<Option<TcpStream>>,
        board: Arc<Board>,
        registry: Arc<WaitRegistry>,
    ) -> std::io::Result<Control> {
        for stream in streams.iter().flatten() {
            stream.set_nonblocking(false)?;
            // The socket buffers are normally empty, so a write blocks only if the peer's process is stopped.
            stream.set_write_timeout(Some(GRACE))?;
        }
        let shared = Arc::new(Shared { streams, board, registry, leaving: AtomicBool::new(false) });
        let watched = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("zero-comm watch".into());
        let monitor = thread.spawn(move || watched.watch())?;
        Ok(Control { shared, monitor: Some(monitor) })
    }
}

impl Announce for Control {
    fn announce(&self, cause: &Cause) {
        self.shared.tell(&encode(cause));
    }

    fn ask(&self, peer: usize, topic: u64) {
        self.shared.tell_one(peer, &frame(QUESTION, &halves(topic), &[]));
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.shared.leaving.store(true, Ordering::SeqCst);
        self.shared.tell(&frame(GOODBYE, &[], &[]));
        for stream in self.shared.streams.iter().flatten() {
            // Ends the monitor's wait. Data already written still arrives.
            let _ = stream.shutdown(Shutdown::Both);
        }
        if let Some(monitor) = self.monitor.take() {
            let _ = monitor.join();
        }
    }
}

#[cfg(feature = "fuzzing")]
impl Control {
    /// Parses `bytes` as frames from rank 1, in a job of two ranks. The bytes arrive in pieces of at most `piece`
    /// bytes.
    pub(crate) fn fuzz(bytes: &[u8], piece: usize) {
        let (board, registry) = (Board::new(2), Arc::<WaitRegistry>::default());
        let streams = vec![None, None];
        let shared = Shared { streams, board: Arc::clone(&board), registry, leaving: AtomicBool::new(false) };
        let mut peer = Peer { rank: 1, unread: Vec::new(), ended: None, gone: false };
        for piece in bytes.chunks(piece) {
            peer.unread.extend_from_slice(piece);
            shared.understand(&mut peer);
        }
        // If this rank forwards the received cause, the receiver decodes the same cause, except that long texts are
        // truncated.
        if let Some(cause) = board.cause() {
            let (code, payload) = take_frame(&mut encode(cause)).expect("a whole frame");
            let heard = decode(code, &payload).expect("a cause");
            assert_eq!(encode(&heard), encode(cause));
        }
    }
}

/// The monitor's state of a peer.
struct Peer {
    rank: usize,
    /// Bytes that do not yet form a whole frame.
    unread: Vec<u8>,
    /// When the connection ended without a goodbye.
    ended: Option<Instant>,
    gone: bool,
}

impl Shared {
    fn tell(&self, frame: &[u8]) {
        for mut stream in self.streams.iter().flatten() {
            let _ = stream.write_all(frame);
        }
    }

    fn tell_one(&self, rank: usize, frame: &[u8]) {
        if let Some(mut stream) = self.streams.get(rank).and_then(Option::as_ref) {
            let _ = stream.write_all(frame);
        }
    }

    fn watch(&self) {
        let peer = |rank| Peer { rank, unread: Vec::new(), ended: None, gone: false };
        let ranks = (0..self.streams.len()).filter(|rank| self.streams[*rank].is_some());
        let mut peers: Vec<Peer> = ranks.map(peer).collect();
        while !self.leaving.load(Ordering::SeqCst) && peers.iter().any(|peer| !peer.gone) {
            let due = peers.iter().filter(|peer| !peer.gone).filter_map(|peer| peer.ended).min();
            let limit = due.map(|ended| (ended + GRACE).saturating_duration_since(Instant::now()));
            for peer in self.readable(&peers, limit) {
                self.read(&mut peers[peer]);
            }
            for peer in peers.iter_mut().filter(|peer| !peer.gone) {
                if peer.ended.is_some_and(|ended| ended.elapsed() >= GRACE) {
                    peer.gone = true;
                    let detail = "the process exited or the connection broke".to_string();
                    let cause = Cause::Lost { peer: peer.rank, detail };
                    if !self.leaving.load(Ordering::SeqCst) && self.board.learn(cause.clone()) {
                        self.tell(&encode(&cause));
                    }
                }
            }
        }
    }

    /// Returns the peers whose connections are readable. Waits for at most `limit` until a connection becomes readable.
    fn readable(&self, peers: &[Peer], limit: Option<Duration>) -> Vec<usize> {
        let open = (0..peers.len()).filter(|peer| !peers[*peer].gone && peers[*peer].ended.is_none());
        let watched = open.filter_map(|peer| Some((peer, self.streams[peers[peer].rank].as_ref()?)));
        let (indices, mut polled): (Vec<usize>, Vec<PollFd<'_>>) =
            watched.map(|(peer, stream)| (peer, PollFd::new(stream, PollFlags::IN))).unzip();
        let limit =
            limit.map(|limit| Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() });
        if poll(&mut polled, limit.as_ref()).is_err() {
            return Vec::new();
        }
        indices.into_iter().zip(&polled).filter(|(_, fd)| !fd.revents().is_empty()).map(|(peer, _)| peer).collect()
    }

    fn read(&self, peer: &mut Peer) {
        let Some(mut stream) = self.streams[peer.rank].as_ref() else { return };
        let mut bytes = [0; 4096];
        match stream.read(&mut bytes) {
            Ok(count) if count > 0 => peer.unread.extend_from_slice(&bytes[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            _ => peer.ended = Some(Instant::now()),
        }
        self.understand(peer);
    }

    /// Handles all whole frames received from a peer.
    fn understand(&self, peer: &mut Peer) {
        while let Some((code, payload)) = take_frame(&mut peer.unread) {
            if code == GOODBYE {
                self.board.leave(peer.rank);
                peer.gone = true;
            } else if let Some(cause) = decode(code, &payload) {
                self.board.learn(cause);
            } else if let Some((topic, numbers)) = decode_numbers(&payload) {
                match code {
                    QUESTION => self.tell_one(peer.rank, &answer(topic, &self.registry.wait_state(topic))),
                    ANSWER_WAITING => {
                        if let Some(wait_state) = waiting(&numbers) {
                            self.registry.answered(topic, peer.rank, wait_state);
                        }
                    }
                    ANSWER_ELSEWHERE => self.registry.answered(topic, peer.rank, WaitState::Elsewhere),
                    _ => {}
                }
            }
        }
    }
}

/// Encodes a frame: code, length of the rest as u16, then ranks as u32 and texts preceded by their length as u16.
fn frame(code: u8, ranks: &[usize], texts: &[&str]) -> Vec<u8> {
    let mut payload = Vec::new();
    for rank in ranks {
        payload.extend_from_slice(&(*rank as u32).to_le_bytes());
    }
    for text in texts {
        let end = (0..=text.len().min(MAX_TEXT)).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        payload.extend_from_slice(&(end as u16).to_le_bytes());
        payload.extend_from_slice(&text.as_bytes()[..end]);
    }
    [&[code], &(payload.len() as u16).to_le_bytes()[..], &payload].concat()
}

/// Maximum length of a text in bytes; longer texts are truncated.
const MAX_TEXT: usize = 4096;

fn take_frame(unread: &mut Vec<u8>) -> Option<(u8, Vec<u8>)> {
    let (head, rest) = unread.split_first_chunk::<3>()?;
    let length = usize::from(u16::from_le_bytes([head[1], head[2]]));
    let (code, payload) = (head[0], rest.get(..length)?.to_vec());
    unread.drain(..3 + length);
    Some((code, payload))
}

fn encode(cause: &Cause) -> Vec<u8> {
    match cause {
        Cause::Lost { peer, detail } => frame(LOST, &[*peer], &[detail]),
        Cause::Aborted { by, reason } => frame(ABORTED, &[*by], &[reason]),
        Cause::Mismatch { rank, here, peer, there } => frame(MISMATCH, &[*rank, *peer], &[here, there]),
    }
}

/// Splits a topic into two u32 numbers of a frame.
fn halves(topic: u64) -> [usize; 2] {
    [(topic >> 32) as usize, (topic & 0xFFFF_FFFF) as usize]
}

fn answer(topic: u64, wait_state: &WaitState) -> Vec<u8> {
    let topic = halves(topic);
    match wait_state {
        // The list of ranks is truncated to fit into a frame.
        WaitState::Waiting { ranks, moved } => {
            let age = moved.map_or(NEVER, |moved| (moved.elapsed().as_millis() as usize).min(NEVER - 1));
            frame(ANSWER_WAITING, &[&topic, &[age][..], &ranks[..ranks.len().min(MAX_TEXT)]].concat(), &[])
        }
        WaitState::Elsewhere => frame(ANSWER_ELSEWHERE, &topic, &[]),
    }
}

/// Stands in an answer for the milliseconds since data last moved, if no data has moved.
const NEVER: usize = u32::MAX as usize;

/// Decodes the numbers of an answer that follow the topic.
fn waiting(numbers: &[usize]) -> Option<WaitState> {
    let (age, ranks) = numbers.split_first()?;
    let moved = Some(*age).filter(|age| *age != NEVER);
    let moved = moved.and_then(|age| Instant::now().checked_sub(Duration::from_millis(age as u64)));
    Some(WaitState::Waiting { ranks: ranks.to_vec(), moved })
}

/// Decodes the topic of a question or an answer, and the numbers that follow it.
fn decode_numbers(payload: &[u8]) -> Option<(u64, Vec<usize>)> {
    let (numbers, rest) = payload.as_chunks();
    let mut numbers = numbers.iter().map(|bytes| u32::from_le_bytes(*bytes));
    let topic = u64::from(numbers.next()?) << 32 | u64::from(numbers.next()?);
    rest.is_empty().then(|| (topic, numbers.map(|number| number as usize).collect()))
}

fn decode(code: u8, mut payload: &[u8]) -> Option<Cause> {
    let rank = |payload: &mut &[u8]| -> Option<usize> {
        let (rank, rest) = payload.split_first_chunk()?;
        *payload = rest;
        Some(u32::from_le_bytes(*rank) as usize)
    };
    let text = |payload: &mut &[u8]| -> Option<String> {
        let (length, rest) = payload.split_first_chunk()?;
        let (text, rest) = rest.split_at_checked(usize::from(u16::from_le_bytes(*length)))?;
        *payload = rest;
        Some(String::from_utf8_lossy(text).into_owned())
    };
    let bytes = &mut payload;
    match code {
        LOST => Some(Cause::Lost { peer: rank(bytes)?, detail: text(bytes)? }),
        ABORTED => Some(Cause::Aborted { by: rank(bytes)?, reason: text(bytes)? }),
        MISMATCH => {
            let (rank, peer) = (rank(bytes)?, rank(bytes)?);
            Some(Cause::Mismatch { rank, here: text(bytes)?, peer, there: text(bytes)? })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_and_answers_round_trip() {
        let topic = 0x0123_4567_89AB_CDEF;
        for ranks in [vec![], vec![0, 70_000], (0..MAX_TEXT).collect()] {
            let told = WaitState::Waiting { ranks, moved: None };
            let (code, payload) = take_frame(&mut answer(topic, &told)).expect("a whole frame");
            let numbers = decode_numbers(&payload).expect("an answer");
            assert_eq!((code, decode(code, &payload), numbers.0), (ANSWER_WAITING, None, topic));
            assert_eq!(waiting(&numbers.1), Some(told));
            assert_eq!(decode_numbers(&payload[..payload.len() - 1]), None);
            assert_eq!(decode_numbers(&payload[..4]), None);
        }
        assert_eq!(waiting(&[]), None);
        let moved = Some(Instant::now() - Duration::from_secs(2));
        let told = WaitState::Waiting { ranks: vec![1], moved };
        let (_, payload) = take_frame(&mut answer(topic, &told)).expect("a whole frame");
        let numbers = decode_numbers(&payload).expect("an answer").1;
        assert!(
            matches!(waiting(&numbers), Some(WaitState::Waiting { moved: later, .. }) if later >= moved),
            "{numbers:?}"
        );
    }

    #[test]
    fn failure_causes_round_trip_even_in_fragments() {
        let long = "ä".repeat(MAX_TEXT);
        let causes = [
            Cause::Lost { peer: 3, detail: "gone".into() },
            Cause::Aborted { by: 70_000, reason: "disk full".into() },
            Cause::Mismatch { rank: 0, here: "all_gather #1".into(), peer: 1, there: String::new() },
        ];
        let mut unread = Vec::new();
        for cause in &causes {
            let bytes = encode(cause);
            unread.extend_from_slice(&bytes[..5]);
            assert_eq!(take_frame(&mut unread), None);
            unread.extend_from_slice(&bytes[5..]);
            let (code, payload) = take_frame(&mut unread).expect("a whole frame");
            assert_eq!(decode(code, &payload).as_ref(), Some(cause));
            for cut in 0..payload.len() {
                assert_eq!(decode(code, &payload[..cut]), None);
            }
        }
        let mut unread = encode(&Cause::Aborted { by: 0, reason: long });
        let (code, payload) = take_frame(&mut unread).expect("a whole frame");
        let Some(Cause::Aborted { reason, .. }) = decode(code, &payload) else { panic!("another cause") };
        assert_eq!(reason.len(), MAX_TEXT);
    }
}
