//! Opens data files. Only this module knows how files are stored.
//!
//! A [`Source`] is a file with its format. It provides a stream of [`documents`](Source::documents), of
//! [`records`](Source::records), of [`rows`](Source::rows) or of tokens, each with its position in the file. A stream
//! holds a bounded part of the file in memory, in addition to the returned item.
//!
//! | file | stored | in memory |
//! |---|---|---|
//! | text, JSON, CSV | plain, bzip2, gzip or zstd | 8 MiB of a text, one line, or one array element; for zstd, also the window, usually at most 8 MiB |
//! | Parquet, Arrow | | one batch of rows |
//! | MDS | raw, Brotli, bzip2, gzip, Snappy or zstd | one shard |

mod archive;
mod arrow;
mod encoding;
mod folder;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod lines;
mod mds;
mod records;
pub(crate) mod remote;
mod shard;
mod splits;
pub(super) mod streams;
mod table;
mod text;
mod values;

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use zero_engine::DataError;
use zero_engine::files::{expand, identity};

use super::binary;
use super::options::{Format, TokenDtype};
use super::tokens::pieces::Cuts;
use archive::Archive;
use folder::Folder;
pub(super) use lines::Lines;
pub(super) use records::reason;
pub(super) use remote::Access;
use remote::Downloaded;
use shard::Shard;
pub(crate) use streams::{Document, Documents, Object, Records};
pub(super) use table::Cells;
use table::Container;

/// A file whose format is known.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Source {
    pub(super) path: PathBuf,
    pub(super) format: Format,
    storage: Storage,
    /// Keeps a downloaded file in the cache while the source is in use.
    local: Option<zero_store::Local>,
}

/// The storage of a file's content.
#[derive(Debug, Clone, PartialEq)]
enum Storage {
    /// Bytes, compressed or not.
    Bytes(Option<Archive>),
    Table(Container),
    Shard(Arc<Shard>),
}

/// The rows of a table.
pub(super) enum Rows {
    /// Comma-separated values.
    Lines(Lines),
    /// The names of the columns, and the rows.
    Cells(Vec<String>, Box<dyn Iterator<Item = Result<Cells, DataError>>>),
}

/// Returns whether these first bytes of a file are those of an archive that can be decompressed.
pub(super) fn is_archive(start: &[u8]) -> bool {
    Archive::recognize(start).is_some()
}

/// Number of bytes at the start of a file that identify its format.
const START: usize = 8192;

impl Source {
    /// Recognizes a file by its first bytes. `format` selects the content to read. `Auto` recognizes Parquet and Arrow
    /// files by their first bytes, and other files by their names. Token files and raw bytes are not inspected, because
    /// they have no magic number.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or has another format.
    pub(super) fn new(path: impl Into<PathBuf>, format: Format) -> Result<Self, DataError> {
        let path = path.into();
        let by_name = if format == Format::Auto { format_by_name(&path) } else { format };
        // The content of a pipe can be read only once.
        let is_file = fs::metadata(&path).map_err(DataError::io(&path))?.is_file();
        if !is_file || is_raw(by_name) {
            return Ok(Self { path, format: by_name, storage: Storage::Bytes(None), local: None });
        }
        let mut start = vec![];
        let file = File::open(&path).map_err(DataError::io(&path))?;
        file.take(START as u64).read_to_end(&mut start).map_err(DataError::io(&path))?;
        let container = match binary::kind(&start) {
            Some("a Parquet file") => Some(Container::Parquet),
            Some("an Arrow file") => Some(Container::ArrowFile),
            Some("an Arrow stream") => Some(Container::ArrowStream),
            _ => None,
        };
        let storage = container.map_or_else(|| Storage::Bytes(Archive::recognize(&start)), Storage::Table);
        let format = match (format, &storage) {
            (Format::Auto, Storage::Table(Container::Parquet)) => Format::Parquet,
            (Format::Auto, Storage::Table(_)) => Format::Arrow,
            (Format::Auto, _) => by_name,
            (format, _) => format,
        };
        let source = Self { path, format, storage, local: None };
        match (format, &source.storage) {
            (Format::Parquet, Storage::Table(Container::Parquet))
            | (Format::Arrow, Storage::Table(Container::ArrowFile | Container::ArrowStream))
            | (Format::Csv | Format::Chat, _) => Ok(source),
            (Format::Parquet, _) => Err(source.is_no("a Parquet file")),
            (Format::Arrow, _) => Err(source.is_no("an Arrow file")),
            (Format::Mds, _) => Err(source.is_no("a folder of MDS shards")),
            (_, Storage::Table(_)) => Err(source.is_no(if format == Format::Jsonl { "JSON lines" } else { "text" })),
            _ => Ok(source),
        }
    }

