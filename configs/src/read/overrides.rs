//! Applies `--set path.to.key=value` from the command line; overrides take precedence over the file.

use crate::config::Config;
use crate::errors::ErrorKind;
use crate::read::node::{At, Entry, Node, Value};
use crate::read::parse;
use crate::report::Report;
use crate::schema::{self, Key};

/// Maximum depth of a path; the schema's deepest key is at depth 7.
const MAX_PATH: usize = 16;

/// Applies the overrides in order; later ones win. An override may replace a section by a value that is not a
/// section.
pub(crate) fn apply(root: &mut Node, overrides: &[String], report: &mut Report) {
    for (index, text) in overrides.iter().enumerate() {
        apply_one(root, text, index, report);
    }
}

/// Applies the override with that index.
pub(crate) fn apply_one(root: &mut Node, text: &str, index: usize, report: &mut Report) {
    let at = At::Set(index);
    let Some(path) = path(text, index, report) else { return };
    let value = text.split_once('=').map_or("", |(_, value)| value);
    match parse::override_value(value, index, report) {
        Ok(mut node) => {
            node.at = at;
            set(root, &path, node);
        }
        Err((message, help)) => report.error(ErrorKind::Override, &path.join("."), at, message, help),
    }
}

/// Merges a further file into the tree, key by key. Sections that exist in both are merged; otherwise the further
/// file wins.
pub(crate) fn merge(root: &mut Node, further: Node) {
    if further.value != Value::Null {
        merge_at(root, further, Config::SECTION.keys);
    }
}

fn merge_at(node: &mut Node, further: Node, keys: &'static [Key]) {
    match (&mut node.value, further.value) {
        (Value::Map(entries), Value::Map(more)) => {
            for entry in more {
                let at = position(entries.iter().map(|entry| entry.key.as_str()), keys, &entry.key);
                match at.map(|at| &mut entries[at]) {
                    None => entries.push(entry),
                    Some(present) => {
                        if !matches!((&present.value.value, &entry.value.value), (Value::Map(_), Value::Map(_))) {
                            present.key_at = entry.key_at;
                        }
                        merge_at(&mut present.value, entry.value, schema::inside(keys, &entry.key));
                    }
                }
            }
        }
        (_, value) => *node = Node { value, at: further.at },
    }
}

/// Returns the keys in the path of the override with that index. Reports an invalid path and returns `None`.
pub(crate) fn path<'t>(text: &'t str, index: usize, report: &mut Report) -> Option<Vec<&'t str>> {
    match split(text) {
        Ok(path) => Some(path),
        Err(message) => {
            let help = "use `--set path.to.key=value`".to_string();
            report.error(ErrorKind::Override, "", At::Set(index), message, Some(help));
            None
        }
    }
}

/// Removes the key at `path`, if it exists.
pub(crate) fn remove(root: &mut Node, path: &[&str]) {
    let (mut node, mut keys) = (root, Config::SECTION.keys);
    for (index, name) in path.iter().enumerate() {
        let entries = match &mut node.value {
            Value::Map(entries) => entries,
            Value::List(items) if index + 1 < path.len() => {
                let Some(item) = name.parse().ok().and_then(|item: usize| items.get_mut(item)) else { return };
                node = item;
                continue;
            }
            _ => return,
        };
        let Some(at) = position(entries.iter().map(|entry| entry.key.as_str()), keys, name) else { return };
        if index + 1 == path.len() {
            entries.remove(at);
            return;
        }
        (node, keys) = (&mut entries[at].value, schema::inside(keys, name));
    }
}

fn split(text: &str) -> Result<Vec<&str>, String> {
    let Some((path, _)) = text.split_once('=') else {
        return Err("an override needs `=` between the path and the value".to_string());
    };
    keys(path.trim()).ok_or_else(|| "the path of an override must be keys separated by dots".to_string())
}

/// Splits a path into its keys. Returns `None` if a key is empty or there are too many.
pub(crate) fn keys(path: &str) -> Option<Vec<&str>> {
    let keys: Vec<&str> = path.split('.').collect();
    (keys.iter().all(|key| !key.is_empty()) && keys.len() <= MAX_PATH).then_some(keys)
}

/// Sets the key at `path`. If the key is already written under another of its names, sets that entry.
pub(crate) fn set(root: &mut Node, path: &[&str], value: Node) {
    let at = value.at;
    set_in(root, Config::SECTION.keys, path, value, at);
}

fn set_in(root: &mut Node, keys: &'static [Key], path: &[&str], value: Node, at: At) {
    let Some((name, rest)) = path.split_first() else {
        *root = value;
        return;
    };
    if let (Value::List(items), Ok(item)) = (&mut root.value, name.parse::<usize>())
        && let Some(item) = items.get_mut(item)
    {
        return set_in(item, keys, rest, value, at);
    }
    if !matches!(root.value, Value::Map(_)) {
        *root = Node { value: Value::Map(Vec::new()), at };
    }
    let Value::Map(entries) = &mut root.value else { return };
    let index = position(entries.iter().map(|entry| entry.key.as_str()), keys, name).unwrap_or_else(|| {
        let empty = Node { value: Value::Null, at };
        entries.push(Entry { key: (*name).to_string(), key_at: at, value: empty });
        entries.len() - 1
    });
    let entry = &mut entries[index];
    if rest.is_empty() {
        entry.key_at = at;
    }
    set_in(&mut entry.value, schema::inside(keys, name), rest, value, at);
}

/// Returns the index of the written key that stands for `name` in `keys`, under any of its names.
pub(crate) fn position<'e>(
    written: impl Iterator<Item = &'e str> + Clone,
    keys: &'static [Key],
    name: &str,
) -> Option<usize> {
    let same = |written: &str| schema::first_name(keys, written) == schema::first_name(keys, name);
    written.clone().position(|written| written == name).or_else(|| written.clone().position(same))
}
