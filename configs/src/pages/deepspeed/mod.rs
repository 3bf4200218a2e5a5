//! Generates a Markdown page about the support of each DeepSpeed key. The page is computed, not written by hand:
//! each key is set to a value other than its default, and the row reports how the program responds.

#[cfg(test)]
mod tests;

use std::fmt::Write as _;
use std::sync::LazyLock;

use serde::Deserialize;

use crate::config::Config;
use crate::errors::Errors;
use crate::load::load;
use crate::pages::reference::escape;
use crate::read::reader::default;
use crate::read::source::Source;
use crate::schema::{self, Kind, NO_EFFECT, Status};
use crate::value::{Leaf, leaf};

const INTRODUCTION: &str = "\
<!-- Generated from configs/src/pages/deepspeed. Do not edit. -->
# DeepSpeed's keys

This page lists every key that DeepSpeed 0.19.8 reads, as well as keys that DeepSpeed has removed, and says how zero-train handles
them. Each row is the result of resolving a configuration with the key set to the value in the third column. A section whose keys
all have the same result has a single entry. As in DeepSpeed, keys of `zero_optimization` that begin with `stage3_` may also be
written without this prefix.

[Coming from DeepSpeed](from-deepspeed.md) gives an overview; [the reference](configuration.md) lists the values of each key.

| here | means |
|---|---|
| works | the key has the same effect as in DeepSpeed |
| differs | the key works, with the difference described in the last column |
| ignored | the key is accepted with the warning in the last column, because its effect is always present or does not apply to zero-train |
| refused | the key is rejected with the error in the last column. At its default, or in a disabled section, the key is accepted, with a warning if DeepSpeed has removed it |
";

/// Every key of DeepSpeed 0.19.8, and keys that it removed recently, in the order of DeepSpeed's reference.
static GROUPS: LazyLock<Vec<Group>> =
    LazyLock::new(|| serde_json::from_str(include_str!("0.19.8.json")).unwrap_or_default());

/// A section of DeepSpeed's configuration.
#[derive(Clone, Deserialize)]
struct Group {
    /// Heading on the page.
    title: &'static str,
    /// Path of the section, with a trailing dot.
    path: &'static str,
    /// Overrides that enable the feature of these keys.
    with: Vec<&'static str>,
    keys: Vec<Key>,
}

/// A DeepSpeed key.
#[derive(Clone, Deserialize)]
struct Key {
    name: &'static str,
    /// Default in DeepSpeed, as YAML.
    default: String,
    /// A valid value other than the default.
    example: &'static str,
    /// Further overrides that the example requires.
    #[serde(default)]
    with: Vec<&'static str>,
    /// How the key's meaning differs from DeepSpeed's, apart from the default.
    #[serde(default)]
    difference: &'static str,
}

/// How the program responds to a key.
#[derive(Debug, PartialEq)]
enum Fate {
    Works,
    Differs(String),
    Ignored(String),
    Refused(String),
}

/// Returns a Markdown page about the support of every DeepSpeed key. Each key is tried.
pub fn deepspeed_keys() -> String {
    let mut out = INTRODUCTION.to_string();
    let fates: Vec<Vec<Fate>> =
        GROUPS.iter().map(|group| group.keys.iter().map(|key| fate(group, key)).collect()).collect();
    let count = |is: fn(&Fate) -> bool| fates.iter().flatten().filter(|fate| is(fate)).count();
    let _ = writeln!(
        out,
        "\nOf {} keys, {} work, {} differ from DeepSpeed, {} are ignored and {} are refused.",
        fates.iter().flatten().count(),
        count(|fate| *fate == Fate::Works),
        count(|fate| matches!(fate, Fate::Differs(_))),
        count(|fate| matches!(fate, Fate::Ignored(_))),
        count(|fate| matches!(fate, Fate::Refused(_))),
    );
    for (group, fates) in GROUPS.iter().zip(&fates) {
        let _ = writeln!(out, "\n## {}\n", group.title);
        match fates.first() {
            Some(Fate::Refused(text)) if fates.iter().all(|fate| *fate == fates[0]) => {
                let names: Vec<String> = group.keys.iter().map(|key| format!("`{}`", key.name)).collect();
                let _ = writeln!(out, "Refused: {text}.\n\n{}", wrapped(&names.join(", ")));
            }
            _ => table(group, fates, &mut out),
        }
    }
    out
}

fn table(group: &Group, fates: &[Fate], out: &mut String) {
    out.push_str("| key | default | tried | here | |\n|---|---|---|---|---|\n");
    for (key, fate) in group.keys.iter().zip(fates) {
        let (word, text) = match fate {
            Fate::Works => ("works", ""),
            Fate::Differs(text) => ("differs", text.as_str()),
            Fate::Ignored(text) => ("ignored", text.as_str()),
            Fate::Refused(text) => ("refused", text.as_str()),
        };
        let (written, example) = (code(&key.default), code(key.example));
        let _ = writeln!(out, "| `{}` | {written} | {example} | {word} | {} |", key.name, escape(text));
    }
}