    fn is_no(&self, wanted: &'static str) -> DataError {
        let found = match &self.storage {
            Storage::Bytes(None) => "a file in another format",
            Storage::Bytes(Some(archive)) => archive.name(),
            Storage::Table(container) => container.name(),
            Storage::Shard(_) => "an MDS shard",
        };
        DataError::Format { path: self.path.clone(), found, wanted }
    }

    /// Returns whether the file is read as text for the tokenizer. `text_key` names the column or field with the text.
    pub(super) fn has_documents(&self, text_key: &str) -> bool {
        match &self.storage {
            Storage::Shard(shard) => self.format == Format::Mds && !mds::has_tokens(shard, text_key),
            _ => {
                use Format::{Arrow, Bytes, Jsonl, Parquet, Text};
                matches!(self.format, Text | Bytes | Jsonl | Parquet | Arrow)
            }
        }
    }

    /// Returns whether the file contains tokens.
    pub(super) fn has_tokens(&self, text_key: &str) -> bool {
        self.format == Format::Tokens || self.format == Format::Mds && !self.has_documents(text_key)
    }

    /// Returns a text with everything on which the documents depend, except the file's bytes.
    pub(super) fn key(&self, text_key: &str) -> String {
        match (self.format, &self.storage) {
            (Format::Bytes, _) => "bytes".into(),
            (_, Storage::Bytes(_)) if self.format != Format::Jsonl => "text".into(),
            (_, Storage::Shard(shard)) => format!("mds {text_key} {}", shard.layout()),
            // The storage of a table is left out, because its bytes identify it.
            (..) => format!("{:?} {text_key}", self.format),
        }
    }

    /// Opens the documents of a file. `text_key` names the column or field with the text.
    ///
    /// A text file is one document. It is returned in parts. Each part ends where
    /// [`piece_end`](super::tokens::pieces::piece_end) cuts. Empty documents are skipped.
    ///
    /// # Errors
    /// Fails if the file cannot be opened or has no such column. An item fails if the file cannot be read or is
    /// truncated, if a line or row has no text, or if the byte tokenizer would read a binary file.
    pub(super) fn documents(&self, text_key: &str, cuts: Cuts) -> Result<Documents, DataError> {
        match &self.storage {
            Storage::Table(container) => table::documents(&self.path, *container, text_key),
            Storage::Shard(shard) => mds::documents(Arc::clone(shard), text_key),
            Storage::Bytes(archive) => {
                let reader = archive::open(&self.path, *archive)?;
                Ok(match self.format {
                    Format::Jsonl => records::texts(reader, text_key)?,
                    format => Box::new(text::Parts::new(reader, cuts, format == Format::Bytes)),
                })
            }
        }
    }

    /// Opens the records of JSON lines, of a JSON array or of a table. If a table has some of `columns`, only these
    /// columns are decoded.
    ///
    /// # Errors
    /// Fails if the file cannot be opened. An item fails if the file cannot be read or is truncated, or if a record is
    /// not a JSON object. In the last case, the error names the record's line.
    pub(super) fn records(&self, columns: &[&str]) -> Result<Records, DataError> {
        match &self.storage {
            Storage::Table(container) => table::records(&self.path, *container, columns),
            Storage::Shard(shard) => mds::records(Arc::clone(shard), columns),
            Storage::Bytes(archive) => records::open(archive::open(&self.path, *archive)?),
        }
    }

    /// Opens the rows of a table.
    ///
    /// # Errors
    /// Fails if the file cannot be opened or has no rows.
    pub(super) fn rows(&self) -> Result<Rows, DataError> {
        match &self.storage {
            Storage::Table(container) => {
                let (names, rows) = table::rows(&self.path, *container)?;
                Ok(Rows::Cells(names, Box::new(rows)))
            }
            Storage::Shard(_) => Err(self.is_no("a table of numbers")),
            Storage::Bytes(archive) => {
                Ok(Rows::Lines(Lines::new(archive::open(&self.path, *archive)?.without_mark()?)))
            }
        }
    }

    /// Reads the tokens of a shard, and calls `push` with the tokens of each sample.
    ///
    /// # Errors
    /// Fails if the shard cannot be read or a token is not below `vocabulary`.
    pub(super) fn tokens(
        &self,
        dtype: TokenDtype,
        vocabulary: usize,
        push: impl FnMut(&[u32]) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        match &self.storage {
            Storage::Shard(shard) => mds::tokens(shard, dtype, vocabulary, push),
            _ => Err(self.is_no("a folder of MDS shards")),
        }
    }
}

