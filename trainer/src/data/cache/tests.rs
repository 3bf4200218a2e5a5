//! Samples from the token cache are bit-identical to samples from files that are tokenized in memory. Entries are built
//! once, shared, and rebuilt when they are damaged.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::super::Unwatched;
use super::super::options::Format;
use super::super::tests::{Files, tokens};
use super::super::{DataOptions, Dataset, FileDataset, open, open_watched};
use super::*;
use crate::data::tokens::tokenizer::Tokenizer;
use crate::data::tokens::tokenizer::tests::words;

/// Files of every text format, with empty documents at the start, in the middle and at the end.
const CORPUS: [(&str, &[u8]); 8] = [
    ("a.txt", b"the cat\nsat on the mat"),
    ("b.jsonl", b"{\"text\": \" \"}\n{\"text\": \"\"}\n{\"text\": \"the mat\"}\n\n{\"text\": \"  \"}\n{\"text\": \"on\\nthe cat\"}\n"),
    ("blank.txt", b" \n "),
    ("c.txt", b"on the dog\n"),
    ("d.jsonl", b"{\"text\": \"sat\", \"other\": \"the cat\"}\n{\"text\": \"cat cat\", \"other\": \"mat\"}"),
    ("empty.jsonl", b""),
    ("empty.txt", b""),
    ("same.txt", b"on the dog\n"),
];

fn corpus() -> Files {
    Files::new(&CORPUS)
}

/// Returns options that use the cache for files of any size.
fn cached(files: &Files, sources: &[&str]) -> DataOptions {
    let options = files.options(sources);
    let cache = CacheOptions { folder: Some(files.path("cache")), least_bytes: 0, ..CacheOptions::default() };
    DataOptions { sequence_length: 1, cache, ..options }
}

fn entries(files: &Files) -> Vec<PathBuf> {
    let listed = fs::read_dir(files.path("cache/tokens")).unwrap().map(|entry| entry.unwrap().path());
    let mut entries: Vec<PathBuf> = listed.filter(|path| !path.ends_with(".lock")).collect();
    entries.sort();
    entries
}

/// Records the phases that are reported.
#[derive(Default)]
struct Counting {
    phases: RefCell<Vec<Phase>>,
    stops_at: Option<Phase>,
}

impl Watch for Counting {
    fn progress(&self, phase: Phase, done: u64, total: u64) {
        assert!(done <= total, "{done} of {total}");
        self.phases.borrow_mut().push(phase);
    }

    fn is_stopped(&self) -> bool {
        self.stops_at.is_some() && self.phases.borrow().last() == self.stops_at.as_ref()
    }
}

impl Counting {
    fn saw(&self, phase: Phase) -> bool {
        self.phases.borrow().contains(&phase)
    }
}

/// Joins documents independently of the code under test.
fn by_hand(tokenizer: &Tokenizer, documents: &[&str]) -> Vec<u32> {
    let mut all = vec![];
    for document in documents.iter().filter(|document| !document.is_empty()) {
        if !all.is_empty() {
            all.extend(tokenizer.encode("\n").unwrap());
        }
        all.extend(tokenizer.encode(document).unwrap());
    }
    all
}

/// Like `words()`, with an additional token for the newline, which separates documents.
fn with_newlines() -> Tokenizer {
    let json = r#"{
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "decoder": null, "added_tokens": [],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": " +"}, "behavior": "Removed", "invert": false},
        "model": {"type": "BPE", "merges": ["t h", "th e"], "unk_token": "u", "fuse_unk": false,
                  "vocab": {"u": 0, "t": 1, "h": 2, "e": 3, "th": 4, "the": 5, "\n": 6, "c": 7, "a": 8}}
    }"#;
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), json).unwrap();
    Tokenizer::from_file(file.path()).unwrap()
}

