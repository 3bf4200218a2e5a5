//! Parses arbitrary bytes as messages of a peer, for the fuzz target `frames`. No input may cause a panic or a hang,
//! and no invalid input may be accepted.

use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::agreement::Terms;
use crate::auth::{self, Key, Refusal, WELCOME};
use crate::buffers::dtype::Dtype;
use crate::collective::signature::{HEADER_BYTES, Header, Operation, Signature};
use crate::connect::Introduction;
use crate::processes::Control;
use crate::store;

/// Parses `data` as a peer's message: the first byte selects the kind of message, the rest is the content.
pub fn frames(data: &[u8]) {
    let Some((&kind, bytes)) = data.split_first() else { return };
    match kind {
        b'h' => header(bytes),
        b'c' => control(bytes),
        b's' => store::fuzzing::server(bytes),
        b'a' => store::fuzzing::client(bytes),
        b'g' => store::fuzzing::greeting(bytes),
        b'p' => stranger(bytes),
        b'i' => drop(Introduction::read(&String::from_utf8_lossy(bytes))),
        b't' => terms(bytes),
        _ => {}
    }
}

fn header(bytes: &[u8]) {
    let Some(theirs) = bytes.first_chunk::<HEADER_BYTES>().and_then(Header::decode) else { return };
    assert_eq!(Header::decode(&theirs.encode()), Some(theirs));
    let dtype = Some(Dtype::F32);
    let signature = Signature {
        operation: Operation::Recv,
        sequence: 1,
        vectors: 1,
        dtype,
        length: 2,
        reduce: None,
        layout: 0,
        on_device: false,
    };
    let exchange = Signature { operation: Operation::AllToAll, ..signature.between(5, 2) };
    for signature in [signature, exchange] {
        let ours = Header { job: 3, attempt: 0, group: 0, signature, place: None };
        match ours.difference(&theirs) {
            Some((here, there)) => assert!(!here.is_empty() && !there.is_empty()),
            None => assert_eq!((theirs.job, theirs.signature.length), (3, 2)),
        }
    }
}

fn control(bytes: &[u8]) {
    if let Some((&piece, bytes)) = bytes.split_first() {
        Control::fuzz(bytes, 1 + usize::from(piece));
    }
}

/// Checks that a peer without the token fails the proof, both as the connecting and as the accepting side.
fn stranger(bytes: &[u8]) {
    let key = Key::new(Some("a token that no input holds"));
    let (mut stream, _peer) = peer_that_sends(bytes);
    let met = auth::demand(&mut stream, &key, |_| WELCOME);
    assert!(matches!(met, Err(Refusal::Proof | Refusal::Io(_))));
    let (mut stream, _peer) = peer_that_sends(bytes);
    assert!(auth::prove(&mut stream, &key, &[0; auth::HELLO_BYTES]).is_err());
}

fn terms(bytes: &[u8]) {
    let ours = Terms::new(&[("version".into(), "1".into())]);
    let theirs = Terms::decode(bytes);
    assert!(!ours.disagreement(0, &theirs, 1).to_string().is_empty());
    assert!(theirs.encode().len() <= store::MAX_VALUE);
}

/// Returns a connection whose other end has sent `bytes` and will send nothing more. Keep the other end alive while
/// reading.
pub(crate) fn peer_that_sends(bytes: &[u8]) -> (TcpStream, UnixStream) {
    // Use a socket pair, which needs no port. There are thousands of connections per second, and each TCP connection
    // would occupy a port for a minute.
    let (ours, mut theirs) = UnixStream::pair().expect("a pair of sockets");
    theirs.set_nonblocking(true).expect("a socket");
    // Bytes beyond the kernel's socket buffer are dropped.
    let _ = theirs.write_all(bytes);
    theirs.shutdown(Shutdown::Write).expect("a socket");
    let ours = TcpStream::from(OwnedFd::from(ours));
    // The other end never reads, so a write must time out.
    ours.set_write_timeout(Some(Duration::from_millis(10))).expect("a socket");
    (ours, theirs)
}
