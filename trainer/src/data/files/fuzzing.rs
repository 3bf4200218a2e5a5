//! Entry points of the fuzz targets. They are not part of the public interface.

use std::path::{Path, PathBuf};
use std::{fs, process};

use super::super::options::CacheOptions;
use super::super::watch::Unwatched;
use super::{Access, sources};
use crate::data::options::{Format, TokenDtype};
use crate::data::tokens::pieces::Cuts;

/// Writes `data` to a file with this name, and reads the file as documents and as records.
pub fn file(name: &str, data: &[u8]) {
    let path = folder().join(name);
    fs::write(&path, data).expect("the folder for temporary files is writable");
    read(&path);
}

/// Writes and reads a folder of MDS shards with this index and this shard.
pub fn shard(index: &[u8], shard: &[u8]) {
    let folder = folder();
    fs::write(folder.join("index.json"), index).expect("the folder for temporary files is writable");
    fs::write(folder.join("shard.00000.mds"), shard).expect("the folder for temporary files is writable");
    read(&folder);
}

fn folder() -> PathBuf {
    let folder = std::env::temp_dir().join(format!("zero-train-fuzzing-{}", process::id()));
    fs::create_dir_all(&folder).expect("the folder for temporary files is writable");
    folder
}

fn read(path: &Path) {
    let (name, cache) = ([path.display().to_string()], CacheOptions::default());
    let access = Access::new(&cache, &Unwatched);
    for source in sources((&name, None), Format::Auto, &access).into_iter().flatten() {
        let documents = source.documents("text", Cuts::Words);
        documents.into_iter().for_each(|documents| documents.take_while(Result::is_ok).for_each(drop));
        let _ = source.tokens(TokenDtype::U16, usize::MAX, |_| Ok(()));
    }
    for source in sources((&name, None), Format::Chat, &access).into_iter().flatten() {
        let records = source.records(&[]);
        records.into_iter().for_each(|records| records.take_while(Result::is_ok).for_each(drop));
    }
}
