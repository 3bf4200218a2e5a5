//! Limits the number of files in a folder of source files, so that a reader finds a file by its subject, and checks
//! that a module with submodule files is the `mod.rs` of their folder.

use std::collections::BTreeMap;

use crate::sources;

/// Maximum number of `.rs` files directly in a folder.
const MOST: usize = 24;

/// Crates that still have modules `x.rs` next to a folder `x/`, each with the number of these modules. The numbers may
/// only decrease.
const BESIDE: [(&str, usize); 6] =
    [("checkpoint", 2), ("comm", 3), ("comm/nccl", 1), ("model", 2), ("partition", 3), ("pipeline", 4)];

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
    let mut beside: BTreeMap<String, usize> = BTreeMap::new();
    for path in sources.keys() {
        let folder = format!("{}/", path.trim_end_matches(".rs"));
        let has_files = sources.range(folder.clone()..).next().is_some_and(|(next, _)| next.starts_with(&folder));
        let (above, _) = path.split_once("/src/").or_else(|| path.split_once("/tests/")).unwrap_or((path, ""));
        if has_files && path.rsplit_once('/').is_some_and(|(parent, _)| parent != format!("{above}/tests")) {
            *beside.entry(above.to_string()).or_default() += 1;
        }
    }
    let expected = BESIDE.map(|(folder, modules)| (folder.to_string(), modules));
    assert_eq!(beside, expected.into(), "modules x.rs next to a folder x/: left the source tree, right BESIDE");
}
