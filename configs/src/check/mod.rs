//! Checks a document against the schema: every key must be known, and every value must have the right type and
//! range.

pub(crate) mod advice;
mod off;
mod variants;

use std::borrow::Cow;
use std::collections::BTreeMap;

use self::off::{is_disabled, is_inactive, is_off, is_switched_off};
use crate::config::{Config, LayerPattern, Zero};
use crate::errors::ErrorKind;
use crate::read::node::{At, Entry, Node, Value};
use crate::report::Report;
use crate::schema::{self, Auto, Key, Kind, NO_EFFECT, Section, Status, Switch, join};
use crate::value::{Field, Fields, Leaf, MAX_PATTERNS, expected, leaf};

/// Part of the help for an unknown key at the top level of the file; DeepSpeed ignores such a key.
const IGNORES: &str = "`--ignore-unknown-keys` turns it into a warning";

/// Checks the whole document. Returns `None` if it is empty.
pub(crate) fn check(root: &Node, report: &mut Report) -> Option<Fields> {
    match &root.value {
        Value::Map(entries) => {
            let mut check = Check { report, fields: Fields::default(), root: entries, is_off: false };
            check.section("", At::Default, entries, &[Config::SECTION.keys]);
            Some(check.fields)
        }
        // `parse::file` accepts no other values.
        _ => {
            let help = "a configuration needs at least `train_micro_batch_size_per_gpu` or `train_batch_size`";
            let message = "the configuration is empty".to_string();
            report.error(ErrorKind::Missing, "", At::Default, message, Some(help.to_string()));
            None
        }
    }
}

pub(crate) struct Check<'r> {
    pub(crate) report: &'r mut Report,
    pub(crate) fields: Fields,
    /// Entries at the top level of the file.
    pub(crate) root: &'r [Entry],
    /// Whether the section, or a section around it, is switched off.
    pub(crate) is_off: bool,
}

