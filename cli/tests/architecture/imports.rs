//! Finds import cycles between the files of a crate.
//!
//! A path resolves to the file of its longest module prefix: `crate::costs::Choice` is an import of `costs/mod.rs`,
//! even if that file re-exports the item. Unit tests at the end of a file are ignored.

use std::collections::{BTreeMap, BTreeSet};

/// The path of a module relative to the root of its crate. The root has an empty path.
type Module = Vec<String>;

/// Returns the groups of files that import each other, directly or indirectly. Each group is sorted and listed once.
pub(crate) fn loops(files: &BTreeMap<String, String>) -> Vec<Vec<String>> {
    let modules: BTreeMap<Module, &String> = files.keys().map(|path| (module(path), path)).collect();
    let targets = |(path, text): (&String, &String)| (path.clone(), imports(path, text, &modules));
    let edges: BTreeMap<String, BTreeSet<String>> = files.iter().map(targets).collect();
    let reached: BTreeMap<&String, BTreeSet<&String>> =
        edges.keys().map(|path| (path, reachable(path, &edges))).collect();
    let mut found: BTreeSet<Vec<String>> = BTreeSet::new();
    for (&path, theirs) in &reached {
        let together: Vec<String> =
            theirs.iter().filter(|other| reached[*other].contains(path)).map(|other| (*other).clone()).collect();
        if together.len() > 1 {
            found.insert(together);
        }
    }
    found.into_iter().collect()
}

/// Returns the files that a file imports directly or indirectly. Contains the file itself if it is in a cycle.
fn reachable<'a>(path: &'a String, edges: &'a BTreeMap<String, BTreeSet<String>>) -> BTreeSet<&'a String> {
    let mut found = BTreeSet::new();
    let mut open = vec![path];
    while let Some(path) = open.pop() {
        open.extend(edges[path].iter().filter(|next| found.insert(*next)));
    }
    found
}

fn module(path: &str) -> Module {
    let mut parts: Module = path.trim_end_matches(".rs").split('/').map(String::from).collect();
    if parts.last().is_some_and(|last| ["mod", "lib", "main"].contains(&last.as_str())) {
        parts.pop();
    }
    parts
}

/// Returns the files that a file imports by a path that begins with `crate`, `super`, `self` or one of its child
/// modules.
fn imports(path: &str, text: &str, modules: &BTreeMap<Module, &String>) -> BTreeSet<String> {
    let code = super::code(text);
    let code = without_tests(&code);
    let own = module(path);
    let mut found = BTreeSet::new();
    let mut follow = |base: &[String], rest: &str| {
        for path in paths(rest) {
            let mut at: Module = base.to_vec();
            for part in path {
                match part.as_str() {
                    "super" => drop(at.pop()),
                    "self" => {}
                    _ => at.push(part),
                }
                if !modules.contains_key(&at) {
                    at.pop();
                    break;
                }
            }
            found.extend(modules.get(&at).map(|path| (*path).clone()));
        }
    };
    for (at, _) in code.match_indices("::") {
        let start = code[..at].rfind(|c| !super::is_word(c)).map_or(0, |before| before + 1);
        // The path in a visibility such as `pub(in crate::a)` is not an import.
        let is_first = !code[..start].ends_with("::") && !code[..start].ends_with("(in ");
        let rest = &code[at + 2..];
        let child = [&own[..], &[code[start..at].to_string()]].concat();
        match &code[start..at] {
            "crate" if is_first => follow(&[], rest),
            "super" if is_first => follow(own.split_last().map_or(&[][..], |(_, parent)| parent), rest),
            "self" if is_first => follow(&own, rest),
            _ if is_first && modules.contains_key(&child) => follow(&child, rest),
            _ => {}
        }
    }
    found.remove(path);
    found
}

/// Returns the code before the unit tests: the first `#[cfg(test)]` module with a body.
fn without_tests(code: &str) -> &str {
    let is_module = |(_, after): &(usize, &str)| {
        after.lines().nth(1).is_some_and(|line| line.contains("mod ") && line.ends_with('{'))
    };
    let mut attributes = code.match_indices("#[cfg(test)]").map(|(at, _)| (at, &code[at..]));
    attributes.find(is_module).map_or(code, |(at, _)| &code[..at])
}

/// Returns the paths of a use tree: `a::b` and `a::c::D` for `a::{b, c::D}`.
fn paths(tree: &str) -> Vec<Module> {
    let word = tree.find(|c| !super::is_word(c)).unwrap_or(tree.len());
    let (first, rest) = tree.split_at(word);
    let below = match rest.strip_prefix("::") {
        Some(rest) => paths(rest),
        None if first.is_empty() && rest.starts_with('{') => {
            let written = branches(rest).into_iter().map(str::trim_start).filter(|branch| !branch.is_empty());
            return written.flat_map(paths).collect();
        }
        None => vec![vec![]],
    };
    let with_first = |mut path: Module| {
        if !first.is_empty() {
            path.insert(0, first.to_string());
        }
        path
    };
    below.into_iter().map(with_first).collect()
}

/// Splits a brace group at its top-level commas. The group starts with the first character of `text` and ends with the
/// matching brace.
fn branches(text: &str) -> Vec<&str> {
    let (mut depth, mut start, mut found) = (0, 1, vec![]);
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if (c == ',' && depth == 1) || (c == '}' && depth == 0) {
            found.push(&text[start..at]);
            start = at + 1;
        }
        if depth == 0 {
            break;
        }
    }
    found
}

#[test]
fn import_cycles_are_found() {
    let file = |path: &str, text: &str| (path.to_string(), text.to_string());
    let files = BTreeMap::from([
        file("lib.rs", "mod a; mod b; mod c; pub use a::A;"),
        file("a.rs", "use crate::{b::{self, B}, c};\n// crate::lib\n"),
        file("b/mod.rs", "mod inner; fn f() { inner::g(\"crate::c::C\") }"),
        file("b/inner.rs", "use super::super::a::A;\n#[cfg(test)]\nmod tests {\nuse crate::c::C; }"),
        file("c.rs", "use std::b::B; use other::crate_::a::A;"),
    ]);
    assert_eq!(loops(&files), [["a.rs", "b/inner.rs", "b/mod.rs"].map(String::from)]);
}
