//! Finds import cycles between the files of a crate.
//!
//! A path resolves to the file that defines the item. If `costs/mod.rs` re-exports (`pub use`) an item from
//! `costs/choice.rs`, `crate::costs::Choice` is an import of `costs/choice.rs`. A file that re-exports an item does not
//! count as importing it, unless the re-export ends in `*`. Unit tests at the end of a file are ignored.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Maximum number of files in an import cycle.
const LOOP: usize = 3;

/// The path of a module relative to the root of its crate. The root has an empty path.
type Module = Vec<String>;

/// The full paths of re-exported items, by the path under which a file re-exports them.
type Exports = BTreeMap<Module, Module>;

/// Returns the groups of files that import each other, directly or indirectly. Each group is sorted and listed once.
fn loops(files: &BTreeMap<String, String>) -> Vec<Vec<String>> {
    let modules: BTreeMap<Module, &String> = files.keys().map(|path| (module(path), path)).collect();
    let codes = || files.iter().map(|(path, text)| (path, without_tests(&super::code(text)).to_string()));
    let exports: Exports = codes().flat_map(|(path, code)| exports(&module(path), &code, &modules)).collect();
    let targets = |(path, code): (&String, String)| (path.clone(), imports(path, &code, &modules, &exports));
    let edges: BTreeMap<String, BTreeSet<String>> = codes().map(targets).collect();
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

/// Returns the statements that re-export items by their names, such as `pub(crate) use a::{B, C};`.
fn reexports(code: &str) -> Vec<&str> {
    let statement = |(at, _): (usize, &str)| {
        let start = code[..at].rfind('\n').map_or(0, |end| end + 1);
        let visibility = code[start..at].trim_start();
        let is_public = visibility == "pub " || visibility.starts_with("pub(") && visibility.ends_with(") ");
        let statement = &code[start..at + code[at..].find(';')?];
        (is_public && !statement.contains('*')).then_some(statement)
    };
    code.match_indices("use ").filter_map(statement).collect()
}

/// Returns the items of its own crate that a file re-exports.
fn exports(own: &Module, code: &str, modules: &BTreeMap<Module, &String>) -> Vec<(Module, Module)> {
    let of_statement = |statement: &str| {
        let (_, tree) = statement.split_once("use ")?;
        let (first, rest) = tree.split_once("::")?;
        let start = start(own, first, modules)?;
        let with_path = |(path, name): (Module, String)| ([&own[..], &[name]].concat(), full(&start, path));
        Some(paths(rest).into_iter().map(with_path).collect::<Vec<_>>())
    };
    reexports(code).into_iter().filter_map(of_statement).flatten().collect()
}

/// Returns the module in which a path with this first word starts: `crate`, `super`, `self` or a child module. Returns
/// `None` for the name of another crate.
fn start(own: &Module, first: &str, modules: &BTreeMap<Module, &String>) -> Option<Module> {
    let child = [&own[..], &[first.to_string()]].concat();
    match first {
        "crate" => Some(vec![]),
        "super" => Some(own.split_last().map_or(&[][..], |(_, parent)| parent).to_vec()),
        "self" => Some(own.clone()),
        _ => modules.contains_key(&child).then_some(child),
    }
}

/// Returns the full path of `path`, which continues from the module `start`.
fn full(start: &Module, path: Module) -> Module {
    let mut at = start.clone();
    for part in path {
        match part.as_str() {
            "super" => drop(at.pop()),
            "self" => {}
            _ => at.push(part),
        }
    }
    at
}

/// Returns the file that defines the item with this full path. Stops after `exports.len()` re-exports, because files
/// may re-export an item from each other in a cycle.
fn definition(mut path: Module, modules: &BTreeMap<Module, &String>, exports: &Exports) -> Option<String> {
    for _ in 0..=exports.len() {
        let depth = (0..=path.len()).rev().find(|&depth| modules.contains_key(&path[..depth]))?;
        let item = path.get(..=depth).and_then(|item| exports.get(item));
        let Some(item) = item else { return Some(modules[&path[..depth]].clone()) };
        path = [&item[..], &path[depth + 1..]].concat();
    }
    None
}

/// Returns the files that a file imports by a path that begins with `crate`, `super`, `self` or one of its child
/// modules.
fn imports(path: &str, code: &str, modules: &BTreeMap<Module, &String>, exports: &Exports) -> BTreeSet<String> {
    let file = module(path);
    let code = reexports(code).into_iter().fold(code.to_string(), |code, statement| code.replace(statement, ""));
    let inline = inline_modules(&code);
    let mut found = BTreeSet::new();
    for (at, _) in code.match_indices("::") {
        let word = code[..at].rfind(|c| !super::is_word(c)).map_or(0, |before| before + 1);
        // The path in a visibility such as `pub(in crate::a)` is not an import.
        if code[..word].ends_with("::") || code[..word].ends_with("(in ") {
            continue;
        }
        let around = inline.iter().filter(|(range, _)| range.contains(&at)).map(|(_, name)| name.clone());
        let own = file.iter().cloned().chain(around).collect();
        let Some(start) = start(&own, &code[word..at], modules) else { continue };
        let items = paths(&code[at + 2..]).into_iter().map(|(path, _)| full(&start, path));
        found.extend(items.filter_map(|item| definition(item, modules, exports)));
    }
    found.remove(path);
    found
}

/// Returns the ranges of the modules with a body in a file, and their names, the outer ones first.
fn inline_modules(code: &str) -> Vec<(Range<usize>, String)> {
    let with_body = |(at, _): (usize, &str)| {
        let (name, _) = code[at + 4..].split_once(" {")?;
        let body = at + 4 + name.len();
        let mut depth = 0;
        let end = code[body..].find(|c| {
            depth += i32::from(c == '{') - i32::from(c == '}');
            c == '}' && depth == 0
        })?;
        (name.chars().all(super::is_word) && !code[..at].ends_with(super::is_word))
            .then(|| (body..body + end, name.to_string()))
    };
    code.match_indices("mod ").filter_map(with_body).collect()
}

/// Returns the code before the unit tests: the first `#[cfg(test)]` module with a body.
fn without_tests(code: &str) -> &str {
    let is_module = |(_, after): &(usize, &str)| {
        after.lines().nth(1).is_some_and(|line| line.contains("mod ") && line.ends_with('{'))
    };
    let mut attributes = code.match_indices("#[cfg(test)]").map(|(at, _)| (at, &code[at..]));
    attributes.find(is_module).map_or(code, |(at, _)| &code[..at])
}

/// Returns the paths of a use tree, each with the name that it brings into scope: `a::b` and `a::c::D`, with the names
/// `b` and `E`, for `a::{b, c::D as E}`.
fn paths(tree: &str) -> Vec<(Module, String)> {
    let word = tree.find(|c| !super::is_word(c)).unwrap_or(tree.len());
    let (first, rest) = tree.split_at(word);
    let below = match rest.strip_prefix("::") {
        Some(rest) => paths(rest),
        None if first.is_empty() && rest.starts_with('{') => {
            let written = branches(rest).into_iter().map(str::trim_start).filter(|branch| !branch.is_empty());
            return written.flat_map(paths).collect();
        }
        None => {
            let alias = rest.strip_prefix(" as ").and_then(|rest| rest.split(|c| !super::is_word(c)).next());
            vec![(vec![], alias.unwrap_or(first).to_string())]
        }
    };
    let with_first = |(mut path, name): (Module, String)| {
        if !first.is_empty() {
            path.insert(0, first.to_string());
        }
        (path, name)
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
fn import_cycles_are_short() {
    let sources = super::sources();
    for super::Crate { folder, .. } in super::crates() {
        let below = format!("{folder}/src/");
        let files =
            sources.iter().filter_map(|(path, text)| Some((path.strip_prefix(&below)?.to_string(), text.clone())));
        let mut long = loops(&files.collect());
        long.retain(|files| files.len() > LOOP);
        assert!(long.is_empty(), "{folder}: import cycles of more than {LOOP} files: {long:?}");
    }
}

fn file(path: &str, text: &str) -> (String, String) {
    (path.to_string(), text.to_string())
}

#[test]
fn import_cycles_are_found() {
    let files = BTreeMap::from([
        file("lib.rs", "mod a; mod b; mod c; pub use a::A;"),
        file("a.rs", "use crate::{b::{self, B}, c};\n// crate::lib\n"),
        file("b/mod.rs", "mod inner; fn f() { inner::g(\"crate::c::C\") }"),
        file("b/inner.rs", "use super::super::a::A;\n#[cfg(test)]\nmod tests {\nuse crate::c::C; }"),
        file("c.rs", "use std::b::B; use other::crate_::a::A;"),
    ]);
    assert_eq!(loops(&files), [["a.rs", "b/inner.rs", "b/mod.rs"].map(String::from)]);
}

#[test]
fn reexports_are_followed_to_the_definition() {
    let files = BTreeMap::from([
        file("lib.rs", "pub use a::{\n    Z, inner::B as A,\n};\npub use other::C;"),
        file("a/mod.rs", "mod inner;\n    pub(crate) use inner::*;\npub(super) use inner::B;"),
        file("a/inner.rs", "use crate::c;"),
        file("b.rs", "use crate::A;"),
        file("c.rs", "use crate::b::B;"),
        file("d.rs", "use crate::{a::B, C};"),
        file("e.rs", "pub use crate::d::D; fn f() { crate::a::X }"),
        file("f/mod.rs", "mod x86 {\n    use super::super::c; mod y { use super::super::super::c; }\n}\n"),
        file("f/g.rs", "mod inner { use super::super::h::H; }\nuse super::h::H;"),
        file("f/h.rs", ""),
    ]);
    assert_eq!(loops(&files), [["a/inner.rs", "b.rs", "c.rs"].map(String::from)]);
    let modules = files.keys().map(|path| (module(path), path)).collect();
    let exports = files.iter().flat_map(|(path, text)| exports(&module(path), text, &modules)).collect();
    let of = |path: &str| imports(path, &files[path], &modules, &exports);
    assert_eq!(of("d.rs"), ["a/inner.rs", "lib.rs"].map(String::from).into());
    assert_eq!(of("a/mod.rs"), ["a/inner.rs"].map(String::from).into());
    assert_eq!(of("e.rs"), ["a/mod.rs"].map(String::from).into());
    assert_eq!(of("lib.rs"), BTreeSet::new());
    // `super` of a module with a body is the file around it.
    assert_eq!(of("f/mod.rs"), ["c.rs"].map(String::from).into());
    assert_eq!(of("f/g.rs"), ["f/h.rs"].map(String::from).into());
}
