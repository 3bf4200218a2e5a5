//! The texts of all files, in the cache or in memory. A text has tokens, and facts that can be read without the tokens.

use zero_engine::{At, DataError};

use super::super::cache::{self, Work};
use super::super::files::Source;
use super::super::options::CacheOptions;
use super::super::records::TokenizedWhere;
use super::super::tokens::TokenizedFile;
use super::super::watch::Watch;

/// Number of texts whose facts are read at a time.
const BLOCK: u64 = 1 << 14;

/// The facts of a text, which are stored in addition to its tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Facts {
    /// Index of the first trained token after the text's first token, or the number of tokens if there is none. In a
    /// pair, the index of the answer's first token.
    pub(super) first: usize,
    /// Number of trained tokens, without the text's first token.
    pub(super) trained: usize,
    /// Whether a pair's prompt ends with different tokens when it is tokenized together with an answer.
    pub(super) is_cut: bool,
    /// The position of the record in its file.
    pub(super) at: At,
}

/// The length and the facts of a text, without its tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Text {
    /// Index of the text's first token among the tokens of the file.
    start: usize,
    /// Number of tokens.
    pub(super) length: usize,
    pub(super) facts: Facts,
}

impl Facts {
    /// Number of `u64` values that store the facts.
    pub(super) const COUNT: usize = 3;

    pub(super) fn words(&self) -> [u64; Self::COUNT] {
        let at = match self.at {
            At::Byte(at) => at << 2,
            At::Line(at) => at << 2 | 1,
            At::Record(at) => at << 2 | 2,
            At::Row(at) => at << 2 | 3,
        };
        [self.first as u64, (self.trained as u64) << 1 | u64::from(self.is_cut), at]
    }

    fn of([first, trained, at]: [u64; Self::COUNT]) -> Self {
        let place = [At::Byte, At::Line, At::Record, At::Row][(at & 3) as usize];
        Self { first: first as usize, trained: (trained >> 1) as usize, is_cut: trained & 1 == 1, at: place(at >> 2) }
    }
}

/// Texts with random access.
pub(super) struct Texts {
    files: Vec<TokenizedFile>,
    /// The index of each file's first text, followed by the total number of texts.
    firsts: Vec<usize>,
}

impl Texts {
    /// Renders and tokenizes files, or opens their texts in the cache.
    pub(super) fn open(
        sources: &[Source],
        options: &CacheOptions,
        work: &impl Work,
        watch: &dyn Watch,
    ) -> Result<Self, DataError> {
        let files = cache::tokenized(sources, options, work, watch)?;
        let mut firsts = vec![0];
        for file in &files {
            firsts.push(firsts[firsts.len() - 1] + file.storage.documents() as usize);
        }
        let (texts, path) = (firsts[firsts.len() - 1], sources[0].path.clone());
        match u32::try_from(texts) {
            Ok(_) => Ok(Self { files, firsts }),
            Err(_) => Err(DataError::Tokenizer { path, message: format!("a data set of {texts} texts is too large") }),
        }
    }

    /// Returns the number of texts.
    pub(super) fn len(&self) -> usize {
        self.firsts[self.firsts.len() - 1]
    }

    /// Calls `visit` with each text, the index of its file, and the index of the text in the file.
    pub(super) fn each(
        &self,
        mut visit: impl FnMut(Text, usize, usize) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        for (number, file) in self.files.iter().enumerate() {
            let documents = file.storage.documents();
            for first in (0..documents).step_by(BLOCK as usize) {
                let count = BLOCK.min(documents - first);
                for (i, text) in of_file(file, first, count)?.into_iter().enumerate() {
                    visit(text, number, first as usize + i)?;
                }
            }
        }
        Ok(())
    }

    /// Returns a text without its tokens.
    pub(super) fn text(&self, index: usize) -> Result<Text, DataError> {
        let (file, number) = self.find(index);
        Ok(of_file(file, number, 1)?[0])
    }

    /// Reads the first `most` tokens of a text, and whether each token is trained.
    pub(super) fn read(&self, index: usize, most: usize) -> Result<(Vec<u32>, Vec<bool>), DataError> {
        let (file, number) = self.find(index);
        let text = of_file(file, number, 1)?[0];
        let mut tokens = vec![];
        file.storage.read(text.start, text.length.min(most), &mut tokens)?;
        let trained = tokens.iter().map(|token| token & 1 == 1).collect();
        tokens.iter_mut().for_each(|token| *token >>= 1);
        Ok((tokens, trained))
    }

    /// Reads all texts that are in the cache, and checks their checksums.
    pub(super) fn verify(&self, watch: &dyn Watch) -> Result<(), DataError> {
        self.files.iter().filter_map(|file| file.storage.entry()).try_for_each(|entry| entry.verify(watch))
    }

    /// Returns where the tokens of each file are stored.
    pub(super) fn tokenized(&self) -> Vec<TokenizedWhere> {
        self.files.iter().map(TokenizedFile::described).collect()
    }

    /// Returns the file of a text, and the index of the text in the file.
    fn find(&self, index: usize) -> (&TokenizedFile, u64) {
        let file = self.firsts.partition_point(|&first| first <= index) - 1;
        (&self.files[file], (index - self.firsts[file]) as u64)
    }
}

/// Returns `count` texts of a file, starting at index `first`.
fn of_file(file: &TokenizedFile, first: u64, count: u64) -> Result<Vec<Text>, DataError> {
    let storage = &file.storage;
    let end = first + count;
    let rows = storage.rows(first..storage.documents().min(end + 1))?;
    let rows = rows.as_chunks::<{ 1 + Facts::COUNT }>().0;
    let text = |(i, &[start, ref facts @ ..]): (usize, &[u64; 1 + Facts::COUNT])| {
        let end = rows.get(i + 1).map_or(storage.len(), |next| next[0] as usize);
        Text { start: start as usize, length: end - start as usize, facts: Facts::of(*facts) }
    };
    Ok(rows.iter().take(count as usize).enumerate().map(text).collect())
}

/// A subset of the numbers `0..count`, in ascending order. A subset of all numbers takes no memory.
#[derive(Debug, Default)]
pub(super) struct Chosen {
    seen: usize,
    chosen: Option<Vec<u32>>,
}

impl Chosen {
    /// Chooses or skips the next number.
    pub(super) fn push(&mut self, is_chosen: bool) {
        let next = self.seen as u32;
        match &mut self.chosen {
            None if is_chosen => {}
            None => self.chosen = Some((0..next).collect()),
            Some(chosen) if is_chosen => chosen.push(next),
            Some(_) => {}
        }
        self.seen += 1;
    }

    pub(super) fn len(&self) -> usize {
        self.chosen.as_ref().map_or(self.seen, Vec::len)
    }

    /// Returns the chosen number at `index`, which must be below [`len`](Self::len).
    pub(super) fn get(&self, index: usize) -> usize {
        self.chosen.as_ref().map_or(index, |chosen| chosen[index] as usize)
    }
}
