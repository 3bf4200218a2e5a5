//! Checks sections whose `type` decides which keys they have.

use super::Check;
use crate::errors::ErrorKind;
use crate::nearest::nearest;
use crate::read::node::{At, Entry, Value};
use crate::schema::{self, Key, Status, TYPE, Variant, Variants, join};
use crate::value::{Field, Leaf};

impl Check<'_> {
    pub(super) fn variants(&mut self, path: &str, variants: &'static Variants, entry: &Entry) {
        let Value::Map(entries) = &entry.value.value else {
            let message = format!("expected a section, found {}", entry.value.value.describe());
            return self.wrong(path, &entry.value, message);
        };
        self.fields.sections.insert(path.to_string(), entry.key_at);
        let beside = |name: &str| name == TYPE || variants.params == Some(name);
        if !entries.iter().any(|entry| entry.key == TYPE) {
            self.names_of_any_type(path, variants, entries);
        }
        let Some(variant) = self.variant(path, variants, entries, entry.key_at) else {
            // The other keys cannot be checked without a valid type.
            return self.report.poison(path.to_string());
        };
        let (params, rest): (Vec<&Entry>, Vec<&Entry>) = entries.iter().partition(|entry| beside(&entry.key));
        let rest: Vec<Entry> = rest.into_iter().cloned().collect();
        match variants.params {
            None => self.section(path, entry.key_at, &rest, &[variants.shared, variant.keys]),
            Some(name) => {
                let (shared, unknown): (Vec<Entry>, Vec<Entry>) =
                    rest.into_iter().partition(|entry| schema::find(variants.shared, &entry.key).is_some());
                for entry in &unknown {
                    self.unknown(path, entry, &[variants.shared], &[TYPE, name]);
                }
                self.section(path, entry.key_at, &shared, &[variants.shared]);
                let written = params.into_iter().find(|entry| entry.key == name);
                self.params(&join(path, name), entry.key_at, written, variant);
            }
        }
    }

    /// Checks a section without a type: reports only the keys that no type has.
    fn names_of_any_type(&mut self, path: &str, variants: &'static Variants, entries: &[Entry]) {
        let own = variants.list.iter().map(|variant| variant.keys);
        let (mut keys, mut inside) = (vec![variants.shared], vec![]);
        if variants.params.is_some() {
            inside.extend(own)
        } else {
            keys.extend(own)
        }
        let beside: Vec<&str> = std::iter::once(TYPE).chain(variants.params).collect();
        let is_known = |keys: &[&'static [Key]], name: &str| keys.iter().any(|keys| schema::find(keys, name).is_some());
        for entry in entries {
            match &entry.value.value {
                Value::Map(params) if variants.params == Some(&entry.key) => {
                    let path = join(path, &entry.key);
                    for entry in params.iter().filter(|entry| !is_known(&inside, &entry.key)) {
                        self.unknown(&path, entry, &inside, &[]);
                    }
                }
                _ if beside.contains(&entry.key.as_str()) || is_known(&keys, &entry.key) => {}
                _ => self.unknown(path, entry, &keys, &beside),
            }
        }
    }

    pub(crate) fn params(&mut self, path: &str, at: At, written: Option<&Entry>, variant: &'static Variant) {
        match written.map(|entry| (&entry.value.value, entry)) {
            None | Some((Value::Null, _)) => self.section(path, at, &[], &[variant.keys]),
            Some((Value::Map(entries), entry)) => self.section(path, entry.key_at, entries, &[variant.keys]),
            Some((other, entry)) => {
                let message = format!("expected a section, found {}", other.describe());
                self.wrong(path, &entry.value, message);
            }
        }
    }

    /// Returns the variant that `type` names. Reports a missing, unknown or unimplemented type and returns `None`.
    pub(crate) fn variant(
        &mut self,
        path: &str,
        variants: &'static Variants,
        entries: &[Entry],
        at: At,
    ) -> Option<&'static Variant> {
        let usable = variants.list.iter().filter(|variant| variant.status == Status::Now);
        let names: Vec<&str> = usable.map(|variant| variant.name).collect();
        let path = join(path, TYPE);
        let Some(node) = entries.iter().find(|entry| entry.key == TYPE).map(|entry| &entry.value) else {
            if !self.report.is_poisoned(&path) {
                let help = format!("use one of {}", names.join(", "));
                self.report.error(ErrorKind::Missing, &path, at, format!("`{path}` is missing"), Some(help));
            }
            return None;
        };
        let Value::Text(text) = &node.value else {
            let message = format!("expected one of {}, found {}", names.join(", "), node.value.describe());
            self.wrong(&path, node, message);
            return None;
        };
        let Some(variant) = variants.list.iter().find(|variant| variant.name.eq_ignore_ascii_case(text)) else {
            let help = nearest(text, names.iter().copied()).map(|near| format!("did you mean `{near}`?"));
            let message = format!("`{path}`: expected one of {}, found \"{text}\"", names.join(", "));
            self.report.error(ErrorKind::Value, &path, node.at, message, help);
            return None;
        };
        match variant.status {
            Status::Now => {
                let field = Field { leaf: Leaf::Text(variant.name.to_string()), at: node.at, auto: false };
                self.fields.values.insert(path, field);
                Some(variant)
            }
            Status::Removed => {
                let message = format!("`{path}: {}` was removed from DeepSpeed", variant.name);
                self.report.error(ErrorKind::Rejected, &path, node.at, message, Some(variant.meaning.to_string()));
                None
            }
            _ => {
                let help = format!("use one of {}", names.join(", "));
                let message = format!("`{path}: {}` is not implemented yet", variant.name);
                self.report.error(ErrorKind::NotImplemented, &path, node.at, message, Some(help));
                None
            }
        }
    }
}
