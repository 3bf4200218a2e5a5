//! Reads files in every storage format, and truncated or damaged files. The tests write these files themselves.

mod archives;
mod damage;
mod folders;
mod oracle;
mod splits;
mod tables;

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use zero_engine::{At, DataError};

use super::super::options::{CacheOptions, Format};
use super::super::watch::Unwatched;
use super::{Access, Source, sources};
use crate::data::tokens::pieces::Cuts;

/// A temporary folder, which is removed at the end.
pub(super) struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }

    /// Returns the error's message without the folder, which differs between runs.
    fn without(&self, error: &DataError) -> String {
        error
            .to_string()
            .replace(&format!("{}/", self.path().display()), "")
            .replace(&self.path().display().to_string(), "")
    }
}

fn open(path: &Path, format: Format) -> Result<Vec<Source>, DataError> {
    sources((&[path.display().to_string()], None), format, &Access::new(&CacheOptions::default(), &Unwatched))
}

/// Returns all documents of a path, each with its position.
fn documents(path: &Path, format: Format, text_key: &str) -> Result<Vec<(At, String)>, DataError> {
    let mut all = vec![];
    for source in open(path, format)? {
        for document in source.documents(text_key, Cuts::Anywhere)? {
            let document = document?;
            all.push((document.at, String::from_utf8_lossy(&document.text).into_owned()));
        }
    }
    Ok(all)
}

/// Returns all records of a path, each with its position.
fn records(path: &Path, columns: &[&str]) -> Result<Vec<(At, Value)>, DataError> {
    let mut all = vec![];
    for source in open(path, Format::Chat)? {
        for record in source.records(columns)? {
            let (at, record) = record?;
            all.push((at, Value::Object(record)));
        }
    }
    Ok(all)
}

fn values(records: Vec<(At, Value)>) -> Vec<Value> {
    records.into_iter().map(|(_, record)| record).collect()
}
