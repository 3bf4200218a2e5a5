//! Mutual proof that both ends of a connection know the token of the job.
//!
//! The accepting side sends a random challenge. The connecting side answers with its own challenge, its request
//! (`hello`) and an HMAC-SHA256 over all of these. The accepting side then sends its verdict and an HMAC over all of
//! this data and the verdict. The two proofs carry different labels, so neither can be replayed as the other. A peer
//! has at most two seconds and a few hundred bytes of traffic to complete the proof. The traffic after the proof is
//! neither encrypted nor authenticated.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

/// How long an unauthenticated peer has for the proof.
pub(crate) const PROOF_TIME: Duration = Duration::from_secs(2);
/// Maximum number of unauthenticated connections at a time.
pub(crate) const PENDING: usize = 64;
/// Size of a connection's request in bytes.
pub(crate) const HELLO_BYTES: usize = 64;

const GREETING: &[u8; 8] = b"zero-c2\n";
const NONCE_BYTES: usize = 32;
const PROOF_BYTES: usize = 32;

/// The request that the connecting side sends. The protocol that runs on the connection defines its meaning.
pub(crate) type Hello = [u8; HELLO_BYTES];

/// The HMAC key of the proofs.
#[derive(Clone)]
pub(crate) struct Key([u8; 32]);

impl Key {
    /// Derives the key from the token. Without a token the key is not secret, and the proof only shows that both sides
    /// use this protocol.
    pub(crate) fn new(token: Option<&str>) -> Key {
        let mut hash = Sha256::new();
        hash.update(b"zero-train job token\n");
        hash.update(token.unwrap_or_default().as_bytes());
        Key(hash.finalize().into())
    }

    fn mac(&self, parts: &[&[u8]]) -> Result<Hmac<Sha256>, Refusal> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).map_err(|_| Refusal::Proof)?;
        for part in parts {
            mac.update(part);
        }
        Ok(mac)
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(…)")
    }
}

/// Why a connection was not established.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The other side does not know the token, or does not accept this side's proof.
    Proof,
    /// The other side accepted the proof but refused the connection. The protocol that runs on the connection defines
    /// the code.
    Verdict(u8),
    /// The other side does not use this protocol.
    Protocol,
    Io(io::Error),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Refusal {
        Refusal::Io(error)
    }
}

/// The verdict that accepts a connection.
pub(crate) const WELCOME: u8 = 0;

/// Runs the connecting side of the proof.
pub(crate) fn prove(stream: &mut TcpStream, key: &Key, hello: &Hello) -> Result<(), Refusal> {
    let deadline = Instant::now() + PROOF_TIME;
    let mut greeting = [0; GREETING.len() + NONCE_BYTES];
    read_by(stream, &mut greeting, deadline)?;
    let (greeting, theirs) = greeting.split_at(GREETING.len());
    if greeting != GREETING {
        return Err(Refusal::Protocol);
    }
    let ours = nonce()?;
    let proof = key.mac(&[b"connect", theirs, &ours, hello])?.finalize().into_bytes();
    stream.write_all(&[&hello[..], &ours, &proof].concat())?;
    let mut answer = [0; 1 + PROOF_BYTES];
    // A side that rejects the proof closes the connection without an answer.
    read_by(stream, &mut answer, deadline).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => Refusal::Proof,
        _ => Refusal::Io(error),
    })?;
    let (verdict, proof) = answer.split_at(1);
    key.mac(&[b"accept", &ours, theirs, hello, verdict])?.verify_slice(proof).map_err(|_| Refusal::Proof)?;
    match verdict[0] {
        WELCOME => Ok(()),
        code => Err(Refusal::Verdict(code)),
    }
}

/// Runs the accepting side of the proof. Returns the request if the proof is valid and `judge` returns [`WELCOME`].
pub(crate) fn demand(stream: &mut TcpStream, key: &Key, judge: impl FnOnce(&Hello) -> u8) -> Result<Hello, Refusal> {
    let deadline = Instant::now() + PROOF_TIME;
    let ours = nonce()?;
    stream.write_all(&[&GREETING[..], &ours].concat())?;
    let mut answer = [0; HELLO_BYTES + NONCE_BYTES + PROOF_BYTES];
    read_by(stream, &mut answer, deadline)?;
    let (hello, rest) = answer.split_at(HELLO_BYTES);
    let (theirs, proof) = rest.split_at(NONCE_BYTES);
    key.mac(&[b"connect", &ours, theirs, hello])?.verify_slice(proof).map_err(|_| Refusal::Proof)?;
    let hello: Hello = std::array::from_fn(|i| hello[i]);
    let verdict = judge(&hello);
    let proof = key.mac(&[b"accept", theirs, &ours, &hello, &[verdict]])?.finalize().into_bytes();
    stream.write_all(&[&[verdict], &proof[..]].concat())?;
    match verdict {
        WELCOME => Ok(hello),
        code => Err(Refusal::Verdict(code)),
    }
}

fn nonce() -> Result<[u8; NONCE_BYTES], Refusal> {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(nonce)
}

/// Like `read_exact`, with one deadline for the whole read.
pub(crate) fn read_by(stream: &mut TcpStream, buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut buffer[filled..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(io::ErrorKind::TimedOut.into()),
            Err(error) => return Err(error),
        }
    }
    stream.set_read_timeout(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn meet(ours: Option<&str>, theirs: Option<&str>, verdict: u8) -> (Result<(), Refusal>, Result<Hello, Refusal>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let key = Key::new(theirs);
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a connection");
            demand(&mut stream, &key, |_| verdict)
        });
        let mut stream = TcpStream::connect(address).expect("a connection");
        let proven = prove(&mut stream, &Key::new(ours), &[7; HELLO_BYTES]);
        (proven, server.join().expect("the server ends"))
    }

    #[test]
    fn the_same_token_is_proven_in_both_directions() {
        let (client, server) = meet(Some("secret"), Some("secret"), WELCOME);
        assert!(client.is_ok());
        assert!(matches!(server, Ok(hello) if hello == [7; HELLO_BYTES]));
        let (client, server) = meet(None, None, 3);
        assert!(matches!((client, server), (Err(Refusal::Verdict(3)), Err(Refusal::Verdict(3)))));
    }

    #[test]
    fn another_token_is_refused() {
        for (ours, theirs) in [(Some("a"), Some("b")), (None, Some("b")), (Some("a"), None)] {
            let (client, server) = meet(ours, theirs, WELCOME);
            assert!(matches!((client, server), (Err(Refusal::Proof), Err(Refusal::Proof))));
        }
    }

    #[test]
    fn an_impostor_that_accepts_anybody_is_refused() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a connection");
            stream.write_all(&[&GREETING[..], &[1; NONCE_BYTES]].concat()).expect("greeted");
            let mut answer = [0; HELLO_BYTES + NONCE_BYTES + PROOF_BYTES];
            stream.read_exact(&mut answer).expect("answered");
            // Send the client's own proof back to it.
            stream.write_all(&[&[WELCOME], &answer[HELLO_BYTES + NONCE_BYTES..]].concat()).expect("accepted");
        });
        let mut stream = TcpStream::connect(address).expect("a connection");
        assert!(matches!(prove(&mut stream, &Key::new(Some("a")), &[0; HELLO_BYTES]), Err(Refusal::Proof)));
        server.join().expect("the server ends");
    }
}
