//! Compares the *terms* of the ranks: versions, programs and settings, which must be equal on all ranks. The ranks
//! compare them when they meet, before any memory is allocated.
//!
//! Each rank publishes a digest of its terms. The terms themselves are exchanged only if digests differ, so that the
//! errors of all ranks name the same differing rank, the same key and both values. Processes compare their terms over
//! the store, before they connect. Ranks that are connected already, such as threads, compare them over their group,
//! with [`agree`].

use sha2::{Digest, Sha256};

use crate::buffers::buffer::Buffer;
use crate::buffers::dtype::Dtype;
use crate::communicator::Communicator;
use crate::error::CommError;
use crate::store::MAX_VALUE;

/// Maximum length of a key or value in bytes. Longer ones are truncated and end with a digest of the whole.
const LONGEST: usize = 160;

/// Number of hexadecimal digits of a digest.
const DIGITS: usize = 16;

/// Checks that the key–value pairs are equal on all ranks of `comm`, and compares them in the given order. This is a
/// collective. [`connect`](crate::connect()) makes the same check of [`Options::terms`](crate::Options) for the
/// processes that it joins.
///
/// # Errors
/// Returns [`CommError::Disagreement`] on every rank, with the first key that differs, or the error of a collective.
pub fn agree(comm: &dyn Communicator, terms: &[(String, String)]) -> Result<(), CommError> {
    let terms = Terms::new(terms);
    let (rank, size) = (comm.rank(), comm.size());
    let own = Buffer::U8(terms.digest().into_bytes());
    let all = comm.all_gather(own, Buffer::zeros(Dtype::U8, DIGITS * size), &vec![DIGITS; size]);
    let all = all.wait()?.output.into_u8()?;
    let Some(peer) = all.chunks(DIGITS).position(|digest| *digest != all[..DIGITS]) else { return Ok(()) };
    let of = |owner: usize| {
        let own = if rank == owner { terms.encode() } else { Vec::new() };
        let length = comm.broadcast(vec![own.len() as i64].into(), owner).wait()?.into_i64()?[0] as usize;
        let buffer = if rank == owner { own } else { vec![0; length] };
        Ok::<_, CommError>(Terms::decode(&comm.broadcast(buffer.into(), owner).wait()?.into_u8()?))
    };
    let (first, second) = (of(0)?, of(peer)?);
    Err(first.disagreement(0, &second, peer))
}

/// Key–value pairs, in the order in which they are compared.
pub(crate) struct Terms(Vec<(String, String)>);

impl Terms {
    pub(crate) fn new(terms: &[(String, String)]) -> Terms {
        Terms(terms.iter().map(|(key, value)| (shown(key), shown(value))).collect())
    }

    /// Returns the digest as [`DIGITS`] hexadecimal digits.
    pub(crate) fn digest(&self) -> String {
        short_digest(&self.text())
    }

    /// Encodes the keys and values, each followed by a zero byte. The result is truncated to the maximum length of a
    /// value in the store.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = self.text();
        if bytes.len() > MAX_VALUE {
            let end = bytes[..MAX_VALUE].iter().rposition(|&byte| byte == 0).map_or(0, |last| last + 1);
            bytes.truncate(end);
        }
        bytes
    }

    fn text(&self) -> Vec<u8> {
        self.0.iter().flat_map(|(key, value)| [key.as_bytes(), &[0], value.as_bytes(), &[0]].concat()).collect()
    }

    /// Decodes the terms that another rank has published.
    pub(crate) fn decode(bytes: &[u8]) -> Terms {
        let text = String::from_utf8_lossy(bytes);
        let words: Vec<&str> = text.split('\0').collect();
        Terms(words.as_chunks().0.iter().map(|[key, value]| (key.to_string(), value.to_string())).collect())
    }

    /// Returns the error that reports that rank `rank` has these terms and rank `peer` has the terms `other`.
    pub(crate) fn disagreement(&self, rank: usize, other: &Terms, peer: usize) -> CommError {
        let of =
            |terms: &Terms, key: &str| terms.0.iter().find(|(name, _)| name == key).map(|(_, value)| value.clone());
        let keys = self.0.iter().chain(&other.0).map(|(key, _)| key);
        let differing = keys.map(|key| (key.clone(), of(self, key), of(other, key))).find(|(_, a, b)| a != b);
        // The differing key was truncated by `encode`.
        let whole = || ("the list of settings".to_string(), Some(self.digest()), Some(other.digest()));
        let (key, here, there) = differing.unwrap_or_else(whole);
        let value = |value: Option<String>| value.unwrap_or_else(|| "missing".to_string());
        CommError::Disagreement { rank, peer, key, here: value(here), there: value(there) }
    }
}

