//! The journal of a search: `results.jsonl`, or `sweep.jsonl` for a sweep. It has one line per result, so an
//! interrupted search can continue.

use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use zero_engine::{Error, counted};

/// A journal file, opened for appending.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Creates a journal with this name in `folder`; its first line is `head`.
    pub(super) fn create(folder: &Path, name: &str, head: &Value) -> Result<Self, Error> {
        let path = folder.join(name);
        let file = File::create(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
        let mut journal = Self { path, file };
        journal.write(head)?;
        Ok(journal)
    }

    /// Reopens the journal in `folder`. Returns the journal, its lines after the first line, and the number of
    /// unreadable lines, which are skipped. Returns `None` if the journal does not exist or has no complete line.
    ///
    /// # Errors
    /// Fails if the first line of the journal is not `head`: the journal then belongs to another search.
    pub(super) fn reopen(folder: &Path, name: &str, head: &Value) -> Result<Option<(Self, Vec<Value>, usize)>, Error> {
        let path = folder.join(name);
        let failed = |source| Error::Io { path: path.clone(), source };
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        // If the machine crashed, the last line may be truncated, and parts of the file may contain foreign bytes.
        let whole = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        if whole == 0 {
            return Ok(None);
        }
        let lines = text[..whole - 1].split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
        let mut lines = lines.map(serde_json::from_slice::<Value>);
        if lines.next().and_then(Result::ok).as_ref() != Some(head) {
            return Err(Error::setting(
                "autotuning.results_dir",
                format!("{} belongs to another configuration or another version of zero-train", path.display()),
                "omit --resume to start over, or choose another folder",
            ));
        }
        let (lines, unreadable): (Vec<_>, Vec<_>) = lines.partition(Result::is_ok);
        let lines = lines.into_iter().flatten().collect();
        let mut file = OpenOptions::new().write(true).open(&path).map_err(failed)?;
        file.set_len(whole as u64).and_then(|()| file.seek(SeekFrom::End(0))).map_err(failed)?;
        Ok(Some((Self { path, file }, lines, unreadable.len())))
    }

    /// Returns whether `folder` has a journal with at least one complete line.
    pub(super) fn exists(folder: &Path, name: &str) -> bool {
        let path = folder.join(name);
        path.exists() && fs::read(path).map_or(true, |text| text.contains(&b'\n'))
    }

    /// Returns a line for the user about skipped results; `None` if none was skipped.
    pub(super) fn skipped(&self, lines: usize) -> Option<String> {
        let lines = (lines > 0).then(|| counted(lines, "damaged line", "damaged lines"))?;
        Some(format!("{}: skipped {lines}; their trials run again", self.path.display()))
    }

    /// Appends a line.
    pub(super) fn write(&mut self, line: &Value) -> Result<(), Error> {
        let written = self.file.write_all(format!("{line}\n").as_bytes());
        written.map_err(|source| Error::Io { path: self.path.clone(), source })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const NAME: &str = "results.jsonl";

    #[test]
    fn a_truncated_line_is_dropped_and_later_lines_are_whole() {
        let folder = tempfile::tempdir().unwrap();
        let head = json!({"event": "begin", "crc32": 7});
        assert!(Journal::reopen(folder.path(), NAME, &head).unwrap().is_none());
        let mut journal = Journal::create(folder.path(), NAME, &head).unwrap();
        journal.write(&json!({"event": "run", "id": 1})).unwrap();
        drop(journal);
        let path = folder.path().join(NAME);
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"{\"event\": \"ru").unwrap();
        let (mut journal, lines, skipped) = Journal::reopen(folder.path(), NAME, &head).unwrap().unwrap();
        assert_eq!(skipped, 0);
        assert_eq!(lines, [json!({"event": "run", "id": 1})]);
        journal.write(&json!({"event": "run", "id": 2})).unwrap();
        let (_, lines, _) = Journal::reopen(folder.path(), NAME, &head).unwrap().unwrap();
        assert_eq!(lines.len(), 2);
        // A crash can leave foreign bytes in the middle of the file. The lines after these bytes are still results.
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"\0\0\xff\n\n{\"event\": \"run\", \"id\": 3}\n").unwrap();
        let (journal, lines, skipped) = Journal::reopen(folder.path(), NAME, &head).unwrap().unwrap();
        let said = journal.skipped(skipped).unwrap();
        assert!(said.ends_with("results.jsonl: skipped 1 damaged line; their trials run again"), "{said}");
        assert_eq!(lines.last(), Some(&json!({"event": "run", "id": 3})));
        assert_eq!(lines.len(), 3);
        let error = Journal::reopen(folder.path(), NAME, &json!({"event": "begin", "crc32": 8})).unwrap_err();
        assert!(error.to_string().contains("another configuration"), "{error}");
        // A search that was killed before its first line was complete has no results.
        for text in ["", "{\"event\":"] {
            fs::write(&path, text).unwrap();
            assert!(Journal::reopen(folder.path(), NAME, &head).unwrap().is_none());
            assert!(!Journal::exists(folder.path(), NAME));
        }
    }
}
