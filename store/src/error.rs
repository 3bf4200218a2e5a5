//! The errors of object stores. Every error names the address; errors of a download also name the first byte that is
//! missing or wrong.

use std::io;
use std::path::{Path, PathBuf};

/// An error of a store, or of the folder with downloads.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address is invalid.
    #[error("{address} is not a valid URL: {problem}")]
    Address {
        /// The address as written.
        address: String,
        /// What is wrong.
        problem: String,
    },
    /// The environment does not say how to reach the store.
    #[error("{address}: {message}")]
    Setup {
        /// The address.
        address: String,
        /// What is missing.
        message: String,
    },
    /// No object has this address.
    #[error("{address} does not exist")]
    Missing {
        /// The address.
        address: String,
    },
    /// No object matches a pattern.
    #[error("no object matches {pattern}")]
    NoMatch {
        /// The pattern.
        pattern: String,
    },
    /// The address names a folder where an object is needed.
    #[error("{address} is a folder of {objects} objects, not an object")]
    Folder {
        /// The address.
        address: String,
        /// Number of objects in it.
        objects: usize,
    },
    /// The store refused access.
    #[error("{address}: access was refused at byte {byte}: {message}")]
    Denied {
        /// The address.
        address: String,
        /// Offset of the first missing byte.
        byte: u64,
        /// The store's answer.
        message: String,
    },
    /// The store rejects this request. A retry would fail, too.
    #[error("{address}: the store responded with {message}")]
    Rejected {
        /// The address.
        address: String,
        /// The status and the store's reason.
        message: String,
    },
    /// The store did not answer, or its connection broke.
    #[error("{address}: the store could not be reached at byte {byte}: {message}")]
    Unreachable {
        /// The address.
        address: String,
        /// Offset of the first missing byte.
        byte: u64,
        /// The last failure.
        message: String,
    },
    /// The object was replaced while it was read.
    #[error("{address} was replaced in the store while it was read, at byte {byte}")]
    Changed {
        /// The address.
        address: String,
        /// Offset of the first missing byte.
        byte: u64,
    },
    /// The content differs from the store's checksum.
    #[error("{address} is damaged{}: the store states {stated}, but the content has {found}", at(*.byte))]
    Corrupt {
        /// The address.
        address: String,
        /// The checksum in the store.
        stated: String,
        /// The checksum of the bytes that were received.
        found: String,
        /// The first byte in which two downloads differ.
        byte: Option<u64>,
    },
    /// The store gave an answer that does not follow its interface.
    #[error("{address}: {problem}")]
    Answer {
        /// The address.
        address: String,
        /// What is wrong.
        problem: String,
    },
    /// The object does not fit into the folder of downloads, whose size is limited.
    #[error("{address} has {size} bytes, but {used} of the cache's {limit} bytes are in use")]
    Limit {
        /// The address.
        address: String,
        /// The object's length in bytes.
        size: u64,
        /// Number of bytes in the folder that cannot be removed.
        used: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// A file on this machine cannot be used.
    #[error("{}: {source}", path.display())]
    Local {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The caller ended the wait.
    #[error("stopped")]
    Stopped,
}

/// object_store's description of an answer with an error status begins with this text.
const STATUS: &str = "Server returned non-2xx status code: ";

fn at(byte: Option<u64>) -> String {
    byte.map_or(String::new(), |byte| format!(" at byte {byte}"))
}

impl Error {
    pub(crate) fn local(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Local { path, source }
    }

    pub(crate) fn unreachable(address: String, byte: u64, error: &dyn std::error::Error) -> Self {
        Self::failed(address, byte, on_one_line(error))
    }

    /// Converts an error of object_store. `byte` is the offset of the first missing byte.
    pub(crate) fn of(address: &str, byte: u64, error: &object_store::Error) -> Self {
        use object_store::Error as E;
        let (address, message) = (address.to_string(), on_one_line(error));
        match error {
            E::NotFound { .. } => Self::Missing { address },
            E::Precondition { .. } | E::NotModified { .. } => Self::Changed { address, byte },
            E::PermissionDenied { .. } | E::Unauthenticated { .. } => Self::Denied { address, byte, message },
            E::InvalidPath { .. } | E::NotSupported { .. } | E::NotImplemented { .. } => {
                Self::Answer { address, problem: message }
            }
            E::UnknownConfigurationKey { .. } => Self::Setup { address, message },
            _ => Self::failed(address, byte, message),
        }
    }

    /// Returns a transient error, unless the store's identity could not be verified or the store rejects the request.
    fn failed(address: String, byte: u64, message: String) -> Self {
        // These status codes are transient: request timeout (408), too early (425), too many requests (429).
        let passes = |status: &str| !status.starts_with('4') || ["408", "425", "429"].contains(&status);
        match message.strip_prefix(STATUS) {
            _ if message.contains("invalid peer certificate") => Self::Setup { address, message },
            Some(answer) if !passes(answer.get(..3).unwrap_or_default()) => {
                Self::Rejected { address, message: answer.into() }
            }
            _ => Self::Unreachable { address, byte, message },
        }
    }

    /// Returns whether the same request may succeed later.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }

    /// Returns advice on what to do.
    pub fn help(&self) -> Option<&'static str> {
        match self {
            Self::Address { .. } | Self::Missing { .. } | Self::NoMatch { .. } => Some("correct the URL"),
            Self::Rejected { .. } => Some("correct the URL, or the endpoint and region in the environment"),
            Self::Folder { .. } => Some("select its objects with a pattern, such as `folder/*.parquet`"),
            Self::Setup { message, .. } if message.contains("certificate") => {
                Some("set SSL_CERT_FILE to the certificates that this machine should trust")
            }
            Self::Setup { .. } | Self::Denied { .. } => {
                Some("set the credentials that the store's own tools use; docs/data.md lists the variables")
            }
            Self::Unreachable { .. } => Some("start again when the store is reachable; downloaded data is kept"),
            Self::Changed { .. } => Some("start again to read the new content"),
            Self::Corrupt { .. } => Some("start again; if it happens again, the object or the network path is damaged"),
            Self::Limit { .. } => Some("increase `data.cache_limit`"),
            Self::Answer { .. } | Self::Local { .. } | Self::Stopped => None,
        }
    }
}

/// Returns the text of the innermost cause of an error, on one line.
pub fn on_one_line(error: &dyn std::error::Error) -> String {
    let mut innermost = error;
    while let Some(cause) = innermost.source() {
        innermost = cause;
    }
    let line = innermost.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
    // object_store's text begins with the request and its retry settings.
    let line = match line.split_once(" - ") {
        Some((attempts, cause)) if attempts.contains("Error performing") => cause.into(),
        _ => line,
    };
    // S3 and Azure describe the error in XML.
    let told = line.split_once('<').and_then(|(status, rest)| {
        let (reason, _) = rest.split_once("<Message>")?.1.split_once("</Message>")?;
        Some(format!("{}: {}", status.trim_end_matches([' ', ':']), reason.trim()))
    });
    let line = told.unwrap_or(line);
    // Other stores may answer with a page of HTML.
    match line.char_indices().nth(300) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}