fn shown(text: &str) -> String {
    let text = text.replace('\0', " ");
    if text.len() <= LONGEST {
        return text;
    }
    let end = (0..=LONGEST - 40).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    format!("{}… (digest {})", &text[..end], short_digest(text.as_bytes()))
}

fn short_digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes)[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(list: &[(&str, &str)]) -> Terms {
        Terms::new(&list.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect::<Vec<_>>())
    }

    fn difference(first: &Terms, second: &Terms) -> [String; 3] {
        match first.disagreement(0, &Terms::decode(&second.encode()), 3) {
            CommError::Disagreement { rank: 0, peer: 3, key, here, there } => [key, here, there],
            other => panic!("{other}"),
        }
    }

    #[test]
    fn the_first_key_that_differs_is_named_with_both_values() {
        let first = terms(&[("version", "1"), ("stage", "2"), ("lr", "0.1")]);
        let second = terms(&[("version", "1"), ("stage", "3"), ("lr", "0.2")]);
        assert_ne!(first.digest(), second.digest());
        assert_eq!(difference(&first, &second), ["stage", "2", "3"]);
        let shorter = terms(&[("version", "1"), ("stage", "2")]);
        assert_eq!(difference(&first, &shorter), ["lr", "0.1", "missing"]);
        assert_eq!(difference(&shorter, &first), ["lr", "missing", "0.1"]);
    }

    #[test]
    fn ranks_of_a_group_name_the_same_difference() {
        let meet = |of: fn(usize) -> &'static str| {
            let ranks = crate::threads(3, &crate::Options::default()).into_iter().map(|comm| {
                std::thread::spawn(move || {
                    let pairs = [("stage", "3"), ("lr", of(comm.rank()))];
                    agree(&*comm, &pairs.map(|(key, value)| (key.to_string(), value.to_string())))
                })
            });
            ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().expect("no panic")).collect::<Vec<_>>()
        };
        assert!(meet(|_| "0.1").iter().all(Result::is_ok));
        let ended = meet(|rank| if rank == 2 { "0.2" } else { "0.1" });
        let text = "the ranks were started with different settings: lr is 0.1 on rank 0 and 0.2 on rank 2";
        assert!(ended.iter().all(|end| end.as_ref().is_err_and(|error| error.to_string() == text)), "{ended:?}");
    }

    #[test]
    fn truncated_values_still_differ() {
        let long = "ä".repeat(3000);
        let (first, second) = (terms(&[("data", &long)]), terms(&[("data", &format!("{long}x"))]));
        let [key, here, there] = difference(&first, &second);
        assert!(key == "data" && here != there && here.len() < 2 * LONGEST, "{here} {there}");
        assert_eq!(first.digest(), terms(&[("data", &long)]).digest());
    }

    #[test]
    fn terms_beyond_the_store_limit_still_differ() {
        let many = |last: &str| {
            let mut list: Vec<(String, String)> = (0..5000).map(|i| (format!("key {i}"), "x".repeat(100))).collect();
            list.push(("last".into(), last.into()));
            Terms::new(&list)
        };
        let (first, second) = (many("1"), many("2"));
        assert!(first.encode().len() <= MAX_VALUE);
        let here = Terms::decode(&first.encode());
        assert_ne!(first.digest(), second.digest());
        assert_eq!(difference(&here, &second)[0], "the list of settings");
    }
}
