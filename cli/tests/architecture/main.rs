//! Checks the source tree against ARCHITECTURE.md and the conventions of CONTRIBUTING.md: dependencies between crates,
//! the places of `unsafe`, and the names and lengths of files.
//!
//! The tests read the table of crates from ARCHITECTURE.md. A new dependency therefore requires a change of that page,
//! which is visible in review.

mod folders;
mod imports;
mod manifests;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Maximum length of a file, in lines.
const LONGEST: usize = 600;

/// Files that may be longer, each with a reason.
const LONGER: [(&str, &str); 0] = [];

/// Forbidden file and folder names, which do not describe the contents.
const NAMELESS: [&str; 8] = ["utils", "util", "base", "common", "helpers", "helper", "misc", "shared"];

/// Code that must not occur outside of comments and string literals. `#[ignore = "…"]` with a reason is allowed.
const UNFINISHED: [&str; 4] = ["todo!", "unimplemented!", "#[ignore]", "dbg!"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// One row of the table of crates.
#[derive(Debug)]
struct Crate {
    folder: String,
    name: String,
    uses: Vec<String>,
    unsafe_in: Vec<String>,
}

/// Reads the table `| folder | crate | uses | unsafe in |` of ARCHITECTURE.md, in its order.
fn crates() -> Vec<Crate> {
    let page = read("ARCHITECTURE.md");
    let mut lines = page.lines().skip_while(|line| !line.starts_with("| folder | crate |")).skip(2);
    let code = |cell: &str| -> Vec<String> { cell.split('`').skip(1).step_by(2).map(String::from).collect() };
    let row = |line: &str| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').collect();
        let [folder, name, uses, unsafe_in] = cells[..] else { panic!("expected four columns: {line}") };
        let only = |cell| code(cell).pop().unwrap_or_else(|| panic!("expected a name in backticks: {line}"));
        Crate {
            folder: only(folder).trim_end_matches('/').to_string(),
            name: only(name),
            uses: code(uses),
            unsafe_in: code(unsafe_in),
        }
    };
    let rows: Vec<Crate> = lines.by_ref().take_while(|line| line.starts_with('|')).map(row).collect();
    assert!(!rows.is_empty(), "ARCHITECTURE.md has no table of crates");
    rows
}

/// Reads all source files of the workspace. The keys are paths relative to its root.
fn sources() -> BTreeMap<String, String> {
    fn walk(folder: &Path, files: &mut BTreeMap<String, String>) {
        let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        for path in entries.map(|entry| entry.expect("cannot list a folder").path()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() && name != "target" && name != "runs" && !name.starts_with('.') {
                walk(&path, files);
            } else if name.ends_with(".rs") {
                let relative = path.strip_prefix(root()).expect("below the root").to_string_lossy().replace('\\', "/");
                files.insert(relative, fs::read_to_string(&path).expect("a source file is not UTF-8"));
            }
        }
    }
    let mut files = BTreeMap::new();
    walk(&root(), &mut files);
    assert!(files.len() > 100, "only {} files found", files.len());
    files
}

/// Replaces each comment, string literal and character literal in a file by a space. Keeps the line breaks.
fn code(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let hashes = rest.strip_prefix('r').map(|after| after.len() - after.trim_start_matches('#').len());
        let end = if rest.starts_with("//") {
            rest.find('\n')
        } else if rest.starts_with("/*") {
            rest.find("*/").map(|at| at + 2)
        } else if let Some(hashes) = hashes.filter(|&n| rest[1 + n..].starts_with('"') && !out.ends_with(is_word)) {
            let close = format!("\"{}", "#".repeat(hashes));
            rest[hashes + 2..].find(&close).map(|at| hashes + 2 + at + close.len())
        } else if first == '"' {
            quoted(rest, '"')
        } else if first == '\'' && (rest.starts_with("'\\") || rest.chars().nth(2) == Some('\'')) {
            quoted(rest, '\'')
        } else {
            out.push(first);
            rest = &rest[first.len_utf8()..];
            continue;
        };
        let (literal, after) = rest.split_at(end.unwrap_or(rest.len()));
        out.push(' ');
        out.extend(literal.chars().filter(|&c| c == '\n'));
        rest = after;
    }
    out
}

