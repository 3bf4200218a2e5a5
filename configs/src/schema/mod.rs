//! All keys that the parser knows, as data: name, type, default, description and status. The declarations with
//! [`section!`](crate::table::section) produce this data.
//!
//! Unknown keys, messages, defaults and the reference in `docs/` all come from this data, so they cannot disagree.

#[cfg(test)]
mod tests;

use crate::path::last;

/// One key of a section.
#[derive(Debug)]
pub(crate) struct Key {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    /// The default as YAML, [`REQUIRED`] if there is none, or a description after `=` if it is computed.
    pub(crate) default: &'static str,
    pub(crate) meaning: &'static str,
    pub(crate) status: Status,
    pub(crate) auto: Auto,
    /// What to write instead of a key that is not implemented, as the second part of the error's help.
    pub(crate) instead: Option<&'static str>,
}

/// Marks a key without a default, which must be written if its section is written.
pub(crate) const REQUIRED: &str = "required";

/// End of the warning about a key without effect.
pub(crate) const NO_EFFECT: &str = "has no effect";

/// Support of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    /// Implemented.
    Now,
    /// Not implemented yet: an error, unless the value is the default or one of `off`, which leave the feature off.
    Later { off: &'static [&'static str] },
    /// Unsupported, for the reason in `meaning`: an error, unless the value leaves the feature off as for `Later`.
    Rejected { off: &'static [&'static str] },
    /// Removed or renamed by DeepSpeed: an error with advice, whatever the value.
    Removed,
    /// Accepted without effect, for the reason in `meaning`. A value other than the default causes a warning.
    Ignored,
    /// An alias of the key named in `meaning`.
    Alias,
    /// An older form of the key `by`, accepted with a warning. `true` means a section with the keys `on`, and
    /// `false` means no section. If `on` is empty, the key is an alias.
    Old { by: &'static str, on: &'static [(&'static str, &'static str)] },
}

/// Meaning of `auto` as the value of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Auto {
    /// An error, or an ordinary string for keys that take text.
    Refused,
    /// The default, as in Hugging Face's integration of DeepSpeed.
    Default,
    /// A value that is determined later; the resolved field is an `Option`.
    Engine,
}

