//! Tests of the documentation: the configuration reference matches the schema, links resolve, example configurations
//! are valid, and CI runs the README's commands.

use std::fs;
use std::path::{Path, PathBuf};

use zero_config::Config;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The configuration whose errors the README shows.
const MISTAKEN: &str = "\
train_micro_batch_size_per_gpu: 4
model: {type: gpt2, n_layer: 4, n_heads: 4}
zero_optimization:
  stage: 3
  mics_shard_size: 8
managed_gradient_accumulation: false
";

/// Paths of the Markdown pages, from the root.
fn pages() -> Vec<String> {
    let markdown = |folder: &str| -> Vec<String> {
        let entries = fs::read_dir(root().join(folder)).expect("a folder");
        let names = entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned());
        names.filter(|name| name.ends_with(".md")).map(|name| format!("{folder}{name}")).collect()
    };
    let pages = [markdown(""), markdown("docs/")].concat();
    assert!(pages.len() >= 6, "{pages:?}");
    pages
}

/// Returns the contents of all code blocks in a language.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let open = format!("\n```{language}\n");
    page.split(&open).skip(1).map(|rest| rest.split("\n```").next().unwrap_or_default().to_string()).collect()
}

/// Returns the targets of a page's links `[text](target)`.
fn links(page: &str) -> Vec<&str> {
    page.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target).collect()
}

/// Returns the anchor that GitHub generates for a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// Compares a generated page with its file. Writes the file if `UPDATE_GOLDEN` is set.
fn is_generated(page: &str, text: &str) {
    let path = root().join(page);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&path, text).expect("the page can be written");
    }
    let current = fs::read_to_string(&path).unwrap_or_default() == text;
    assert!(current, "{page} is not what the code generates; run this test with UPDATE_GOLDEN=1");
}

#[test]
fn the_configuration_reference_matches_the_schema() {
    is_generated("docs/configuration.md", &zero_config::reference());
}

#[test]
fn the_table_of_deepspeed_keys_is_generated() {
    is_generated("docs/deepspeed-keys.md", &zero_config::deepspeed_keys());
}

#[test]
fn links_resolve() {
    for name in pages() {
        let page = read(&name);
        let folder = root().join(&name).parent().expect("a folder").to_path_buf();
        for link in links(&page).into_iter().filter(|link| !link.contains("://")) {
            let (file, section) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { root().join(&name) } else { folder.join(file) };
            assert!(target.exists(), "{name} links to {link}");
            let text = if section.is_empty() { String::new() } else { fs::read_to_string(&target).expect("a page") };
            let found = section.is_empty() || text.lines().any(|line| line.starts_with('#') && anchor(line) == section);
            assert!(found, "{name} links to {link}, and there is no such heading");
        }
    }
}

#[test]
fn the_book_has_every_page_and_no_link_leaves_it() {
    let summary = read("docs/SUMMARY.md");
    let listed = links(&summary);
    let mut named = listed.clone();
    named.sort_unstable();
    named.dedup();
    assert_eq!(named.len(), listed.len(), "a page stands twice in docs/SUMMARY.md");
    for page in pages().iter().filter_map(|page| page.strip_prefix("docs/")) {
        assert!(page == "SUMMARY.md" || named.contains(&page), "docs/SUMMARY.md does not list {page}");
        let text = read(&format!("docs/{page}"));
        let titles = text.lines().filter(|line| line.starts_with("# ")).count();
        assert!(titles >= 1, "docs/{page} has no title");
        for link in links(&text).into_iter().filter(|link| !link.contains("://")) {
            assert!(!link.starts_with("../"), "docs/{page} links to {link}, which the book has not");
        }
    }
    for link in named {
        assert!(root().join("docs").join(link).is_file(), "docs/SUMMARY.md lists {link}");
    }
    let book = read("docs/book.toml");
    assert!(book.contains("src = \".\"") && root().join("docs/book.css").is_file(), "{book}");
}

