//! The pages say what is there: the configuration reference is the schema, links lead somewhere, examples of
//! configurations are valid, and the README's commands are those that CI runs.

use std::fs;
use std::path::{Path, PathBuf};

use zero_config::Config;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Whose errors the README shows.
const MISTAKEN: &str = "\
train_micro_batch_size_per_gpu: 4
model: {type: gpt2, n_layer: 4, n_heads: 4}
zero_optimization:
  stage: 3
  cpu_offload: true
prescale_gradients: true
";

/// The pages for people, by path from the root.
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

/// The insides of all code blocks of a language.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let open = format!("\n```{language}\n");
    page.split(&open).skip(1).map(|rest| rest.split("\n```").next().unwrap_or_default().to_string()).collect()
}

/// Where the links `[text](target)` of a page lead.
fn links(page: &str) -> Vec<&str> {
    page.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target).collect()
}

/// What GitHub makes of a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// Holds a generated page against what the code makes of it.
fn is_generated(page: &str, text: &str) {
    let path = root().join(page);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&path, text).expect("the page can be written");
    }
    let current = fs::read_to_string(&path).unwrap_or_default() == text;
    assert!(current, "{page} is not what the code generates; run this test with UPDATE_GOLDEN=1");
}

#[test]
fn the_configuration_reference_is_the_schema() {
    is_generated("docs/configuration.md", &zero_config::reference());
}

#[test]
fn the_table_of_deepspeeds_keys_is_what_the_program_answers() {
    is_generated("docs/deepspeed-keys.md", &zero_config::deepspeed_keys());
}

#[test]
fn links_lead_somewhere() {
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
fn configurations_on_the_pages_are_valid() {
    let mut found = 0;
    // Pages call a Hugging Face folder `DIR`.
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
fn the_errors_on_the_page_are_those_that_come_out() {
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