/// The type and range of a value.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    Bool,
    Int {
        min: u64,
        max: u64,
    },
    Float(Range),
    /// Two numbers.
    Pair(Range),
    /// An integer from `of` to `max` that is a multiple of `of`.
    Multiple {
        of: u64,
        max: u64,
    },
    /// A number of bytes, or a string with a unit.
    Bytes {
        min: u64,
    },
    Text,
    /// A non-empty string.
    Path,
    Choice {
        names: &'static [&'static str],
        later: &'static [&'static str],
    },
    /// A method of assigning layers to pipeline stages.
    Partition,
    /// A string, or a list of at least one string.
    Paths,
    Texts,
    /// A name, or a list of at least one name.
    Names,
    /// A list of regular expressions that match layer names.
    Patterns,
    Ints {
        min: u64,
        max: u64,
    },
    /// A list of numbers.
    Floats(Range),
    /// A search space: keys of the whole file, each with the values to try. `continuous` also permits a range
    /// between two numbers.
    Space {
        continuous: bool,
    },
    Section(&'static Section),
    /// A list of at least one section. The path of a key contains the index of its section, from 0:
    /// `data.datasets.0.path`.
    Sections(&'static Section),
    Variants(&'static Variants),
    /// Any value. Used for keys that must be off.
    Any,
}

/// A range of numbers from `min` to `max`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Range {
    pub(crate) min: f64,
    pub(crate) max: f64,
    /// Whether `min` itself is excluded.
    pub(crate) above: bool,
    /// Whether `max` itself is excluded.
    pub(crate) below: bool,
}

/// A mapping of keys.
#[derive(Debug)]
pub(crate) struct Section {
    pub(crate) keys: &'static [Key],
    pub(crate) switch: Switch,
}

/// The switch of a section as a whole.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Switch {
    /// No common switch; each key has its own.
    Keys,
    /// This key; the section is off if it has one of these values.
    Key(&'static str, &'static [&'static str]),
    /// The section is on if it is present and not empty.
    Presence,
}

/// A section whose keys depend on its `type`.
#[derive(Debug)]
pub(crate) struct Variants {
    /// Section with the keys of the variant; `None` if they are next to `type`.
    pub(crate) params: Option<&'static str>,
    /// Keys next to `type` that every variant has.
    pub(crate) shared: &'static [Key],
    pub(crate) list: &'static [Variant],
}

/// One variant of a section. The value of `type` is case-insensitive.
#[derive(Debug)]
pub(crate) struct Variant {
    pub(crate) name: &'static str,
    pub(crate) meaning: &'static str,
    pub(crate) status: Status,
    pub(crate) keys: &'static [Key],
}

/// The key of a section that selects its variant, and the section with that variant's keys.
pub(crate) const TYPE: &str = "type";
pub(crate) const PARAMS: &str = "params";

/// A number of processes, or of parts that are distributed over processes.
pub(crate) const RANKS: Kind = Kind::Int { min: 1, max: 65_536 };
pub(crate) const COUNT: Kind = Kind::Int { min: 1, max: u32::MAX as u64 };
pub(crate) const COUNT_OR_0: Kind = Kind::Int { min: 0, max: u32::MAX as u64 };
pub(crate) const SIZE: Kind = Kind::Int { min: 0, max: u64::MAX };
pub(crate) const SIZE_1: Kind = Kind::Int { min: 1, max: u64::MAX };
pub(crate) const NON_NEGATIVE: Kind = Kind::Float(Range { min: 0.0, max: f64::MAX, above: false, below: false });
pub(crate) const POSITIVE: Kind = Kind::Float(Range { min: 0.0, max: f64::MAX, above: true, below: false });
/// 0 ≤ x < 1.
pub(crate) const FRACTION: Range = Range { min: 0.0, max: 1.0, above: false, below: true };
/// A number of positions of a sequence.
pub(crate) const POSITIONS: Kind = Kind::Int { min: 1, max: 1 << 30 };
pub(crate) const RATIO: Kind = Kind::Float(Range { min: 0.0, max: 1.0, above: false, below: false });

pub(crate) const fn key(name: &'static str, kind: Kind, default: &'static str, meaning: &'static str) -> Key {
    Key { name, kind, default, meaning, status: Status::Now, auto: Auto::Refused, instead: None }
}

/// Declares an implemented key of DeepSpeed. `auto` means the default, since Hugging Face's integration may write
/// it for any key.
pub(crate) const fn now(name: &'static str, kind: Kind, default: &'static str, meaning: &'static str) -> Key {
    Key { auto: Auto::Default, ..key(name, kind, default, meaning) }
}

/// Declares an implemented key whose `auto` is determined later.
pub(crate) const fn engine(name: &'static str, kind: Kind, default: &'static str, meaning: &'static str) -> Key {
    Key { auto: Auto::Engine, ..key(name, kind, default, meaning) }
}

pub(crate) const fn later(name: &'static str, default: &'static str, meaning: &'static str) -> Key {
    Key { status: Status::Later { off: &[] }, ..key(name, Kind::Any, default, meaning) }
}

pub(crate) const fn later_unless(name: &'static str, off: &'static [&'static str], meaning: &'static str) -> Key {
    Key { status: Status::Later { off }, ..key(name, Kind::Any, "null", meaning) }
}

pub(crate) const fn later_section(name: &'static str, section: &'static Section, meaning: &'static str) -> Key {
    Key { status: Status::Later { off: &[] }, ..key(name, Kind::Section(section), "null", meaning) }
}

pub(crate) const fn rejected(name: &'static str, default: &'static str, meaning: &'static str) -> Key {
    Key { status: Status::Rejected { off: &[] }, ..key(name, Kind::Any, default, meaning) }
}

pub(crate) const fn rejected_section(name: &'static str, section: &'static Section, meaning: &'static str) -> Key {
    Key { status: Status::Rejected { off: &[] }, ..key(name, Kind::Section(section), "null", meaning) }
}

pub(crate) const fn removed(name: &'static str, meaning: &'static str) -> Key {
    Key { status: Status::Removed, ..key(name, Kind::Any, "null", meaning) }
}

/// Declares a removed key whose value `off` meant that the feature was off.
pub(crate) const fn removed_unless(name: &'static str, off: &'static str, meaning: &'static str) -> Key {
    Key { default: off, ..removed(name, meaning) }
}

pub(crate) const fn old(
    name: &'static str,
    by: &'static str,
    on: &'static [(&'static str, &'static str)],
    meaning: &'static str,
) -> Key {
    Key { status: Status::Old { by: last(by), on }, ..key(name, Kind::Any, "null", meaning) }
}

pub(crate) const fn ignored(name: &'static str, kind: Kind, default: &'static str, meaning: &'static str) -> Key {
    Key { status: Status::Ignored, auto: Auto::Default, ..key(name, kind, default, meaning) }
}

pub(crate) const fn alias(name: &'static str, of: &'static str) -> Key {
    Key { status: Status::Alias, ..key(name, Kind::Any, "null", last(of)) }
}

pub(crate) const fn section(name: &'static str, section: &'static Section, meaning: &'static str) -> Key {
    key(name, Kind::Section(section), "null", meaning)
}

pub(crate) const fn sections(name: &'static str, section: &'static Section, meaning: &'static str) -> Key {
    key(name, Kind::Sections(section), "null", meaning)
}

/// Declares an implemented variant.
pub(crate) const fn variant(name: &'static str, meaning: &'static str, keys: &'static [Key]) -> Variant {
    Variant { name, meaning, status: Status::Now, keys }
}

impl Key {
    /// Adds advice on what to write instead of this key.
    pub(crate) const fn instead(self, instead: &'static str) -> Self {
        assert!(matches!(self.status, Status::Later { .. } | Status::Rejected { .. }));
        Self { instead: Some(instead), ..self }
    }

    pub(crate) fn is_required(&self) -> bool {
        self.default == REQUIRED
    }
}

/// Returns the key with that name.
pub(crate) fn find(keys: &'static [Key], name: &str) -> Option<&'static Key> {
    keys.iter().find(|key| key.name == name)
}

/// Returns the primary name of a key: the name that an alias stands for, or the name itself.
pub(crate) fn first_name<'a>(keys: &'static [Key], name: &'a str) -> &'a str {
    match find(keys, name) {
        Some(Key { status: Status::Alias, meaning: other, .. })
        | Some(Key { status: Status::Old { by: other, on: [] }, .. }) => other,
        _ => name,
    }
}

/// Returns the keys of the section `name` in `keys`; if `name` is a list of sections, the keys of each of them. Returns
/// no keys if `name` is neither, or if its keys depend on its `type`.
pub(crate) fn inside(keys: &'static [Key], name: &str) -> &'static [Key] {
    match find(keys, first_name(keys, name)).map(|key| key.kind) {
        Some(Kind::Section(section) | Kind::Sections(section)) => section.keys,
        _ => &[],
    }
}

/// Calls `visit` with the path of each key in a section and its subsections. The type of a variant is in brackets.
pub(crate) fn walk(path: &str, keys: &'static [Key], visit: &mut impl FnMut(&str, &'static Key)) {
    for key in keys {
        let path = join(path, key.name);
        visit(&path, key);
        match key.kind {
            Kind::Section(section) => walk(&path, section.keys, visit),
            Kind::Variants(variants) => {
                walk(&path, variants.shared, visit);
                for variant in variants.list {
                    let inside = variants.params.map_or(path.clone(), |params| join(&path, params));
                    walk(&format!("{inside}[{}]", variant.name), variant.keys, visit);
                }
            }
            _ => {}
        }
    }
}

/// Returns `path.name`.
pub(crate) fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_string() } else { format!("{path}.{name}") }
}
