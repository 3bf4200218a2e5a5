//! Checks that the sources contain each key once, in the table of keys. All other code must use a constant.

use std::collections::BTreeSet;
use std::path::Path;

use regex::Regex;

/// Names of keys that are also words of values: two operations and an origin.
const VALUES: [&str; 3] = ["reduce_scatter", "split", "pretrained"];

/// Returns the names and the paths of all keys, from the reference page.
fn names_and_paths() -> BTreeSet<String> {
    let (mut names, mut section) = (BTreeSet::new(), String::new());
    for line in zero_config::reference().lines() {
        if let Some(heading) = line.strip_prefix('#') {
            section = heading.split('`').nth(1).unwrap_or_default().to_string();
        } else if line.replace("\\|", "").matches('|').count() != 6 {
            // The line is not a row of keys.
        } else if let Some(name) = line.strip_prefix("| `").and_then(|row| row.split('`').next()) {
            names.extend([name.to_string(), format!("{section}.{name}")]);
        }
    }
    names
}

/// Calls `visit` with each source file and its code, without comments and tests.
fn each_source(folder: &Path, visit: &mut impl FnMut(&Path, &str)) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            each_source(&path, visit);
        } else if path.extension().is_some_and(|end| end == "rs") && !path.ends_with("tests.rs") {
            let text = std::fs::read_to_string(&path).expect("a source file");
            let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
            let is_code = |line: &&str| !["//", "#[serde(tag"].iter().any(|start| line.trim_start().starts_with(start));
            let lines = code.lines().filter(is_code);
            visit(&path, &lines.collect::<Vec<_>>().join("\n"));
        }
    }
}

#[test]
fn each_configuration_key_occurs_once_in_the_sources() {
    let keys = names_and_paths();
    assert!(keys.len() > 600 && keys.contains("zero_optimization.stage"), "{}", keys.len());
    // These match the code before a literal. `row` matches in a row of the table and in a list of `(name, default)`,
    // and `word` in the definition of a value, whose word may also be a key: `Bf16 = "bf16"`.
    let row = Regex::new(r#"(?:^|[ .=\[])(?:key|now|engine|later|later_unless|later_section|rejected|rejected_section|removed|removed_unless|old|ignored|alias|section)\($| as $|^    (?:\("[^"]*", "[^"]*"\), )*\($"#).unwrap();
    let word = Regex::new(r#"^\s*[A-Z]\w* = (?:"\w+" \| )*$"#).unwrap();
    // `argument` matches before the first literal in a field's row: the default. The field has the key's name.
    let argument = Regex::new(r#" = (?:key|now|engine)\([^"]*, $"#).unwrap();
    let literal = Regex::new(r#""([a-z0-9_.]+)""#).unwrap();
    let constant = Regex::new(r"^(?:pub\(\w+\) )?const \w+: &str = $").unwrap();
    let (mut rows, mut fields, mut others) = (BTreeSet::new(), 0, Vec::new());
    let mut constants = Vec::new();
    let head = Regex::new(r#"\(keys\) in "([a-z0-9_.]*)""#).unwrap();
    let field = Regex::new(r#"^        pub (\w+)(?: as "(\w+)")?: .* = (?:key|now|engine|later|section)\("#).unwrap();
    each_source(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut |path, code| {
        // This file contains the names of keys in Hugging Face's files.
        if path.ends_with("hugging_face/keys.rs") {
            return;
        }
        let mut section = String::new();
        for line in code.lines() {
            if let Some(found) = head.captures(line) {
                section = found[1].to_string();
                continue;
            }
            if let Some(found) = field.captures(line) {
                let path = format!("{section}.{}", found.get(2).map_or(&found[1], |name| name.as_str()));
                assert!(keys.contains(&path), "{section}: {path}");
                fields += 1;
            }
            for found in literal.captures_iter(line) {
                let before = &line[..found.get(0).expect("the literal").start()];
                let is_value = VALUES.contains(&&found[1]) || word.is_match(before) || argument.is_match(before);
                if !keys.contains(&found[1]) || is_value {
                    continue;
                }
                match (row.is_match(before), constant.is_match(before)) {
                    (true, _) => drop(rows.insert(found[1].to_string())),
                    (_, true) => constants.push(found[1].to_string()),
                    _ => others.push(format!("{}: {}", path.display(), line.trim())),
                }
            }
        }
    });
    assert!(others.is_empty(), "refer to these keys by their constants:\n{}", others.join("\n"));
    // If several rows have a key of the same name, only a constant contains the name, and the rows use the constant.
    let twice = constants.iter().filter(|name| rows.contains(*name) && *name != "type").collect::<Vec<_>>();
    assert!(twice.is_empty(), "{twice:?}");
    assert_eq!(constants.iter().collect::<BTreeSet<_>>().len(), constants.len(), "{constants:?}");
    assert!(fields > 150 && rows.len() > 200, "{fields} fields, {} rows", rows.len());
}