#[test]
fn cached_samples_equal_those_in_memory() {
    let files = corpus();
    for tokenizer in [Tokenizer::Byte, words(), with_newlines()] {
        for sources in [
            &["*.txt", "*.jsonl"][..],
            &["blank.txt", "b.jsonl", "blank.txt", "a.txt"],
            &["b.jsonl", "blank.txt"],
            &["empty.txt", "d.jsonl", "same.txt", "c.txt"],
        ] {
            let [cached, memory] = [0, u64::MAX].map(|least_bytes| {
                let mut options = cached(&files, sources);
                options.cache.least_bytes = least_bytes;
                open(&options, &tokenizer).unwrap()
            });
            assert_eq!(tokens(&cached), tokens(&memory), "{sources:?}");
        }
        let options = cached(&files, &["blank.txt", "b.jsonl", "c.txt", "blank.txt", "a.txt"]);
        let documents = [" \n ", " ", "", "the mat", "  ", "on\nthe cat", "on the dog\n", "the cat\nsat on the mat"];
        assert_eq!(tokens(&open(&options, &tokenizer).unwrap()), by_hand(&tokenizer, &documents));
    }
}

/// Long documents are tokenized in pieces, and a group of pieces can span files.
#[test]
fn cached_samples_of_large_files_equal_those_in_memory() {
    let text = "the cat sat on the mat\n\n  and the dog\n".repeat(1 << 16);
    let line = |i: usize| format!("{{\"text\": \"the {} cat sat {i}\"}}\n", "on ".repeat(i % 50));
    let lines: String = (0..20_000).map(line).collect();
    let files = Files::new(&[("a.txt", text.as_bytes()), ("b.jsonl", lines.as_bytes()), ("c.txt", b"the end")]);
    for tokenizer in [Tokenizer::Byte, with_newlines()] {
        let [cached, memory] = [0, u64::MAX].map(|least_bytes| {
            let mut options = cached(&files, &["a.txt", "b.jsonl", "c.txt"]);
            options.cache.least_bytes = least_bytes;
            options.sequence_length = 100_000;
            open(&options, &tokenizer).unwrap()
        });
        assert_eq!(cached.len(), memory.len());
        assert!(cached.len() > 5);
        assert_eq!(tokens(&cached), tokens(&memory));
    }
}

#[test]
fn only_new_content_is_tokenized() {
    let files = corpus();
    let watched = |sources: &[&str], watch: &Counting| open_watched(&cached(&files, sources), &words(), watch).unwrap();
    let first = Counting::default();
    watched(&["*.txt"], &first);
    assert!(first.saw(Phase::Hashing) && first.saw(Phase::Tokenizing));
    // `c.txt` and `same.txt` share an entry.
    assert_eq!(entries(&files).len(), 4);

    let again = Counting::default();
    watched(&["*.txt"], &again);
    assert_eq!(*again.phases.borrow(), []);

    let grown = Counting::default();
    watched(&["*.txt", "b.jsonl"], &grown);
    assert!(grown.saw(Phase::Tokenizing));
    assert_eq!(entries(&files).len(), 5);

    // A new file with known content is hashed but not tokenized.
    fs::copy(files.path("a.txt"), files.path("z.txt")).unwrap();
    let moved = Counting::default();
    watched(&["*.txt"], &moved);
    assert!(moved.saw(Phase::Hashing) && !moved.saw(Phase::Tokenizing));
}

#[test]
fn everything_that_tokens_depend_on_is_in_the_cache_key() {
    let files = corpus();
    let mut seen = 0;
    let mut is_new = |options: &DataOptions, tokenizer: &Tokenizer| {
        open(options, tokenizer).unwrap();
        std::mem::replace(&mut seen, entries(&files).len()) < entries(&files).len()
    };
    let options = cached(&files, &["d.jsonl"]);
    assert!(is_new(&options, &words()));
    assert!(!is_new(&DataOptions { sequence_length: 2, ..options.clone() }, &words()), "samples are cut later");
    assert!(is_new(&options, &with_newlines()));
    assert!(is_new(&options, &Tokenizer::Byte));
    assert!(is_new(&DataOptions { text_key: "other".into(), ..options.clone() }, &words()));
    assert!(is_new(&DataOptions { format: Format::Text, ..options.clone() }, &words()));
    fs::write(files.path("d.jsonl"), "{\"text\": \"the the the\"}").unwrap();
    assert!(is_new(&options, &words()));
    assert_eq!(tokens(&open(&options, &words()).unwrap()), [1, 1, 1]);
}

