//! Limits the number of files in a folder of source files, so that a reader finds a file by its subject.

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