/// Returns the end of the literal at the start of `text`.
fn quoted(text: &str, quote: char) -> Option<usize> {
    let mut escaped = false;
    text.char_indices().skip(1).find_map(|(at, c)| {
        let closes = c == quote && !escaped;
        escaped = c == '\\' && !escaped;
        closes.then_some(at + 1)
    })
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Returns whether the code contains `word` as a whole word.
fn has_word(code: &str, word: &str) -> bool {
    code.match_indices(word)
        .any(|(at, _)| !code[..at].ends_with(is_word) && !code[at + word.len()..].starts_with(is_word))
}

/// Returns the dependencies in a manifest that begin with `zero-`, including dev-dependencies.
fn edges(manifest: &str) -> Vec<String> {
    let mut inside = false;
    let mut found = vec![];
    for line in manifest.lines() {
        if line.starts_with('[') {
            inside = line.trim_end_matches(']').ends_with("dependencies");
        } else if inside && line.starts_with("zero-") {
            let name: String = line.chars().take_while(|c| c.is_alphanumeric() || *c == '-').collect();
            found.push(name);
        }
    }
    found.sort();
    found.dedup();
    found
}

#[test]
fn the_table_lists_the_members_of_the_workspace() {
    let manifest = read("Cargo.toml");
    let members = manifest.lines().find(|line| line.starts_with("members")).expect("members");
    let mut members: Vec<&str> = members.split('"').skip(1).step_by(2).collect();
    let crates = crates();
    let mut folders: Vec<&str> = crates.iter().map(|row| row.folder.as_str()).collect();
    members.sort_unstable();
    folders.sort_unstable();
    assert_eq!(folders, members);
    for row in &crates {
        let named = format!("name = \"{}\"", row.name);
        assert!(read(&format!("{}/Cargo.toml", row.folder)).contains(&named), "{}: {named}", row.folder);
    }
}

#[test]
fn dependencies_between_crates_match_the_table_and_point_down() {
    let crates = crates();
    for (index, row) in crates.iter().enumerate() {
        let mut allowed = row.uses.clone();
        allowed.sort();
        let mut found = edges(&read(&format!("{}/Cargo.toml", row.folder)));
        // Only tests use the emulator, including the tests of the kernels that it runs.
        found.retain(|name| name != "zero-emulator");
        assert_eq!(found, allowed, "dependencies of {}: left the manifest, right ARCHITECTURE.md", row.name);
        for used in &row.uses {
            let at = crates.iter().position(|other| other.name == *used);
            assert!(at.is_some_and(|at| at > index), "{} uses {used}, which is not listed below it", row.name);
        }
    }
}

/// Only the files that ARCHITECTURE.md lists may distinguish most instructions. All other files read the table of
/// effects, so that a new instruction changes few files.
#[test]
fn only_listed_files_match_on_all_instructions() {
    let sources = sources();
    let names = |text: &str| -> BTreeSet<String> {
        let code = code(text);
        let parts = code.split("Instruction::").skip(1);
        parts.map(|part| part.chars().take_while(|&c| is_word(c)).collect()).collect()
    };
    let is_source = |path: &str| path.contains("/src/") && !path.starts_with("fuzz/");
    let all: BTreeSet<String> = names(&sources["engine/src/executor/mod.rs"]);
    assert!(all.len() > 20, "the executor has {} instructions", all.len());
    let found =
        sources.iter().filter(|(path, text)| is_source(path) && 2 * names(text).intersection(&all).count() > all.len());
    let page = read("ARCHITECTURE.md");
    let section = page.split("\n## A new instruction\n").nth(1).and_then(|rest| rest.split("\n## ").next());
    let section = section.expect("ARCHITECTURE.md has no section on a new instruction");
    for (path, _) in found {
        assert!(section.contains(&format!("| `{path}` |")), "{path} distinguishes most instructions");
    }
}

/// Counts what a file exports at its root: modules, and each name of a `pub use`.
fn exported(code: &str) -> usize {
    let of_item = |item: &str| match item.strip_prefix("use ").and_then(|item| item.split(';').next()) {
        Some(list) => list.rsplit('{').next().unwrap_or_default().split(',').filter(|name| has_letters(name)).count(),
        None => 1,
    };
    format!("\n{code}").split("\npub ").skip(1).map(of_item).sum()
}

fn has_letters(text: &str) -> bool {
    text.contains(char::is_alphabetic)
}

/// The front page of the library's documentation shows what programs use; plans, benchmarks and transports are in other
/// crates.
#[test]
fn the_library_root_exports_few_items() {
    assert_eq!(exported("pub use a::{\n    B, c,\n};\npub use d::E;\nmod f;\npub mod g {\n    pub use h::I;\n}"), 4);
    let items = exported(&code(&read("trainer/src/lib.rs")));
    assert!((10..=27).contains(&items), "zero_train exports {items} items");
}

#[test]
fn every_crate_has_a_paragraph_and_invariants() {
    let page = read("ARCHITECTURE.md");
    for row in crates() {
        let heading = format!("\n### `{}/`", row.folder);
        let start = page.find(&heading).unwrap_or_else(|| panic!("ARCHITECTURE.md has no heading{heading}"));
        let section = page[start + 4..].split("\n### ").next().unwrap_or_default();
        let (text, invariants) =
            section.split_once("**Invariants.**").unwrap_or_else(|| panic!("{heading} has no invariants"));
        assert!(text.len() > 200 && invariants.contains("\n- "), "{heading} is too short");
    }
}

#[test]
fn paths_in_the_documentation_exist() {
    for page in ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/tour.md"] {
        for name in read(page).split('`').skip(1).step_by(2) {
            let is_path =
                name.contains('/') && (name.ends_with(".rs") || name.ends_with('/') || name.ends_with(".yaml"));
            assert!(!is_path || root().join(name).exists(), "{page} names {name}, which does not exist");
        }
    }
}