#[test]
fn a_remembered_hash_is_used_only_for_an_unchanged_file() {
    let files = corpus();
    let (path, memos) = (files.path("a.txt"), files.path("memos"));
    fs::create_dir(&memos).unwrap();
    let hashed = Identity::of(&path, &memos, |_| Ok(())).unwrap();
    assert_eq!(Identity::remembered(&path, &memos).unwrap(), Some(hashed.clone()));
    assert_eq!(Identity::remembered(&files.path("c.txt"), &memos).unwrap(), None);
    // This change keeps the length and restores the modification time, as `rsync --times` does.
    let modified = fs::metadata(&path).unwrap().modified().unwrap();
    fs::write(&path, "the mat\nsat on the cat").unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
    assert_eq!(Identity::remembered(&path, &memos).unwrap(), None);
    assert!(matches!(hashed.is_unchanged(&path), Err(DataError::Changed { .. })));
}

#[test]
fn a_damaged_entry_is_rebuilt_and_never_read() {
    let long = "the cat sat on the mat ".repeat(40_000);
    let files = Files::new(&[("a.txt", long.as_bytes())]);
    let options = DataOptions { sequence_length: 1000, ..cached(&files, &["a.txt"]) };
    let expected = tokens(&open(&options, &words()).unwrap());
    let entry = entries(&files).remove(0);
    let whole = fs::read(&entry).unwrap();
    assert!(whole.len() as u64 > 3 * entry::CHUNK);

    // A truncated entry is detected when it is opened.
    for length in [0, 7, 8, 100, whole.len() / 2, whole.len() - 17, whole.len() - 1] {
        fs::write(&entry, &whole[..length]).unwrap();
        assert!(Entry::open(&entry).unwrap().is_none(), "{length}");
        assert_eq!(tokens(&open(&options, &words()).unwrap()), expected, "{length}");
        assert_eq!(fs::read(&entry).unwrap(), whole, "{length}");
    }
    // A changed bit is detected when the entry is opened, or when the affected tokens are read.
    for at in (0..whole.len()).step_by(9973).chain(whole.len() - 300..whole.len()) {
        let mut changed = whole.clone();
        changed[at] ^= 0x10;
        fs::write(&entry, &changed).unwrap();
        let opened = Entry::open(&entry).unwrap();
        if let Some(opened) = opened {
            let message = opened.verify(&Unwatched).unwrap_err().to_string();
            let chunk = at as u64 / entry::CHUNK * entry::CHUNK;
            assert!(message.contains(&format!("byte {chunk}: the cached tokens are damaged")), "{at}: {message}");
            assert!(!entry.exists());
        }
    }
    let mut changed = whole.clone();
    changed[70_000] ^= 1;
    fs::write(&entry, &changed).unwrap();
    let dataset = open(&options, &words()).unwrap();
    let samples: Vec<_> = (0..dataset.len()).map(|index| dataset.batch(&[index])).collect();
    let failed = samples.iter().filter(|sample| sample.is_err()).count();
    assert!(failed > 0 && failed < samples.len(), "{failed}");
    assert_eq!(tokens(&open(&options, &words()).unwrap()), expected);
}

