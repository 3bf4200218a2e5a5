//! Changes values in the text of a configuration and preserves everything else: comments, order, layout.
//!
//! Each change is a splice at the byte offsets reported by the parser. The result is parsed again and compared with the
//! expected tree. An unforeseen layout can therefore lose comments, but it cannot change the meaning.

mod layout;
mod splice;
mod written;

use crate::config::Config;
use crate::errors::{ErrorKind, Errors};
use crate::read::node::{At, Node, Value};
use crate::read::overrides;
use crate::read::parse;
use crate::read::source::{MAX_BYTES, Source, too_large};
use crate::report::Report;
use crate::schema::{self, Key};

use layout::{Piece, Shape, Slot};
use splice::Splice;
use written::Style;

/// Changes values in the text of a configuration. Preserves comments, order, layout and line ends.
///
/// A change is a `path.to.key` with either a YAML value, as for `--set`, or `None`, which removes the key. Changes
/// are applied in order. Missing sections are created. If a path leads through a value that is not a section, a
/// section replaces the value. A JSON file stays JSON.
///
/// The result is checked: it must mean the same as the original text with the changes applied as overrides. If the text
/// cannot be changed in place, for example because an alias repeats the value, the file is written anew and starts with
/// a comment that says so.
///
/// # Errors
/// The text is not a single YAML document of keys with values, is larger than 1 MiB or contains a duplicate key; a path
/// is invalid; a value is not YAML.
///
/// ```
/// use zero_config::{Source, edit};
/// let source = Source { name: "ds.yaml".to_string(), text: "# mine\nzero_optimization:\n  stage: 1  # sharded\n".to_string() };
/// let changes = [("zero_optimization.stage".to_string(), Some("3".to_string()))];
/// assert_eq!(edit(&source, &changes).unwrap(), "# mine\nzero_optimization:\n  stage: 3  # sharded\n");
/// ```
pub fn edit(source: &Source, changes: &[(String, Option<String>)]) -> Result<String, Errors> {
    if source.text.len() > MAX_BYTES {
        return Err(too_large(source.name.clone()));
    }
    let texts: Vec<String> =
        changes.iter().map(|(path, value)| format!("{path}={}", value.as_deref().unwrap_or_default())).collect();
    let mut report = Report::new(source.clone(), &texts);
    let Some(mut tree) = parse::file(0, &mut report) else { return Err(report.into_errors()) };
    let body = source.text.strip_prefix('\u{feff}').unwrap_or(&source.text);
    let mark = &source.text[..source.text.len() - body.len()];
    let style = Style::of(body);
    let mut text = Some(body.to_string());
    for (index, (_, value)) in changes.iter().enumerate() {
        let Some(path) = overrides::path(&texts[index], index, &mut report) else { continue };
        match value {
            Some(_) => overrides::apply_one(&mut tree, &texts[index], index, &mut report),
            None => overrides::remove(&mut tree, &path),
        }
        if !report.has_errors() {
            text = text.and_then(|text| step(&text, style, &path, value.is_none(), &tree));
        }
    }
    if report.has_errors() {
        return Err(report.into_errors());
    }
    let in_place = text.filter(|text| means(text, &tree));
    let candidates = [in_place, Some(style.whole(&tree)), Some(Style::Yaml.whole(&tree))];
    match candidates.into_iter().flatten().find(|text| means(text, &tree)) {
        Some(text) => Ok(format!("{mark}{text}")),
        None => {
            let message = "the configuration cannot be written with these values".to_string();
            report.error(ErrorKind::Override, "", At::Default, message, None);
            Err(report.into_errors())
        }
    }
}

