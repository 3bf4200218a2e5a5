//! A long list of tokens that is cut into samples of T inputs and T targets.

use super::records::{Records, SampleShape, Samples};
use super::token_files::TokenFiles;
use zero_engine::DataError;

/// The storage of the tokens.
pub(super) enum Tokens {
    Memory(Memory),
    Files(TokenFiles),
}

impl Tokens {
    fn len(&self) -> usize {
        match self {
            Tokens::Memory(memory) => memory.len(),
            Tokens::Files(files) => files.len(),
        }
    }

    /// Appends the tokens `start..start + count`. Appends nothing on error.
    fn read(&self, start: usize, count: usize, out: &mut Vec<u32>) -> Result<(), DataError> {
        match self {
            Tokens::Memory(memory) => memory.read(start, count, out),
            Tokens::Files(files) => return files.read(start, count, out),
        }
        Ok(())
    }
}

impl From<TokenFiles> for Tokens {
    fn from(files: TokenFiles) -> Self {
        Tokens::Files(files)
    }
}

/// Tokens in memory, with as few bytes per token as the vocabulary allows.
pub(super) enum Memory {
    U8(Vec<u8>),
    U16(Vec<u16>),
    U32(Vec<u32>),
}

impl Memory {
    pub(super) fn for_vocabulary(vocabulary: usize) -> Self {
        match vocabulary {
            0..=0x100 => Memory::U8(Vec::new()),
            0x101..=0x1_0000 => Memory::U16(Vec::new()),
            _ => Memory::U32(Vec::new()),
        }
    }

    /// Appends a token, which must be below the vocabulary.
    pub(super) fn push(&mut self, token: u32) {
        match self {
            Memory::U8(tokens) => tokens.push(token as u8),
            Memory::U16(tokens) => tokens.push(token as u16),
            Memory::U32(tokens) => tokens.push(token),
        }
    }

    pub(super) fn extend_bytes(&mut self, bytes: &[u8]) {
        match self {
            Memory::U8(tokens) => tokens.extend_from_slice(bytes),
            Memory::U16(tokens) => tokens.extend(bytes.iter().map(|&byte| u16::from(byte))),
            Memory::U32(tokens) => tokens.extend(bytes.iter().map(|&byte| u32::from(byte))),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn len(&self) -> usize {
        match self {
            Memory::U8(tokens) => tokens.len(),
            Memory::U16(tokens) => tokens.len(),
            Memory::U32(tokens) => tokens.len(),
        }
    }

    fn read(&self, start: usize, count: usize, out: &mut Vec<u32>) {
        let range = start..start + count;
        match self {
            Memory::U8(tokens) => out.extend(tokens[range].iter().map(|&token| u32::from(token))),
            Memory::U16(tokens) => out.extend(tokens[range].iter().map(|&token| u32::from(token))),
            Memory::U32(tokens) => out.extend_from_slice(&tokens[range]),
        }
    }
}

/// Sample i has the tokens `i·T .. i·T + T` as inputs and `i·T + 1 .. i·T + T + 1` as targets. The remainder at the end
/// is not used.
pub(super) struct TokenCorpus {
    tokens: Tokens,
    sequence_length: usize,
    samples: usize,
}

impl TokenCorpus {
    /// Creates a corpus. Fails if there are no tokens, or too few for one sample; the error names `sources`.
    pub(super) fn new(tokens: Tokens, sequence_length: usize, sources: &[String]) -> Result<Self, DataError> {
        let sources = sources.to_vec();
        if tokens.len() == 0 {
            return Err(DataError::Empty { sources });
        }
        // A sequence length of 0 gives no samples either.
        match (tokens.len() - 1).checked_div(sequence_length) {
            None | Some(0) => Err(DataError::SequenceTooLong { sequence_length, tokens: tokens.len(), sources }),
            Some(samples) => Ok(TokenCorpus { tokens, sequence_length, samples }),
        }
    }
}

impl Records for TokenCorpus {
    fn samples(&self) -> usize {
        self.samples
    }

    fn shape(&self) -> SampleShape {
        SampleShape::Tokens(self.sequence_length)
    }

    fn append(&self, index: usize, samples: &mut Samples) -> Result<(), DataError> {
        if index >= self.samples {
            return Err(DataError::Index { index, samples: self.samples });
        }
        let inputs = &mut samples.tokens;
        let first = inputs.len();
        self.tokens.read(index * self.sequence_length, self.sequence_length + 1, inputs)?;
        samples.targets.extend_from_slice(&inputs[first + 1..]);
        inputs.pop();
        Ok(())
    }
}
