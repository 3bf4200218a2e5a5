//! The job's secret token: where a process finds it, and the file in which a launcher passes it to its ranks.
//!
//! Every child process inherits the environment, and tools that list processes can show it. An environment variable
//! that only names a file does not reveal the token, because only the file's owner can read the file.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// The variable that holds the token.
pub const TOKEN: &str = "ZERO_TRAIN_TOKEN";
/// The variable that names the file with the token.
pub const TOKEN_FILE: &str = "ZERO_TRAIN_TOKEN_FILE";

/// Maximum size in bytes of a token file.
const MAX_BYTES: u64 = 4096;

/// Why the job's token could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// Both variables are set.
    #[error("{TOKEN} and {TOKEN_FILE} are both set; only one may be")]
    Both,
    /// The file cannot be opened or read.
    #[error("{TOKEN_FILE}: {path}: {detail}")]
    Unreadable {
        /// The file.
        path: String,
        /// The reason.
        detail: String,
    },
    /// The file is readable by others or owned by another user, or its content is not a token.
    #[error("{TOKEN_FILE}: {path} {reason}")]
    NotPrivate {
        /// The file.
        path: String,
        /// What is wrong with the file.
        reason: String,
    },
}

impl TokenError {
    /// Returns how to fix the error.
    #[must_use]
    pub fn help(&self) -> String {
        match self {
            Self::Both => format!("unset {TOKEN}"),
            Self::Unreadable { .. } => "set it to the path of a file with the job token, the same on all ranks".into(),
            Self::NotPrivate { path, .. } => {
                format!("use a regular file that you own and only you can read: chmod 600 {path}")
            }
        }
    }
}

/// Returns the job's token, if one is set: the value of `ZERO_TRAIN_TOKEN`, or the trimmed content of the file that
/// `ZERO_TRAIN_TOKEN_FILE` names. Usually called as `token::find(|name| std::env::var_os(name))`.
///
/// # Errors
/// Fails if both variables are set. Fails if the file is a link or not a regular file, belongs to another user, gives
/// other users any access, or is empty, too long or not valid UTF-8.
pub fn find(lookup: impl Fn(&str) -> Option<std::ffi::OsString>) -> Result<Option<String>, TokenError> {
    let set = |name: &str| lookup(name).filter(|value| !value.is_empty());
    match (set(TOKEN), set(TOKEN_FILE)) {
        (Some(_), Some(_)) => Err(TokenError::Both),
        (Some(token), None) => Ok(Some(token.to_string_lossy().into_owned())),
        (None, Some(path)) => read(Path::new(&path)).map(Some),
        (None, None) => Ok(None),
    }
}

fn read(path: &Path) -> Result<String, TokenError> {
    let shown = path.display().to_string();
    let unreadable = |error: io::Error| TokenError::Unreadable { path: shown.clone(), detail: error.to_string() };
    let refused = |reason: String| TokenError::NotPrivate { path: shown.clone(), reason };
    // The file is opened before it is checked, and links are not followed. The checks below therefore apply to the same
    // file that is read. `NONBLOCK` keeps a pipe from blocking the open.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path);
    let file = match opened {
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
            return Err(refused("is a link".into()));
        }
        opened => opened.map_err(unreadable)?,
    };
    let metadata = file.metadata().map_err(unreadable)?;
    let (mode, owner, user) = (metadata.mode() & 0o777, metadata.uid(), rustix::process::geteuid().as_raw());
    if !metadata.is_file() {
        return Err(refused("is not a file".into()));
    }
    if owner != user {
        return Err(refused(format!("belongs to user {owner}, but this process runs as user {user}")));
    }
    if mode & 0o077 != 0 {
        return Err(refused(format!("has mode {mode:o}, which gives other users access")));
    }
    let mut text = String::new();
    file.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(unreadable)?;
    match text.trim() {
        "" => Err(refused("is empty".into())),
        token if text.len() as u64 <= MAX_BYTES => Ok(token.to_string()),
        _ => Err(refused(format!("has more than {MAX_BYTES} bytes, too many for a token"))),
    }
}

/// A new token in a file of mode 600 in a folder of mode 700. Both are removed on drop.
#[derive(Debug)]
pub struct TokenFile {
    folder: PathBuf,
    path: PathBuf,
    token: String,
}