/// Wraps the text at about 120 characters.
fn wrapped(text: &str) -> String {
    let mut lines: Vec<String> = vec![String::new()];
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.len() + word.len() < 120 => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_string()),
        }
    }
    lines.join("\n")
}

/// Tries the key with its example value.
fn fate(group: &Group, key: &Key) -> Fate {
    match tried(group, key, Some(key.example)) {
        Ok(config) => {
            let path = path(group, key);
            let told = |about: String| {
                let message = config.warnings.iter().map(|warning| &warning.message);
                message.into_iter().find(|message| message.starts_with(&about)).cloned()
            };
            let old = match in_schema(&path, group).map(|key| key.status) {
                Some(Status::Old { by, .. }) => Some((told(format!("`{path}")), format!("{}{by}", group.path))),
                _ => None,
            };
            let today = old.as_ref().map_or(&path, |(_, today)| today);
            let old = old.as_ref().and_then(|(told, _)| told.clone());
            match (told(format!("`{today}` {NO_EFFECT}")), old, difference(group, key)) {
                (Some(ignored), old, _) => {
                    Fate::Ignored(old.into_iter().chain([ignored]).collect::<Vec<_>>().join("; "))
                }
                (None, Some(old), _) => Fate::Differs(old),
                (None, None, text) if text.is_empty() => Fate::Works,
                (None, None, text) => Fate::Differs(text),
            }
        }
        Err(errors) => Fate::Refused(
            errors
                .iter()
                .map(|error| match &error.help {
                    Some(help) => format!("{}; help: {help}", error.message),
                    None => error.message.clone(),
                })
                .collect::<Vec<_>>()
                .join("; "),
        ),
    }
}

/// Resolves a small configuration that sets everything the key requires, and the key itself to `value`.
fn tried(group: &Group, key: &Key, value: Option<&str>) -> Result<Config, Errors> {
    let source = Source { name: "ds_config.json".to_string(), text: "{\"train_batch_size\": 8}".to_string() };
    let this = format!("{}=", path(group, key));
    let needed = group.with.iter().chain(&key.with).filter(|with| !with.starts_with(&this));
    let overrides: Vec<String> =
        needed.map(ToString::to_string).chain(value.map(|value| format!("{this}{value}"))).collect();
    load(source, &overrides)?.resolve(None)
}

fn path(group: &Group, key: &Key) -> String {
    // Some keys are listed once per value, with the value after a colon: `type: Adam`.
    format!("{}{}", group.path, key.name.split(':').next().unwrap_or_default())
}

/// Returns how the key differs from DeepSpeed's, including its default.
fn difference(group: &Group, key: &Key) -> String {
    let ours = own_default(&path(group, key), group).filter(|ours| {
        let theirs = crate::read::parse::constant(&key.default).and_then(|node| leaf(&ours.kind, &node.value));
        theirs.unwrap_or(Leaf::Null) != default(ours)
    });
    let ours = ours.map(|ours| ours.default);
    match (ours, key.difference) {
        (None, text) => text.to_string(),
        (Some(ours), "") => format!("the default is `{ours}`"),
        (Some(ours), text) => format!("the default is `{ours}`; {text}"),
    }
}

/// Returns the schema's key at `path` if it is implemented and has a literal default rather than a computed one.
fn own_default(path: &str, group: &Group) -> Option<&'static schema::Key> {
    let key = in_schema(path, group)?;
    let is_leaf = !matches!(key.kind, Kind::Section(_) | Kind::Variants(_));
    let is_computed = key.default.starts_with('=') || key.is_required();
    (key.status == Status::Now && is_leaf && !is_computed).then_some(key)
}

/// Returns the schema's key at `path`. If it depends on a `type`, the group's overrides determine the type.
fn in_schema(path: &str, group: &Group) -> Option<&'static schema::Key> {
    let (mut keys, mut found): (&'static [schema::Key], _) = (Config::SECTION.keys, None);
    let mut names = path.split('.');
    while let Some(name) = names.next() {
        let key = schema::find(keys, name)?;
        let key = if key.status == Status::Alias { schema::find(keys, key.meaning)? } else { key };
        found = Some(key);
        keys = match key.kind {
            Kind::Section(section) => section.keys,
            Kind::Variants(variants) => match names.next() {
                Some(inside) if variants.params == Some(inside) => {
                    let kind = format!("{name}.type=");
                    let kind = group.with.iter().find_map(|text| text.strip_prefix(kind.as_str()))?;
                    variants.list.iter().find(|variant| variant.name == kind)?.keys
                }
                Some(beside) => return schema::find(variants.shared, beside),
                None => &[],
            },
            _ => &[],
        };
    }
    found
}

fn code(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("`{}`", text.replace('|', "\\|")) }
}