impl Check<'_> {
    fn section(&mut self, path: &str, at: At, entries: &[Entry], keys: &[&'static [Key]]) {
        let mut written: BTreeMap<&str, &Entry> = BTreeMap::new();
        for entry in entries {
            let Some((name, key)) = self.find(path, entry, keys) else { continue };
            // A key without a value counts as missing; if the key is required, this is an error.
            let Some(current) = self.current(path, entry, keys).filter(|entry| entry.value.value != Value::Null) else {
                continue;
            };
            match written.insert(name, entry) {
                None => self.entry(&join(path, name), key, &current),
                Some(first) => {
                    let [one, other] = [first, entry].map(|entry| join(path, &entry.key));
                    let message = format!("`{one}` and `{other}` are aliases of the same key");
                    let places = [(other.as_str(), entry.key_at), (one.as_str(), first.key_at)];
                    self.report.add(ErrorKind::DuplicateKey, &places, message, Some("keep one of the two".to_string()));
                    self.report.poison(join(path, name));
                }
            }
        }
        for key in keys.iter().flat_map(|keys| keys.iter()) {
            let path = join(path, key.name);
            if key.is_required() && !written.contains_key(key.name) && !self.report.is_poisoned(&path) {
                let message = format!("`{path}` is missing");
                let help = format!("set it to {}", expected(&key.kind));
                self.report.error(ErrorKind::Missing, &path, at, message, Some(help));
            }
        }
    }

    /// Returns the schema's key for an entry, with its primary name. Reports an unknown key and returns `None`.
    fn find(&mut self, path: &str, entry: &Entry, keys: &[&'static [Key]]) -> Option<(&'static str, &'static Key)> {
        let lookup = |name: &str| keys.iter().find_map(|keys| schema::find(keys, name));
        match lookup(&entry.key) {
            Some(key) => match key.status {
                Status::Alias => lookup(key.meaning),
                Status::Old { by, .. } => lookup(by),
                _ => Some(key),
            }
            .map(|key| (key.name, key)),
            None => {
                self.unknown(path, entry, keys, &[]);
                None
            }
        }
    }

    /// Converts an entry in an older form to its current form, with a warning. Returns `None` if the old form has
    /// no effect.
    fn current<'e>(&mut self, path: &str, entry: &'e Entry, keys: &[&'static [Key]]) -> Option<Cow<'e, Entry>> {
        let written = keys.iter().find_map(|keys| schema::find(keys, &entry.key));
        let Some(Key { status: Status::Old { by, on }, .. }) = written else { return Some(Cow::Borrowed(entry)) };
        if entry.value.value == Value::Null {
            return None;
        }
        let (full, at) = (join(path, &entry.key), entry.value.at);
        let told = |old: &str, today: &str| format!("`{old}` is deprecated; {today}");
        let value = match (&entry.value.value, on) {
            (value, []) => {
                self.report.warn(&full, entry.key_at, told(&full, &format!("use `{by}`")));
                value.clone()
            }
            (Value::Bool(true), on) => {
                let pairs: Vec<String> = on.iter().map(|(key, value)| format!("{key}: {value}")).collect();
                let today = format!("use `{by}: {{{}}}`", pairs.join(", "));
                self.report.warn(&full, entry.key_at, told(&format!("{full}: true"), &today));
                let node = |value: &str| Node { value: Value::Text(value.to_string()), at };
                let entry =
                    |(key, value): &(&str, &str)| Entry { key: (*key).to_string(), key_at: at, value: node(value) };
                Value::Map(on.iter().map(entry).collect())
            }
            (Value::Bool(false), _) => {
                self.report.warn(&full, entry.key_at, told(&format!("{full}: false"), "remove it"));
                return None;
            }
            // DeepSpeed drops keys set to `auto` from its sections.
            (auto, _) if auto.says("auto") => return None,
            (other, _) => {
                self.wrong(&full, &entry.value, format!("expected true or false, found {}", other.describe()));
                return None;
            }
        };
        Some(Cow::Owned(Entry { key: (*by).to_string(), key_at: entry.key_at, value: Node { value, at } }))
    }

    fn unknown(&mut self, path: &str, entry: &Entry, keys: &[&'static [Key]], beside: &[&'static str]) {
        let full = join(path, &entry.key);
        let (near, help) = match self.report.is_full() {
            true => (None, None),
            false => advice::unknown_key(path, &entry.key, keys, beside),
        };
        if let Some(near) = near {
            // Do not also report the intended key as missing.
            self.report.poison(join(path, near));
        }
        // DeepSpeed ignores unknown keys at the top level of the file.
        let flag = (path.is_empty() && matches!(entry.key_at, At::File { .. })).then(|| IGNORES.to_string());
        let help = match (help, flag) {
            (Some(help), Some(flag)) => {
                let space = if help.ends_with('?') { " " } else { "; " };
                Some(format!("{help}{space}{flag}"))
            }
            (help, flag) => help.or(flag),
        };
        let message = format!("unknown key `{full}`");
        self.report.error(ErrorKind::UnknownKey, &full, entry.key_at, message, help);
    }

    pub(crate) fn entry(&mut self, path: &str, key: &'static Key, entry: &Entry) {
        let value = &entry.value.value;
        match (key.status, key.kind) {
            (Status::Removed, _) if is_off(value, key, &["false"]) || is_disabled(value) => {
                let message = format!("`{path}` was removed from DeepSpeed, and is disabled here; delete it");
                self.report.warn(path, entry.key_at, message);
            }
            // Only values of a search space reach this arm; older forms are not converted in a search space.
            (Status::Old { by, .. }, _) => {
                let message = format!("`{path}` is deprecated");
                self.report.error(ErrorKind::Rejected, path, entry.key_at, message, Some(format!("use `{by}`")));
            }
            (Status::Removed, _) => {
                let message = format!("`{path}` was removed from DeepSpeed");
                self.report.error(ErrorKind::Rejected, path, entry.key_at, message, Some(key.meaning.to_string()));
            }
            (Status::Now, Kind::Section(section)) => self.now_section(path, section, entry),
            (Status::Now, Kind::Sections(section)) => self.sections(path, section, entry),
            (Status::Now, Kind::Variants(variants)) => self.variants(path, variants, entry),
            (Status::Now, Kind::Space { continuous }) => self.space(path, continuous, &entry.value),
            (Status::Later { .. } | Status::Rejected { .. }, Kind::Section(section)) => {
                self.switched(path, key, section, entry);
            }
            (Status::Later { off } | Status::Rejected { off }, _) => {
                if !is_off(value, key, off) {
                    self.inactive(path, key, off, entry);
                }
            }
            (Status::Now | Status::Ignored | Status::Alias, _) => self.leaf(path, key, entry),
        }
    }

    fn now_section(&mut self, path: &str, section: &'static Section, entry: &Entry) {
        match &entry.value.value {
            Value::Map(entries) => {
                self.fields.sections.insert(path.to_string(), entry.key_at);
                let before = self.is_off;
                self.is_off |= is_switched_off(section, entries);
                let live: Vec<Entry> = match self.is_off {
                    true => entries.iter().filter(|entry| !is_inactive(section, entry)).cloned().collect(),
                    false => entries.clone(),
                };
                self.section(path, entry.key_at, &live, &[section.keys]);
                self.is_off = before;
            }
            Value::Bool(false) if !matches!(section.switch, Switch::Keys) => {}
            // The oldest form in DeepSpeed: a boolean in place of the section.
            Value::Bool(on) if path == Config::zero => {
                let at = entry.value.at;
                let message = format!("`{path}: {on}` is deprecated; use `stage: {}`", u8::from(*on));
                self.report.warn(path, at, message);
                let field = Field { leaf: Leaf::Int(u64::from(*on)), at, auto: false };
                self.fields.values.insert(Zero::stage.to_string(), field);
            }
            other => self.wrong(path, &entry.value, format!("expected a section, found {}", other.describe())),
        }
    }

    /// Checks each section of a list.
    fn sections(&mut self, path: &str, section: &'static Section, entry: &Entry) {
        let items = match &entry.value.value {
            Value::List(items) if !items.is_empty() => items,
            other => {
                let message = format!("expected {}, found {}", expected(&Kind::Sections(section)), other.describe());
                return self.wrong(path, &entry.value, message);
            }
        };
        self.fields.sections.insert(path.to_string(), entry.key_at);
        for (index, item) in items.iter().enumerate() {
            let item = Entry { key: index.to_string(), key_at: item.at, value: item.clone() };
            self.now_section(&join(path, &item.key), section, &item);
        }
    }

    /// Checks a section that is not implemented. It is accepted if its switch is off.
    fn switched(&mut self, path: &str, key: &'static Key, section: &'static Section, entry: &Entry) {
        let entries = match &entry.value.value {
            Value::Map(entries) => entries,
            Value::Bool(false) => return,
            _ => return self.inactive(path, key, &[], entry),
        };
        if !matches!(section.switch, Switch::Keys) {
            self.names(path, section, entries);
        }
        match section.switch {
            Switch::Keys => self.section(path, entry.key_at, entries, &[section.keys]),
            Switch::Presence if entries.is_empty() => {}
            Switch::Presence => self.inactive(path, key, &[], entry),
            Switch::Key(name, off) => {
                let switch = entries.iter().find(|entry| entry.key == name && entry.value.value != Value::Null);
                if let (Some(switch), Some(switch_key)) = (switch, schema::find(section.keys, name))
                    && !is_off(&switch.value.value, switch_key, off)
                {
                    let path = join(path, name);
                    let key = Key { status: key.status, meaning: key.meaning, ..*switch_key };
                    self.inactive(&path, &key, off, switch);
                }
            }
        }
    }

    /// Checks only the names in a section that is off. Its values have no effect, but a mistyped key may be the
    /// reason why it is off.
    fn names(&mut self, path: &str, section: &'static Section, entries: &[Entry]) {
        for entry in entries {
            let Some((name, key)) = self.find(path, entry, &[section.keys]) else { continue };
            if let (Kind::Section(inner), Value::Map(entries)) = (key.kind, &entry.value.value) {
                self.names(&join(path, name), inner, entries);
            }
        }
    }

    /// Reports a key that is on and has no effect here.
    fn inactive(&mut self, path: &str, key: &Key, off: &[&str], entry: &Entry) {
        let written = match &entry.value.value {
            Value::Text(text) => format!("{path}: {text}"),
            Value::Bool(_) | Value::Int(_) | Value::Float(_) => {
                format!("{path}: {}", entry.value.value.describe().trim_matches('`'))
            }
            _ => path.to_string(),
        };
        let without = match off.first().copied().unwrap_or(key.default) {
            "null" => "remove it".to_string(),
            value => format!("remove it, or set it to `{value}`"),
        };
        let without = key.instead.map_or(without.clone(), |instead| format!("{without}; {instead}"));
        // Lists and sections may begin on a later line than their key, so point at the key.
        let at = if written == path { entry.key_at } else { entry.value.at };
        match key.status {
            Status::Rejected { .. } => {
                let message = format!("`{written}` is not supported: {}", key.meaning);
                self.report.error(ErrorKind::Rejected, path, at, message, Some(without));
            }
            _ => {
                let message = format!("`{written}` is not implemented yet");
                self.report.error(ErrorKind::NotImplemented, path, at, message, Some(without));
            }
        }
    }

    fn leaf(&mut self, path: &str, key: &'static Key, entry: &Entry) {
        let node = &entry.value;
        let auto = matches!(&node.value, Value::Text(text) if text == "auto");
        let field = match (leaf(&key.kind, &node.value), key.auto) {
            (Some(leaf), _) => Field { leaf, at: node.at, auto: false },
            (None, Auto::Default) if auto => Field { leaf: Leaf::Null, at: node.at, auto: true },
            (None, Auto::Engine) if auto => Field { leaf: Leaf::Auto, at: node.at, auto: true },
            _ => return self.wrong_leaf(path, key, node),
        };
        if key.status == Status::Ignored {
            if !field.auto && !node.value.says(key.default) {
                self.report.warn(path, entry.key_at, format!("`{path}` {NO_EFFECT}: {}", key.meaning));
            }
        } else {
            self.fields.values.insert(path.to_string(), field);
        }
    }

    fn wrong_leaf(&mut self, path: &str, key: &'static Key, node: &Node) {
        if let (Kind::Patterns, Value::List(items)) = (&key.kind, &node.value)
            && (1..=MAX_PATTERNS).contains(&items.len())
        {
            return self.wrong_patterns(path, items);
        }
        if let (Kind::Choice { later, names }, Value::Text(text)) = (&key.kind, &node.value)
            && later.contains(&text.as_str())
        {
            let message = format!("`{path}: {text}` is not implemented yet");
            let help = format!("use a supported value: {}", expected(&Kind::Choice { names, later: &[] }));
            return self.report.error(ErrorKind::NotImplemented, path, node.at, message, Some(help));
        }
        let or_auto = if key.auto == Auto::Engine { ", or `auto`" } else { "" };
        let message = format!("`{path}`: expected {}{or_auto}, found {}", expected(&key.kind), node.value.describe());
        self.report.error(ErrorKind::Value, path, node.at, message, advice::value(&key.kind, &node.value));
    }

    /// Reports each invalid regular expression at its own location.
    fn wrong_patterns(&mut self, path: &str, items: &[Node]) {
        for item in items {
            let help = match &item.value {
                Value::Text(text) => match LayerPattern::new(text) {
                    Ok(_) => continue,
                    Err(help) => help,
                },
                _ => "put it in quotes if it is a string".to_string(),
            };
            let message = format!("`{path}`: expected a regular expression, found {}", item.value.describe());
            self.report.error(ErrorKind::Value, path, item.at, message, Some(help));
        }
    }

    pub(crate) fn wrong(&mut self, path: &str, node: &Node, message: String) {
        self.report.error(ErrorKind::Value, path, node.at, format!("`{path}`: {message}"), None);
    }
}
