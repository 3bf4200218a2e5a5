//! Limits the number of files in a folder of source files, so that a reader finds a file by its subject, and checks
//! that a module with submodule files is the `mod.rs` of their folder.

use std::collections::BTreeMap;

use crate::sources;

/// Maximum number of `.rs` files directly in a folder.
const MOST: usize = 24;

#[test]
fn folders_have_few_files() {
    let mut files: BTreeMap<String, usize> = BTreeMap::new();
    for path in sources().into_keys() {
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        *files.entry(folder.to_string()).or_default() += 1;
    }
    for (folder, count) in &files {
        assert!(
            *count <= MOST,
            "{folder} has {count} files; the limit is {MOST}. Group them into subfolders by subject"
        );
    }
}

/// The root of a test program may be next to the folder of its modules.
#[test]
fn modules_with_files_are_in_their_folders() {
    let sources = sources();
    let is_beside = |path: &&String| {
        let folder = format!("{}/", path.trim_end_matches(".rs"));
        let has_files = sources.range(folder.clone()..).next().is_some_and(|(next, _)| next.starts_with(&folder));
        has_files && path.rsplit_once('/').is_some_and(|(parent, _)| !parent.ends_with("/tests"))
    };
    let beside: Vec<&String> = sources.keys().filter(is_beside).collect();
    assert!(beside.is_empty(), "rename x.rs next to a folder x/ to x/mod.rs: {beside:?}");
}
