//! The unparsed text of a configuration.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::errors::{ErrorKind, Errors, Place, Spot};

/// Maximum size of a configuration in bytes. The largest DeepSpeed configurations have about ten thousand bytes. A
/// file of megabytes is a mistake, such as a data file or a checkpoint, and is reported without being read.
pub(crate) const MAX_BYTES: usize = 1 << 20;

/// The text of a configuration, with its name in messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// Path of the file, or `<stdin>`.
    pub name: String,
    /// YAML or JSON.
    pub text: String,
}

impl Source {
    /// Reads the file at `path`.
    ///
    /// # Errors
    /// The file cannot be read, is larger than 1 MiB, or is not UTF-8.
    pub fn from_path(path: impl AsRef<Path>) -> Result<Self, Errors> {
        let name = path.as_ref().display().to_string();
        match File::open(&path) {
            Ok(file) => Self::from_reader(name, file),
            Err(error) => Err(unreadable(name, &error)),
        }
    }

    /// Reads all of standard input.
    ///
    /// # Errors
    /// The same errors as for [`from_path`](Self::from_path).
    pub fn from_stdin() -> Result<Self, Errors> {
        Self::from_reader("<stdin>".to_string(), io::stdin().lock())
    }

    /// Creates a source from the bytes of a file.
    ///
    /// # Errors
    /// The text is larger than 1 MiB, or it is not UTF-8.
    pub fn from_bytes(name: impl Into<String>, bytes: Vec<u8>) -> Result<Self, Errors> {
        let name = name.into();
        if bytes.len() > MAX_BYTES {
            return Err(too_large(name));
        }
        match String::from_utf8(bytes) {
            Ok(text) => Ok(Self { name, text }),
            Err(error) => {
                let message =
                    format!("not UTF-8 text: the byte at offset {} is invalid", error.utf8_error().valid_up_to());
                Err(Errors::one(ErrorKind::Unreadable, message, vec![whole(name)], None))
            }
        }
    }

    fn from_reader(name: String, reader: impl Read) -> Result<Self, Errors> {
        let mut bytes = Vec::new();
        match reader.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes) {
            Ok(_) => Self::from_bytes(name, bytes),
            Err(error) => Err(unreadable(name, &error)),
        }
    }

    /// Returns at most `length` characters of line `line`, starting at character `from`. Lines are counted from 1,
    /// characters from 0.
    pub(crate) fn excerpt(&self, line: usize, from: usize, length: usize) -> String {
        let mut rest = self.text.as_str();
        for _ in 1..line {
            rest = match rest.find(['\n', '\r']) {
                Some(end) if rest[end..].starts_with("\r\n") => &rest[end + 2..],
                Some(end) => &rest[end + 1..],
                None => return String::new(),
            };
        }
        // Do not search for the end of the line: a line may be the whole file.
        rest.chars().take_while(|c| !matches!(c, '\n' | '\r')).skip(from).take(length).collect()
    }
}

pub(crate) fn too_large(name: String) -> Errors {
    let message = format!("larger than {} KiB: this is not a configuration", MAX_BYTES / 1024);
    Errors::one(ErrorKind::Unreadable, message, vec![whole(name)], None)
}

fn unreadable(name: String, error: &io::Error) -> Errors {
    let message = format!("cannot read the configuration: {error}");
    let begins = if error.kind() == io::ErrorKind::NotFound { relative_paths_begin() } else { String::new() };
    let help = format!("give a readable ds.yaml or ds_config.json, or - for standard input{begins}");
    Errors::one(ErrorKind::Unreadable, message, vec![whole(name)], Some(help))
}

/// Returns the end of the help for a missing file: `; a relative path begins at …`, or nothing if the working
/// directory is unknown.
#[must_use]
pub fn relative_paths_begin() -> String {
    std::env::current_dir().map_or(String::new(), |folder| format!("; a relative path begins at {}", folder.display()))
}

fn whole(name: String) -> Place {
    Place { path: String::new(), spot: Spot::Whole(name) }
}