/// The ranks are threads, and one of them builds the entries.
#[test]
fn one_rank_builds_the_cache_for_all_ranks() {
    struct Rank<'a>(&'a AtomicUsize);

    impl Watch for Rank<'_> {
        fn progress(&self, phase: Phase, _: u64, _: u64) {
            self.0.fetch_add(usize::from(phase == Phase::Tokenizing), Ordering::Relaxed);
        }

        fn is_stopped(&self) -> bool {
            false
        }
    }

    let files = corpus();
    let options = cached(&files, &["*.txt", "*.jsonl"]);
    let counts: [AtomicUsize; 4] = Default::default();
    let opened = |count| tokens(&open_watched(&options, &words(), &Rank(count)).unwrap());
    let results: Vec<Vec<u32>> = std::thread::scope(|scope| {
        let opened = &opened;
        let ranks: Vec<_> = counts.iter().map(|count| scope.spawn(move || opened(count))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
    assert_eq!(counts.iter().filter(|count| count.load(Ordering::Relaxed) > 0).count(), 1);
}

#[test]
fn a_waiting_rank_sees_the_progress_and_stops_at_a_signal() {
    let files = corpus();
    let options = cached(&files, &["a.txt"]);
    let folder = files.path("cache/tokens");
    fs::create_dir_all(&folder).unwrap();
    let holder = Lock::wait(&folder, &Unwatched).unwrap().unwrap();
    holder.note(3, 7);
    let waiting = Counting { stops_at: Some(Phase::Waiting), ..Counting::default() };
    assert!(matches!(open_watched(&options, &words(), &waiting), Err(DataError::Stopped)));
    assert_eq!(*waiting.phases.borrow(), [Phase::Waiting]);
    drop(holder);
    open(&options, &words()).unwrap();
}

#[test]
fn a_stopped_preparation_leaves_whole_entries_and_continues() {
    let files = corpus();
    for phase in [Phase::Hashing, Phase::Tokenizing] {
        let stopping = Counting { stops_at: Some(phase), ..Counting::default() };
        let result = open_watched(&cached(&files, &["*.txt", "*.jsonl"]), &words(), &stopping);
        assert!(matches!(result, Err(DataError::Stopped)), "{phase:?}");
        assert_eq!(entries(&files), Vec::<PathBuf>::new());
    }
    // A temporary file that a killed process left behind.
    let left = files.path("cache/tokens/0123.99.tmp");
    fs::write(&left, "half").unwrap();
    let dataset = open(&cached(&files, &["*.txt", "*.jsonl"]), &words()).unwrap();
    assert!(!left.exists());
    assert!(dataset.len() > 10);
}

/// If a file has an error, the files before it keep their entries.
#[test]
fn cache_entries_of_files_before_an_error_are_kept() {
    let files = Files::new(&[("a.jsonl", b"{\"text\": \"the\"}"), ("b.jsonl", b"{\"text\": \"cat\"}\n{\"text\"")]);
    let message = open(&cached(&files, &["*.jsonl"]), &words()).unwrap_err().to_string();
    assert!(message.contains("b.jsonl, line 2: column 7"), "{message}");
    assert_eq!(entries(&files).len(), 1);
}

#[test]
fn a_token_outside_the_model_is_found_in_a_cached_file_too() {
    let files = Files::new(&[("a.txt", b"the cat sat on the mat")]);
    let options = cached(&files, &["a.txt"]);
    open(&options, &words()).unwrap();
    let message = open(&DataOptions { vocabulary: 7, ..options }, &words()).unwrap_err().to_string();
    assert!(message.ends_with("a.txt, byte 19: token 7 is outside the vocabulary of 7 tokens"), "{message}");
}

#[test]
fn a_folder_that_cannot_be_used_is_an_error() {
    let files = corpus();
    fs::write(files.path("cache"), "a file").unwrap();
    let error = open(&cached(&files, &["a.txt"]), &words()).unwrap_err();
    assert!(matches!(error, DataError::Cache { .. }), "{error}");
}

/// A file that changes while it is read gets no entry under the hash of its old content.
#[test]
fn a_file_that_changes_while_it_is_read_is_an_error() {
    struct Growing(PathBuf, AtomicBool);

    impl Watch for Growing {
        fn progress(&self, phase: Phase, _: u64, _: u64) {
            if phase == Phase::Tokenizing && !self.1.swap(true, Ordering::Relaxed) {
                fs::write(&self.0, "on the mat").unwrap();
            }
        }

        fn is_stopped(&self) -> bool {
            false
        }
    }

    let files = corpus();
    let watch = Growing(files.path("a.txt"), AtomicBool::new(false));
    let error = open_watched(&cached(&files, &["a.txt"]), &words(), &watch).map(|_| ()).unwrap_err();
    assert!(matches!(error, DataError::Changed { .. }), "{error}");
    assert_eq!(entries(&files), Vec::<PathBuf>::new());
    let dataset: FileDataset = open(&cached(&files, &["a.txt"]), &words()).unwrap();
    assert_eq!(tokens(&dataset), [4, 1, 7]);
}