#[test]
fn functions_named_in_the_tour_exist_in_their_files() {
    let mut file = String::new();
    let mut found = 0;
    for name in read("docs/tour.md").split('`').skip(1).step_by(2) {
        if name.ends_with(".rs") {
            file = read(name);
        } else if let Some(function) = name.strip_suffix("()") {
            assert!(
                has_word(&code(&file), &format!("fn {function}")),
                "docs/tour.md: no `{name}` in the file before it"
            );
            found += 1;
        }
    }
    assert!(found > 20, "docs/tour.md names {found} functions");
}

#[test]
fn unsafe_occurs_only_where_the_table_allows_it() {
    let allowed: Vec<String> = crates().into_iter().flat_map(|row| row.unsafe_in).collect();
    for path in &allowed {
        assert!(root().join(path).exists(), "ARCHITECTURE.md allows unsafe in {path}");
    }
    let mut used = vec![false; allowed.len()];
    for (path, text) in sources() {
        let inside = allowed.iter().position(|allowed| path.starts_with(allowed));
        if has_word(&code(&text), "unsafe") {
            let inside =
                inside.unwrap_or_else(|| panic!("{path} has `unsafe`, which ARCHITECTURE.md does not allow there"));
            used[inside] = true;
        }
    }
    for (path, used) in allowed.iter().zip(used) {
        assert!(used, "ARCHITECTURE.md allows unsafe in {path}, which has none");
    }
}

#[test]
fn files_are_short_and_have_meaningful_names_and_module_docs() {
    for (path, text) in sources() {
        let lines = text.lines().count();
        let excused = LONGER.iter().any(|(long, _)| *long == path);
        assert!(lines <= LONGEST || excused, "{path} has {lines} lines; the limit is {LONGEST}");
        assert!(lines > LONGEST || !excused, "{path} needs no exception any more");
        for part in path.trim_end_matches(".rs").split('/') {
            assert!(!NAMELESS.contains(&part), "{path}: `{part}` does not describe the contents");
        }
        let first = text.lines().next().unwrap_or_default();
        assert!(first.starts_with("//! "), "{path} does not begin with `//!`: {first}");
    }
}

#[test]
fn no_file_contains_unfinished_code() {
    for (path, text) in sources() {
        let code = code(&text);
        for word in UNFINISHED {
            assert!(!code.contains(word), "{path} contains `{word}`");
        }
    }
}

#[test]
fn checks_ignore_comments_and_literals() {
    let text =
        "let a = \"unsafe \\\" unsafe\"; // unsafe\nlet b = r#\"unsafe\"#; /* unsafe */ let c: &'static str = 'x';";
    assert!(!has_word(&code(text), "unsafe"), "{}", code(text));
    assert!(has_word(&code("let q = '\"'; unsafe { f(\"a\") }"), "unsafe"));
    assert!(!has_word("#![forbid(unsafe_code)]", "unsafe"));
    assert_eq!(code("a\n/* b\n*/ c").lines().count(), 3);
    assert_eq!(
        edges(
            "[dependencies]\nzero-a.workspace = true\nserde = \"1\"\n[dev-dependencies]\nzero-b = {}\n[lib]\nzero-c = 1"
        ),
        ["zero-a", "zero-b"]
    );
}
