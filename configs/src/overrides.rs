//! `--set path.to.key=value`: the command line's word over the file's.

use crate::errors::ErrorKind;
use crate::node::{At, Entry, Node, Value};
use crate::parse;
use crate::report::Report;
use crate::schema::{self, Key};

/// Deepest path that can be set; the schema's deepest key is at depth 5.
const MAX_PATH: usize = 16;

/// Puts each override where it belongs, later ones over earlier ones. A section is replaced by what is not a section.
pub(crate) fn apply(root: &mut Node, overrides: &[String], report: &mut Report) {
    for (index, text) in overrides.iter().enumerate() {
        let at = At::Set(index);
        match split(text) {
            Err(message) => {
                let help = "write `--set path.to.key=value`".to_string();
                report.error(ErrorKind::Override, "", at, message, Some(help));
            }
            Ok((path, value)) => match parse::override_value(value, index, report) {
                Ok(mut node) => {
                    node.at = at;
                    set(root, schema::TOP.keys, &path, node, at);
                }
                Err((message, help)) => report.error(ErrorKind::Override, &path.join("."), at, message, help),
            },
        }
    }
}

fn split(text: &str) -> Result<(Vec<&str>, &str), String> {
    let Some((path, value)) = text.split_once('=') else {
        return Err("an override needs `=` between the path and the value".to_string());
    };
    let path: Vec<&str> = path.trim().split('.').collect();
    if path.iter().any(|part| part.is_empty()) || path.len() > MAX_PATH {
        return Err("the path of an override is keys with dots between them".to_string());
    }
    Ok((path, value))
}

/// Keys under another name are found under the one that is written.
fn set(root: &mut Node, keys: &'static [Key], path: &[&str], value: Node, at: At) {
    let Some((name, rest)) = path.split_first() else {
        *root = value;
        return;
    };
    if !matches!(root.value, Value::Map(_)) {
        *root = Node { value: Value::Map(Vec::new()), at };
    }
    let Value::Map(entries) = &mut root.value else { return };
    let index = position(entries, keys, name).unwrap_or_else(|| {
        let empty = Node { value: Value::Null, at };
        entries.push(Entry { key: (*name).to_string(), key_at: at, value: empty });
        entries.len() - 1
    });
    let entry = &mut entries[index];
    if rest.is_empty() {
        entry.key_at = at;
    }
    set(&mut entry.value, schema::inside(keys, name), rest, value, at);
}

/// The entry that writes the key `name` of `keys`, under whichever of its names.
fn position(entries: &[Entry], keys: &'static [Key], name: &str) -> Option<usize> {
    let same = |entry: &Entry| schema::first_name(keys, &entry.key) == schema::first_name(keys, name);
    entries.iter().position(|entry| entry.key == name).or_else(|| entries.iter().position(same))
}