/// Applies one change. `tree` is the expected meaning of the result. Returns `None` if the change is impossible in
/// place.
fn step(text: &str, style: Style, path: &[&str], removes: bool, tree: &Node) -> Option<String> {
    let mut splice = Splice::new(text, style);
    let root = layout::read(text);
    match root {
        // The file is empty or contains only comments.
        None => splice.append(&style.lines(path.first()?, child(tree, Config::SECTION.keys, path.first()?)?)),
        Some(root) if matches!(root.shape, Shape::Inline) && text[root.start..root.end].is_empty() => {
            splice.append(&style.lines(path.first()?, child(tree, Config::SECTION.keys, path.first()?)?));
        }
        Some(root) if removes => remove(&mut splice, &root, path)?,
        Some(root) => set(&mut splice, &root, path, tree)?,
    }
    splice.finish()
}

/// Sets the key at `path` to its value in `tree`.
fn set(splice: &mut Splice<'_>, root: &Piece, path: &[&str], tree: &Node) -> Option<()> {
    let (mut section, mut node, mut keys) = (root, tree, Config::SECTION.keys);
    let mut rest = path;
    loop {
        let Shape::Map { entries, .. } = &section.shape else { return None };
        let (name, inner) = rest.split_first()?;
        let style = splice.style();
        let Some(slot) = find(entries, keys, name) else {
            node = child(node, keys, name)?;
            return splice.insert(section, &style.key(name), &style.value(&node.value), &style.lines(name, node));
        };
        node = child(node, keys, &slot.key)?;
        if inner.is_empty() || !matches!(slot.value.shape, Shape::Map { .. }) {
            splice.replace(slot, &style.value(&node.value));
            return Some(());
        }
        (section, keys, rest) = (&slot.value, schema::inside(keys, name), inner);
    }
}

/// Removes the key at `path`, if it exists.
fn remove(splice: &mut Splice<'_>, root: &Piece, path: &[&str]) -> Option<()> {
    let (mut section, mut keys) = (root, Config::SECTION.keys);
    let mut around: Option<&Slot> = None;
    for (index, name) in path.iter().enumerate() {
        let Shape::Map { entries, .. } = &section.shape else {
            // The value behind an alias cannot be changed here. Any other value is not a section, so it does not
            // contain the key.
            return (!matches!(section.shape, Shape::Alias)).then_some(());
        };
        let Some(slot) = find(entries, keys, name) else { return Some(()) };
        if index + 1 == path.len() {
            if entries.len() == 1 {
                splice.replace(around?, "{}");
                return Some(());
            }
            let at = entries.iter().position(|entry| std::ptr::eq(entry, slot))?;
            return splice.remove(section, at);
        }
        (section, keys, around) = (&slot.value, schema::inside(keys, name), Some(slot));
    }
    None
}

fn find<'p>(entries: &'p [Slot], keys: &'static [Key], name: &str) -> Option<&'p Slot> {
    overrides::position(entries.iter().map(|slot| slot.key.as_str()), keys, name).and_then(|index| entries.get(index))
}

fn child<'n>(node: &'n Node, keys: &'static [Key], name: &str) -> Option<&'n Node> {
    let Value::Map(entries) = &node.value else { return None };
    let index = overrides::position(entries.iter().map(|entry| entry.key.as_str()), keys, name)?;
    entries.get(index).map(|entry| &entry.value)
}

/// Returns whether the text parses to the tree.
fn means(text: &str, tree: &Node) -> bool {
    let mut report = Report::new(Source { name: String::new(), text: text.to_string() }, &[]);
    text.len() <= MAX_BYTES
        && parse::file(0, &mut report).is_some_and(|found| !report.has_errors() && same(&found.value, &tree.value))
}

/// Returns whether the values and their order are equal. Locations are not compared.
fn same(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::List(one), Value::List(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| same(&one.value, &other.value))
        }
        (Value::Map(one), Value::Map(other)) => {
            let same = |(one, other): (&crate::read::node::Entry, &crate::read::node::Entry)| {
                one.key == other.key && same(&one.value.value, &other.value.value)
            };
            one.len() == other.len() && one.iter().zip(other).all(same)
        }
        (Value::Float(one), Value::Float(other)) => one.to_bits() == other.to_bits() || one.is_nan() && other.is_nan(),
        (one, other) => one == other,
    }
}