/// All lines of a Rust block occur, in the same order, in one of the examples or in the doc-test of `Dataset`.
/// Indentation is ignored.
#[test]
fn rust_in_the_guide_is_from_the_examples() {
    let programs = ["mlp", "gpt", "resume", "tasks", "trainer", "lora", "generate", "optimizer"];
    let programs = programs.map(|name| read(&format!("examples/src/bin/{name}.rs")));
    let source = read("trainer/src/data/dataset.rs");
    let documented: Vec<&str> = source.lines().filter_map(|line| line.strip_prefix("/// ")).collect();
    let examples = [
        &programs[..],
        &["adamax", "models/gpt", "models/resnet"].map(|name| read(&format!("examples/src/{name}.rs"))),
        &[documented.join("\n")],
    ]
    .concat();
    let mut found = 0;
    for page in pages().iter().filter(|page| page.starts_with("docs/")) {
        for block in blocks(&read(page), "rust") {
            let contains = |example: &String| {
                let mut lines = example.lines().map(str::trim);
                let wanted = block.lines().map(str::trim).filter(|line| !line.is_empty());
                wanted.into_iter().all(|line| lines.any(|of| of == line))
            };
            assert!(examples.iter().any(contains), "{page}: this is in no example:\n{block}");
            found += 1;
        }
    }
    assert!(found >= 4, "{found}");
}

#[test]
fn configurations_on_the_pages_are_valid() {
    let mut found = 0;
    // Pages use `DIR` for a Hugging Face folder.
    let pretrained = tempfile::tempdir().expect("a folder");
    fs::write(pretrained.path().join("config.json"), "{\"model_type\": \"gpt2\"}").expect("written");
    let there = format!("pretrained: {:?}", pretrained.path());
    for name in pages() {
        for text in blocks(&read(&name), "yaml") {
            let text = text.replace("pretrained: DIR", &there);
            let config = Config::parse(&name, text.as_str());
            assert!(config.is_ok(), "{}", config.err().map(|errors| errors.to_string()).unwrap_or_default());
            found += 1;
        }
    }
    assert!(found > 0);
}

#[test]
fn the_errors_in_the_readme_are_current() {
    let page = read("README.md");
    let shown = blocks(&page, "text").into_iter().find(|block| block.starts_with("error: ")).expect("errors");
    let errors = Config::parse("ds.yaml", MISTAKEN).expect_err("mistakes");
    assert_eq!(errors.to_string(), shown);
}

#[test]
fn ci_runs_the_commands_of_the_readme() {
    let (page, ci) = (read("README.md"), read(".ci/run"));
    let commands = blocks(&page, "sh").into_iter().next().expect("commands");
    let [quickstart, tests] = commands.lines().collect::<Vec<_>>()[..] else { panic!("two commands: {commands}") };
    assert!(quickstart.contains("--config configs/quickstart.yaml") && ci.contains("--config configs/quickstart.yaml"));
    assert!(tests.starts_with("cargo test") && ci.contains(tests), "{tests}");
}

#[test]
fn the_library_example_of_the_readme_is_the_example() {
    let page = read("README.md");
    let example = read("examples/src/bin/mlp.rs");
    let squeezed = |text: &str| text.split_whitespace().collect::<String>().replace("//", "");
    let lines: Vec<String> = blocks(&page, "rust")[0].lines().take(3).map(squeezed).collect();
    for line in lines {
        assert!(squeezed(&example).contains(&line), "{line} is not in the example");
    }
}

/// Returns the string literals of a Rust source, with format placeholders replaced by `\u{0}`.
fn literals(source: &str) -> Vec<String> {
    let mut found = vec![];
    let mut rest = source;
    while let Some(open) = rest.find('"') {
        let before = rest[..open].chars().next_back();
        rest = &rest[open + 1..];
        // Skips a character literal, `'"'`.
        if before == Some('\'') || before == Some('\\') {
            continue;
        }
        let (mut text, mut chars) = (String::new(), rest.char_indices());
        let mut end = rest.len();
        while let Some((at, c)) = chars.next() {
            match c {
                '"' => {
                    end = at + 1;
                    break;
                }
                '\\' => match chars.next().map(|(_, c)| c) {
                    Some('n') => text.push('\n'),
                    // A line continuation skips the indentation of the next line.
                    Some('\n') => {
                        while rest[chars.offset()..].starts_with(' ') {
                            chars.next();
                        }
                    }
                    Some(other) => text.push(other),
                    None => {}
                },
                '{' | '}' if rest[at + 1..].starts_with(c) => {
                    chars.next();
                    text.push(c);
                }
                // An opening brace without a closing brace is not a placeholder.
                '{' if rest[at..].find(['}', '"']).is_some_and(|end| rest[at + end..].starts_with('}')) => {
                    text.push('\u{0}');
                    chars.by_ref().find(|(_, c)| *c == '}');
                }
                c => text.push(c),
            }
        }
        found.push(text);
        rest = &rest[end..];
    }
    found
}