impl TokenFile {
    /// Generates a token and writes it to `XDG_RUNTIME_DIR` if that is writable, otherwise to the folder for temporary
    /// files.
    ///
    /// # Errors
    /// Fails if neither folder is writable, or if the system has no random bytes.
    pub fn create() -> io::Result<TokenFile> {
        let token = random(32)?;
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty()).map(PathBuf::from);
        match runtime.map(|runtime| TokenFile::below(&runtime, &token)) {
            Some(Ok(file)) => Ok(file),
            _ => TokenFile::below(&std::env::temp_dir(), &token),
        }
    }

    fn below(parent: &Path, token: &str) -> io::Result<TokenFile> {
        // The name is random, so no other user can have created this folder in advance. If a link has this name,
        // creating the folder fails.
        let folder = std::path::absolute(parent)?.join(format!("zero-train-{}", random(8)?));
        let told = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", folder.display()));
        DirBuilder::new().mode(0o700).create(&folder).map_err(told)?;
        let file = TokenFile { path: folder.join("token"), folder, token: token.to_string() };
        file.write()?;
        Ok(file)
    }

    fn write(&self) -> io::Result<()> {
        let mut file: File = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&self.path)?;
        writeln!(file, "{}", self.token)
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the token: 64 hexadecimal digits.
    #[must_use]
    pub fn token(&self) -> &str {
        &self.token
    }
}

impl Drop for TokenFile {
    fn drop(&mut self) {
        // The file may already have been removed.
        let _ = std::fs::remove_file(&self.path);
        let _ = std::fs::remove_dir(&self.folder);
    }
}

fn random(bytes: usize) -> io::Result<String> {
    let mut random = vec![0u8; bytes];
    getrandom::fill(&mut random).map_err(|error| io::Error::other(format!("cannot generate random bytes: {error}")))?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn at(path: &Path) -> Result<Option<String>, TokenError> {
        find(|name| (name == TOKEN_FILE).then(|| path.as_os_str().to_owned()))
    }

    #[test]
    fn created_files_are_private_readable_and_removed_on_drop() {
        let file = TokenFile::create().expect("a file");
        let folder = file.path().parent().expect("a folder").to_path_buf();
        let mode = |path: &Path| fs::metadata(path).expect("the file exists").mode() & 0o777;
        assert_eq!((mode(file.path()), mode(&folder)), (0o600, 0o700));
        assert_eq!((at(file.path()), file.token().len()), (Ok(Some(file.token().to_string())), 64));
        drop(file);
        assert!(!folder.exists());
    }

    #[test]
    fn files_that_are_not_private_tokens_are_refused() {
        let file = TokenFile::create().expect("a file");
        let reason = |path: &Path| at(path).expect_err("refused").to_string();
        for mode in [0o640, 0o604, 0o620, 0o610, 0o601] {
            fs::set_permissions(file.path(), Permissions::from_mode(mode)).expect("the test owns the file");
            assert!(reason(file.path()).contains(&format!("has mode {mode:o}")), "{}", reason(file.path()));
        }
        fs::set_permissions(file.path(), Permissions::from_mode(0o400)).expect("the test owns the file");
        assert!(at(file.path()).is_ok());
        let link = file.folder.join("link");
        symlink(file.path(), &link).expect("a link");
        assert!(reason(&link).ends_with("is a link"), "{}", reason(&link));
        fs::remove_file(&link).expect("the test owns the file");
        assert!(reason(&file.folder).ends_with("is not a file"), "{}", reason(&file.folder));
        assert!(matches!(at(Path::new("/nowhere/token")), Err(TokenError::Unreadable { .. })));
        fs::set_permissions(file.path(), Permissions::from_mode(0o600)).expect("the test owns the file");
        for (text, wrong) in [(String::from(" \n"), "is empty"), ("x".repeat(5000), "more than 4096 bytes")] {
            fs::write(file.path(), text).expect("the test owns the file");
            assert!(reason(file.path()).contains(wrong), "{}", reason(file.path()));
        }
    }

    #[test]
    fn setting_both_variables_is_an_error() {
        let both = find(|_| Some("x".into()));
        assert_eq!(both, Err(TokenError::Both));
        assert_eq!(find(|name| (name == TOKEN).then(|| "secret".into())), Ok(Some("secret".into())));
        assert_eq!(find(|_| Some("".into())), Ok(None));
    }
}