/// Returns the format that a file's name implies. The case of the extension does not matter.
pub(super) fn format_by_name(path: &Path) -> Format {
    let extension =
        |path: &Path| path.extension().and_then(|extension| extension.to_str()).map(str::to_ascii_lowercase);
    let archive = extension(path).filter(|end| matches!(end.as_str(), "bz2" | "gz" | "gzip" | "zst" | "zstd"));
    let name = if archive.is_some() { path.with_extension("") } else { path.into() };
    match extension(&name).as_deref() {
        Some("bin") if archive.is_none() => Format::Tokens,
        Some("json" | "jsonl" | "ndjson") => Format::Jsonl,
        Some("csv") => Format::Csv,
        Some("parquet") => Format::Parquet,
        Some("arrow" | "feather") => Format::Arrow,
        _ => Format::Text,
    }
}

/// The names of files, globs and folders, and the split to read from each of them.
pub(super) type Names<'n> = (&'n [String], Option<&'n str>);

/// Returns the files of `sources`, each with its format. The files in the folder of a data set keep the order of the
/// data set. Files in stores are downloaded.
///
/// # Errors
/// Fails if a file is missing, is unreadable or has another format, if a folder does not contain a data set or the
/// split, or if a store fails.
pub(super) fn sources(
    (sources, split): Names<'_>,
    format: Format,
    access: &Access<'_>,
) -> Result<Vec<Source>, DataError> {
    let (mut all, mut seen) = (vec![], std::collections::BTreeSet::new());
    for name in sources {
        for source in named(name, split, format, access)? {
            let source = source?;
            if seen.insert(identity(&source.path)) {
                all.push(source);
            }
        }
    }
    if all.is_empty() { Err(DataError::Empty { sources: sources.to_vec() }) } else { Ok(all) }
}

/// Returns the first file of `sources`, without opening the other files.
///
/// # Errors
/// Returns the same errors as [`sources`], for the first file.
pub(super) fn first(
    (sources, split): Names<'_>,
    format: Format,
    access: &Access<'_>,
) -> Result<Option<Source>, DataError> {
    let Some(name) = sources.first() else { return Ok(None) };
    named(name, split, format, access)?.next().transpose()
}

/// Returns an iterator over the files of one source. Each file is opened when the iterator reaches it.
fn named<'a>(
    name: &str,
    split: Option<&str>,
    format: Format,
    access: &Access<'a>,
) -> Result<Box<dyn Iterator<Item = Result<Source, DataError>> + 'a>, DataError> {
    let folder;
    let mut split = split;
    let path = match zero_config::is_address(name) {
        false => Path::new(name),
        true => match access.download(name, split)? {
            Downloaded::Folder(found) => {
                folder = found;
                &folder
            }
            Downloaded::Split(found) => {
                (folder, split) = (found, None);
                &folder
            }
            Downloaded::Files(files) => {
                let source = move |local: Result<zero_store::Local, DataError>| {
                    let local = local?;
                    let source = Source::new(&local.path, format)?;
                    Ok(Source { local: Some(local), ..source })
                };
                return Ok(Box::new(files.into_iter().map(source)));
            }
        },
    };
    let is_folder = path.is_dir();
    let folder = match split {
        Some(split) if is_folder => Some(splits::open(path, split)?),
        Some(split) => {
            splits::is_train(path, split)?;
            None
        }
        None if is_folder && !is_raw(format) => Folder::open(path)?,
        None => None,
    };
    let files = match folder {
        None => expand(&[path.to_string_lossy().into_owned()])?,
        Some(Folder::Files(files)) => files,
        Some(Folder::Mds(shards)) => {
            let shard = move |shard: Shard| {
                let (path, storage) = (shard.path.clone(), Storage::Shard(Arc::new(shard)));
                let source = |format| Source {
                    path,
                    format: if format == Format::Auto { Format::Mds } else { format },
                    storage,
                    local: None,
                };
                match format {
                    Format::Auto | Format::Mds | Format::Chat => Ok(source(format)),
                    _ => Err(source(format).is_no("a file in the format that `data.format` sets")),
                }
            };
            return Ok(Box::new(shards.into_iter().map(shard)));
        }
    };
    Ok(Box::new(files.into_iter().map(move |path| Source::new(path, format))))
}

fn is_raw(format: Format) -> bool {
    matches!(format, Format::Tokens | Format::Bytes)
}

#[cfg(test)]
mod tests;
