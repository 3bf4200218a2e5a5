//! Decides whether a section is off, by its switch, and whether a key without effect is off, by its value.

use crate::config::Bf16;
use crate::path::last;
use crate::read::node::{Entry, Value};
use crate::schema::{self, Key, Section, Status, Switch};

/// Returns whether a section's switch is off.
pub(super) fn is_switched_off(section: &Section, entries: &[Entry]) -> bool {
    let Switch::Key(name, off) = section.switch else { return false };
    let value =
        |entry: &&Entry| entry.key == name && entry.value.value != Value::Null && !entry.value.value.says("auto");
    match entries.iter().find(value) {
        Some(entry) => off.iter().any(|off| entry.value.value.says(off)),
        None => schema::find(section.keys, name).is_some_and(|key| off.contains(&key.default)),
    }
}

/// Returns whether the section has an `enabled` key that is off.
pub(super) fn is_disabled(section: &Value) -> bool {
    let Value::Map(entries) = section else { return false };
    let switch = entries.iter().find(|entry| entry.key == last(Bf16::enabled)).map(|entry| &entry.value.value);
    switch.is_some_and(|switch| switch.says("false") || switch.says("auto"))
}

/// Returns whether a key has no effect here. In a section that is off, any value of such a key is accepted.
pub(super) fn is_inactive(section: &Section, entry: &Entry) -> bool {
    let status = schema::find(section.keys, &entry.key).map(|key| key.status);
    matches!(status, Some(Status::Later { .. } | Status::Rejected { .. } | Status::Ignored))
}

/// Returns whether a value leaves the feature off: null, `auto`, the default, or one of `off`.
pub(super) fn is_off(value: &Value, key: &Key, off: &[&str]) -> bool {
    // For a key without effect, `auto` means the default.
    *value == Value::Null || value.says("auto") || value.says(key.default) || off.iter().any(|off| value.says(off))
}
