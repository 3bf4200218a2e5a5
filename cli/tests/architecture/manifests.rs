//! Checks the manifests of the crates: the keys that publishing needs, and third-party dependencies.

use crate::{crates, read};

/// Third-party crates, each with the lowest crate that may depend on it.
const ENTER: [(&str, &str); 13] = [
    ("anyhow", "cli"),
    ("arrow-array", "trainer"),
    ("clap", "cli"),
    ("console", "cli"),
    ("lexopt", "trainer"),
    ("minijinja", "trainer"),
    ("minijinja-contrib", "trainer"),
    ("nvml-wrapper", "trainer"),
    ("parquet", "trainer"),
    ("tokenizers", "trainer"),
    ("object_store", "store"),
    ("reqwest", "store"),
    ("zstd", "trainer"),
];

/// Returns the dependencies in a manifest, without dev-dependencies.
fn dependencies(manifest: &str) -> Vec<String> {
    let mut inside = false;
    let mut found = vec![];
    for line in manifest.lines() {
        if line.starts_with('[') {
            let section = line.trim_matches(['[', ']']);
            inside = section == "dependencies" || section.ends_with(".dependencies");
        } else if inside {
            found.push(line.chars().take_while(|c| c.is_alphanumeric() || "-_".contains(*c)).collect());
        }
    }
    found
}

/// crates.io and docs.rs read these keys. The examples are not published.
#[test]
fn manifests_have_the_keys_that_publishing_needs() {
    let inherited = ["version", "edition", "rust-version", "license", "repository", "readme", "exclude"];
    let keys = inherited.map(|key| format!("\n{key}.workspace = true\n"));
    let others = ["\ndescription = \"", "\n[package.metadata.docs.rs]\n"].map(String::from);
    for row in crates() {
        let manifest = read(&format!("{}/Cargo.toml", row.folder));
        for key in keys.iter().chain(&others).filter(|_| !manifest.contains("\npublish = false\n")) {
            assert!(manifest.contains(key), "{}/Cargo.toml has no{key}", row.folder);
        }
    }
}

#[test]
fn third_party_crates_are_not_used_below_their_level() {
    let crates = crates();
    for (name, folder) in ENTER {
        let at = crates.iter().position(|row| row.folder == folder).unwrap_or_else(|| panic!("no crate {folder}"));
        let users: Vec<&str> = crates
            .iter()
            .filter(|row| dependencies(&read(&format!("{}/Cargo.toml", row.folder))).iter().any(|used| used == name))
            .map(|row| row.folder.as_str())
            .collect();
        assert!(users.contains(&folder), "{name} is not used by {folder}");
        for user in users {
            let user_at = crates.iter().position(|row| row.folder == user);
            assert!(user_at <= Some(at), "{user} depends on {name}, but {folder} is the lowest crate that may");
        }
    }
}
