//! Limits the number of files in a folder of source files, so that a reader finds a file by its subject.

use std::collections::BTreeMap;

use crate::sources;

/// Maximum number of `.rs` files directly in a folder.
const MOST: usize = 24;

/// Folders that may have more files, each with its number of files. The numbers may only decrease.
const MORE: [(&str, usize); 4] = [("checkpoint/src", 26), ("comm/src", 26), ("optim/src", 25), ("partition/src", 27)];

#[test]
fn folders_have_few_files() {
    let mut files: BTreeMap<String, usize> = BTreeMap::new();
    for path in sources().into_keys() {
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        *files.entry(folder.to_string()).or_default() += 1;
    }
    for (folder, count) in &files {
        let most = MORE.iter().find(|(long, _)| long == folder).map_or(MOST, |(_, most)| *most);
        assert!(
            *count <= most,
            "{folder} has {count} files; the limit is {most}. Group them into subfolders by subject"
        );
    }
    for (folder, _) in MORE {
        assert!(files.get(folder).is_some_and(|count| *count > MOST), "{folder} needs no exception any more");
    }
}
