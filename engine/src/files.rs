//! Expands paths and globs to a list of files, in the same order on every rank and in every run, and replaces files
//! atomically.
//!
//! This module walks directories itself and uses `glob` only for matching, because the walk must not descend into
//! `target`, which holds most of the files of a Rust checkout.

use std::{
    collections::HashSet,
    fs, io,
    path::{Component, Path, PathBuf},
};

use glob::{MatchOptions, Pattern};
use zero_config::is_address;

use crate::error::DataError;

const MATCHING: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: true };

/// Returns the files of all sources. Sources keep their order, the files of a glob are sorted by path, and duplicates
/// are removed.
pub fn expand(sources: &[String]) -> Result<Vec<PathBuf>, DataError> {
    let mut files = Vec::new();
    let mut seen = HashSet::new();
    are_paths(sources)?;
    for source in sources {
        for file in expand_one(source)? {
            if seen.insert(identity(&file)) {
                files.push(file);
            }
        }
    }
    if files.is_empty() { Err(DataError::Empty { sources: sources.to_vec() }) } else { Ok(files) }
}

/// Returns the same path for all names of a file, such as `a.txt` and `./a.txt`. A link to a file counts as another
/// file.
#[must_use]
pub fn identity(path: &Path) -> PathBuf {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match (path.file_name(), folder.canonicalize()) {
        (Some(name), Ok(folder)) => folder.join(name),
        _ => path.into(),
    }
}

/// Writes a file through a temporary file beside it, so that readers see either the old or the new content as a whole.
///
/// # Errors
/// Fails if the file cannot be written, or if `path` has no file name.
pub fn replace(path: &Path, content: impl AsRef<[u8]>) -> io::Result<()> {
    let Some(name) = path.file_name() else { return Err(io::ErrorKind::IsADirectory.into()) };
    let temporary = path.with_file_name(format!(".{}", name.to_string_lossy()));
    fs::write(&temporary, content)?;
    fs::rename(&temporary, path).inspect_err(|_| {
        let _ = fs::remove_file(&temporary);
    })
}

/// Rejects URLs such as `s3://bucket/file` without accessing any file.
///
/// # Errors
/// Returns [`DataError::Address`] with the first URL.
pub fn are_paths(sources: &[String]) -> Result<(), DataError> {
    match sources.iter().find(|source| is_address(source)) {
        Some(address) => Err(DataError::Address { address: address.clone() }),
        None => Ok(()),
    }
}

fn expand_one(source: &str) -> Result<Vec<PathBuf>, DataError> {
    let path = Path::new(source);
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => Err(DataError::Directory { path: path.into() }),
        Ok(_) => Ok(vec![path.into()]),
        Err(error) if error.kind() == io::ErrorKind::NotFound && source.contains(['*', '?', '[']) => {
            expand_glob(source)
        }
        Err(error) => Err(DataError::io(path)(error)),
    }
}

/// Expands a glob. Below the pattern's literal prefix, skips directories whose names are `target` or start with a dot,
/// and does not follow links to directories. A wildcard does not match a leading dot.
fn expand_glob(source: &str) -> Result<Vec<PathBuf>, DataError> {
    let is_wild = |component: &Component| component.as_os_str().to_string_lossy().contains(['*', '?', '[']);
    let components: Vec<Component> = Path::new(source).components().collect();
    let literal = components.iter().take_while(|component| !is_wild(component)).count();
    let base: PathBuf = components[..literal].iter().collect();
    let rest: PathBuf = components[literal..].iter().collect();
    let pattern = Pattern::new(&rest.to_string_lossy())
        .map_err(|error| DataError::Pattern { pattern: source.into(), message: error.msg.into() })?;
    let any_depth = components.iter().any(|component| component.as_os_str() == "**");
    let depth = if any_depth { usize::MAX } else { components.len() - literal };

    let mut files = Vec::new();
    walk(&base, Path::new(""), depth, &pattern, &mut files)?;
    if files.is_empty() {
        return Err(DataError::NoMatch { pattern: source.into() });
    }
    files.sort();
    Ok(files)
}

