//! Hashes that identify the content of files.

use sha2::{Digest, Sha256};

use super::tokens::width::Width;

/// Returns the SHA-256 of several texts, in hexadecimal. The length of each text is hashed too.
pub(super) fn hash_of(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hex(&hash.finalize())
}

/// Formats bytes in hexadecimal.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The properties of a document from which `zero-train data stats` computes its statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DocumentFacts {
    pub(crate) tokens: u64,
    /// The first half of the SHA-256 of the tokens.
    pub(crate) hash: [u8; 16],
}

/// Computes the properties of a document whose tokens arrive in parts.
#[derive(Default)]
pub(super) struct Facts {
    tokens: u64,
    hash: Sha256,
}

impl Facts {
    pub(super) fn push(&mut self, tokens: &[u32]) {
        self.tokens += tokens.len() as u64;
        let mut bytes = Vec::with_capacity(4 * tokens.len());
        Width::U32.encode(tokens, &mut bytes);
        self.hash.update(bytes);
    }

    pub(super) fn finish(self) -> DocumentFacts {
        let mut hash = [0; 16];
        hash.copy_from_slice(&self.hash.finalize()[..16]);
        DocumentFacts { tokens: self.tokens, hash }
    }
}

impl DocumentFacts {
    pub(super) fn of(tokens: &[u32]) -> Self {
        let mut facts = Facts::default();
        facts.push(tokens);
        facts.finish()
    }
}