/// Returns whether a format can produce a message: the fixed parts of the format occur in the message in order, the
/// first at its start and the last at its end.
fn is_made_by(message: &str, format: &str) -> bool {
    let parts: Vec<&str> = format.split('\u{0}').collect();
    let [first, middle @ .., last] = &parts[..] else { return message == format };
    let Some(mut rest) = message.strip_prefix(first) else { return false };
    for part in middle {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// Returns the lines of all literals with enough fixed text to identify a message.
fn formats() -> Vec<String> {
    fn walk(folder: &Path, formats: &mut Vec<String>) {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                walk(&path, formats);
            } else if path.extension().is_some_and(|end| end == "rs") {
                let text = fs::read_to_string(&path).expect("a source");
                // Literals in tests are not messages.
                let code = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
                for literal in literals(code) {
                    formats.extend(literal.split("\n").map(|line| line.trim_start().to_string()));
                }
            }
        }
    }
    let mut formats = vec![];
    for part in [
        "cli",
        "trainer",
        "planner",
        "engine",
        "checkpoint",
        "partition",
        "model",
        "tier",
        "comm",
        "configs",
        "pipeline",
        "optim",
        "cuda",
    ] {
        walk(&root().join(part).join("src"), &mut formats);
    }
    formats.retain(|format| format.chars().filter(|c| c.is_alphabetic()).count() >= 9);
    formats.sort();
    formats.dedup();
    formats
}

#[test]
fn messages_of_the_troubleshooting_page_are_in_the_source() {
    let formats = formats();
    let is_made = |text: &str| formats.iter().any(|format| is_made_by(text, format));
    // A path may precede a message.
    let is_known = |text: &str| is_made(text) || text.split_once(": ").is_some_and(|(_, rest)| is_made(rest));
    for invented in ["there is no such thing as this", "no file matches", "rank 1 has another value"] {
        assert!(!is_known(invented), "{invented}");
    }
    let (mut found, mut wrong) = (0, vec![]);
    for block in blocks(&read("docs/troubleshooting.md"), "text") {
        for line in block.lines().filter(|line| !line.starts_with("  in: ") && !line.starts_with("    ")) {
            let text = ["error: ", "warning: ", "  help: "].iter().find_map(|start| line.strip_prefix(start));
            let text = text.unwrap_or(line);
            if !is_known(text) && !is_known(line) && !is_known(line.trim_start()) {
                wrong.push(line.to_string());
            }
            found += 1;
        }
    }
    assert!(wrong.is_empty(), "no source says:\n{}", wrong.join("\n"));
    assert!(found > 60, "{found}");
}

/// Checks names in backticks that start with a folder of the repository.
#[test]
fn paths_that_the_pages_name_exist() {
    let folders = [
        "configs/",
        "examples/",
        "cli/",
        "trainer/",
        "planner/",
        "engine/",
        "scripts/",
        "benches/",
        "docs/",
        "comm/",
        "partition/",
        "model/",
    ];
    let mut found = 0;
    for page in pages().iter().filter(|page| *page != "CHANGELOG.md") {
        let text = read(page);
        let prose: String = text.split("```").step_by(2).collect();
        for name in prose.split('`').skip(1).step_by(2) {
            let plain = name.chars().all(|c| c.is_alphanumeric() || "/._-".contains(c));
            if plain && folders.iter().any(|folder| name.starts_with(folder)) {
                assert!(root().join(name).exists(), "{page} names {name}");
                found += 1;
            }
        }
    }
    assert!(found > 20, "{found}");
}