/// Collects the matching files below a directory. `relative` is the path of the directory relative to `base`. `depth`
/// is the maximum number of further path components of a match.
fn walk(
    base: &Path,
    relative: &Path,
    depth: usize,
    pattern: &Pattern,
    files: &mut Vec<PathBuf>,
) -> Result<(), DataError> {
    let directory = base.join(relative);
    // Replace an empty path, which the operating system rejects.
    let readable = if directory.as_os_str().is_empty() { Path::new(".") } else { &directory };
    let entries = match fs::read_dir(readable) {
        // A pattern below a missing folder matches nothing.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(DataError::io(readable))?,
    };
    for entry in entries {
        let entry = entry.map_err(DataError::io(readable))?;
        let path = directory.join(entry.file_name());
        let relative = relative.join(entry.file_name());
        if entry.file_type().map_err(DataError::io(&path))?.is_dir() {
            let name = entry.file_name();
            let skipped = name == "target" || name.to_string_lossy().starts_with('.');
            if depth > 1 && !skipped {
                walk(base, &relative, depth.saturating_sub(usize::from(depth != usize::MAX)), pattern, files)?;
            }
        } else if pattern.matches_path_with(&relative, MATCHING)
            && fs::metadata(&path).map_err(DataError::io(&path))?.is_file()
        {
            files.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for file in [
            "b.txt",
            "a.txt",
            "c.md",
            ".hidden.txt",
            "sub/d.txt",
            "sub/deep/e.txt",
            "target/f.txt",
            ".git/g.txt",
            "sub/target/h.txt",
        ] {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, file).unwrap();
        }
        root
    }

    fn names(root: &Path, sources: &[&str]) -> Result<Vec<String>, DataError> {
        let sources: Vec<String> =
            sources.iter().map(|source| root.join(source).to_string_lossy().into_owned()).collect();
        let files = expand(&sources)?;
        Ok(files.iter().map(|file| file.strip_prefix(root).unwrap().to_string_lossy().into_owned()).collect())
    }

    #[test]
    fn globs_are_sorted_and_skip_target_and_hidden() {
        let root = tree();
        let root = root.path();
        assert_eq!(names(root, &["*.txt"]).unwrap(), ["a.txt", "b.txt"]);
        assert_eq!(names(root, &["**/*.txt"]).unwrap(), ["a.txt", "b.txt", "sub/d.txt", "sub/deep/e.txt"]);
        assert_eq!(names(root, &["*/*.txt"]).unwrap(), ["sub/d.txt"]);
        assert_eq!(names(root, &["[ab].txt"]).unwrap(), ["a.txt", "b.txt"]);
        // The literal part of a pattern may name directories that the search would skip.
        assert_eq!(
            names(root, &["target/*.txt", ".git/*", ".hidden.txt"]).unwrap(),
            ["target/f.txt", ".git/g.txt", ".hidden.txt"]
        );
        // Sources keep their order, and each file occurs once.
        assert_eq!(names(root, &["c.md", "b.txt", "*.txt"]).unwrap(), ["c.md", "b.txt", "a.txt"]);
        assert_eq!(names(root, &["b.txt", "./b.txt", "sub/../b.txt", "*.txt"]).unwrap(), ["b.txt", "a.txt"]);
    }

    #[test]
    fn an_address_is_not_a_path() {
        for source in ["s3://bucket/a.txt", "gs://b/**/*.txt", "https://host/a", "hf://datasets/a", "file:///a"] {
            let error = expand(&["Cargo.toml".into(), source.into()]).expect_err(source);
            assert!(error.to_string().starts_with(&format!("{source} is a remote URL")), "{error}");
        }
        for source in ["a://b", "data/x://y.txt", "://", "a b://c", "Cargo.toml"] {
            are_paths(&[source.into()]).unwrap_or_else(|error| panic!("{error}"));
        }
    }

    #[test]
    fn relative_globs_start_in_the_working_directory() {
        let files = expand(&["src/**/*.rs".into()]).unwrap();
        assert!(files.contains(&PathBuf::from("src/lib.rs")), "{files:?}");
        let files = expand(&["*.toml".into()]).unwrap();
        assert!(files.contains(&PathBuf::from("Cargo.toml")), "{files:?}");
    }

    #[test]
    fn a_name_with_brackets_is_a_file_first() {
        let root = tree();
        fs::write(root.path().join("x[1].txt"), "x").unwrap();
        assert_eq!(names(root.path(), &["x[1].txt"]).unwrap(), ["x[1].txt"]);
    }

    #[test]
    fn missing_files_are_errors_with_their_name() {
        let root = tree();
        let message = |source: &str| names(root.path(), &[source]).unwrap_err().to_string();
        assert!(
            matches!(names(root.path(), &["none.txt"]), Err(DataError::Io { path, .. }) if path.ends_with("none.txt"))
        );
        assert!(message("*.none").starts_with("no file matches") && message("*.none").ends_with("*.none"));
        assert!(message("sub").contains("sub is a directory"));
        assert!(message("a***").contains("a***"));
        assert!(message("none/*.txt").starts_with("no file matches"));
        assert!(matches!(expand(&[]), Err(DataError::Empty { .. })));
    }
}
