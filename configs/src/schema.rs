//! Every key that the parser knows, as data: name, type, default, meaning, and what becomes of it.
//!
//! One table drives the detection of unknown keys, the messages, the defaults that are filled in and the reference in
//! `docs/`, so that none of them can say something else than the others.

mod autotuning;
mod deepspeed;
mod inactive;
mod instead;
mod offload;
mod optimizer;
mod own;
mod pipeline;
mod zero;

#[cfg(test)]
mod tests;

pub(crate) use instead::instead;

/// One key of a section.
#[derive(Debug)]
pub(crate) struct Key {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    /// As it would be written. [`REQUIRED`] when it has none; `= …` when it is computed, in words.
    pub(crate) default: &'static str,
    pub(crate) meaning: &'static str,
    pub(crate) status: Status,
    pub(crate) auto: Auto,
}

/// In place of a default: the key must be written when its section is.
pub(crate) const REQUIRED: &str = "required";

/// What becomes of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    /// It does what it says.
    Now,
    /// Not implemented yet: an error, unless its value is the default or one of these, which switch it off.
    Later { off: &'static [&'static str] },
    /// Has no meaning here, for the reason given in `meaning`: an error, unless it is off in the same way.
    Rejected { off: &'static [&'static str] },
    /// DeepSpeed removed or renamed it: an error that says what to write, whatever its value.
    Removed,
    /// Accepted without effect, for the reason given in `meaning`; a warning when its value is not the default.
    Ignored,
    /// Another name of the key that `meaning` names.
    Alias,
    /// An older form of the key `by`, read with a warning: `true` means a section of `on`, `false` nothing. With an empty `on` it is
    /// another name.
    Old { by: &'static str, on: &'static [(&'static str, &'static str)] },
}

/// What `auto` means as the value of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Auto {
    /// An error, or a text like any other.
    Refused,
    /// The default, as in Hugging Face's integration of DeepSpeed.
    Default,
    /// Something that is known only later; the resolved field is an `Option`.
    Engine,
}

/// What a value must be.
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
    /// A whole number that `of` divides, from `of` to `max`.
    Multiple {
        of: u64,
        max: u64,
    },
    /// A number of bytes, or a text with a unit.
    Bytes {
        min: u64,
    },
    Text,
    /// A text that is not empty.
    Path,
    Choice {
        names: &'static [&'static str],
        later: &'static [&'static str],
    },
    /// A way to deal layers out to pipeline stages.
    Partition,
    /// A text or a list of texts, one at least.
    Paths,
    Texts,
    /// A list of regular expressions on names of layers.
    Patterns,
    Ints {
        min: u64,
        max: u64,
    },
    /// Keys of the whole file, each with what is tried for it; `continuous` when that may be all between two numbers.
    Space {
        continuous: bool,
    },
    Section(&'static Section),
    Variants(&'static Variants),
    /// Not looked into: the key is off or an error.
    Any,
}

/// Numbers from `min` to `max`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Range {
    pub(crate) min: f64,
    pub(crate) max: f64,
    /// `min` itself is not in it.
    pub(crate) above: bool,
    /// `max` itself is not in it.
    pub(crate) below: bool,
}

/// A mapping of keys.
#[derive(Debug)]
pub(crate) struct Section {
    pub(crate) keys: &'static [Key],
    pub(crate) switch: Switch,
}

/// What switches on a section as a whole.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Switch {
    /// Each key speaks for itself.
    Keys,
    /// This key, unless it has one of these values.
    Key(&'static str, &'static [&'static str]),
    /// That the section is there and not empty.
    Presence,
}

/// A section whose keys depend on its `type`.
#[derive(Debug)]
pub(crate) struct Variants {
    /// Section of the variant's keys; `None` when they stand beside `type`.
    pub(crate) params: Option<&'static str>,
    /// Keys beside `type` for every variant.
    pub(crate) shared: &'static [Key],
    pub(crate) list: &'static [Variant],
}

/// One value of `type`. Upper and lower case do not matter.
#[derive(Debug)]
pub(crate) struct Variant {
    pub(crate) name: &'static str,
    pub(crate) meaning: &'static str,
    pub(crate) status: Status,
    pub(crate) keys: &'static [Key],
}

/// Keys at the top of the file.
pub(crate) static TOP: Section = Section { keys: deepspeed::TOP, switch: Switch::Keys };

/// A number of processes, or of what processes are dealt out to.
const RANKS: Kind = Kind::Int { min: 1, max: 65_536 };
const COUNT: Kind = Kind::Int { min: 1, max: u32::MAX as u64 };
const COUNT_OR_0: Kind = Kind::Int { min: 0, max: u32::MAX as u64 };
const SIZE: Kind = Kind::Int { min: 0, max: u64::MAX };
const SIZE_1: Kind = Kind::Int { min: 1, max: u64::MAX };
const NON_NEGATIVE: Kind = Kind::Float(Range { min: 0.0, max: f64::MAX, above: false, below: false });
const POSITIVE: Kind = Kind::Float(Range { min: 0.0, max: f64::MAX, above: true, below: false });
/// 0 ≤ x < 1.
const FRACTION: Range = Range { min: 0.0, max: 1.0, above: false, below: true };
const RATIO: Kind = Kind::Float(Range { min: 0.0, max: 1.0, above: false, below: false });

const fn key(name: &'static str, kind: Kind, default: &'static str, meaning: &'static str) -> Key {
    Key { name, kind, default, meaning, status: Status::Now, auto: Auto::Refused }
}

/// A key of DeepSpeed's that does what it says. Hugging Face's integration writes `auto` at any of them.
const fn now(name: &'static str, kind: Kind, default: &'static str, meaning: &'static str) -> Key {
    Key { auto: Auto::Default, ..key(name, kind, default, meaning) }
}

/// A key that does what it says and for which `auto` means something known only later.
const fn engine(name: &'static str, kind: Kind, default: &'static str, meaning: &'static str) -> Key {
    Key { auto: Auto::Engine, ..key(name, kind, default, meaning) }
}

const fn later(name: &'static str, default: &'static str, meaning: &'static str) -> Key {
    Key { status: Status::Later { off: &[] }, ..key(name, Kind::Any, default, meaning) }
}

const fn later_unless(name: &'static str, off: &'static [&'static str], meaning: &'static str) -> Key {
    Key { status: Status::Later { off }, ..key(name, Kind::Any, "null", meaning) }
}

const fn later_section(name: &'static str, section: &'static Section, meaning: &'static str) -> Key {
    Key { status: Status::Later { off: &[] }, ..key(name, Kind::Section(section), "null", meaning) }
}

const fn rejected(name: &'static str, default: &'static str, meaning: &'static str) -> Key {
    Key { status: Status::Rejected { off: &[] }, ..key(name, Kind::Any, default, meaning) }
}

const fn rejected_section(name: &'static str, section: &'static Section, meaning: &'static str) -> Key {
    Key { status: Status::Rejected { off: &[] }, ..key(name, Kind::Section(section), "null", meaning) }
}

const fn removed(name: &'static str, meaning: &'static str) -> Key {
    Key { status: Status::Removed, ..key(name, Kind::Any, "null", meaning) }
}

const fn old(
    name: &'static str,
    by: &'static str,
    on: &'static [(&'static str, &'static str)],
    meaning: &'static str,
) -> Key {
    Key { status: Status::Old { by, on }, ..key(name, Kind::Any, "null", meaning) }
}

const fn ignored(name: &'static str, kind: Kind, default: &'static str, meaning: &'static str) -> Key {
    Key { status: Status::Ignored, auto: Auto::Default, ..key(name, kind, default, meaning) }
}

const fn alias(name: &'static str, of: &'static str) -> Key {
    Key { status: Status::Alias, ..key(name, Kind::Any, "null", of) }
}

const fn section(name: &'static str, section: &'static Section, meaning: &'static str) -> Key {
    key(name, Kind::Section(section), "null", meaning)
}

impl Key {
    pub(crate) fn is_required(&self) -> bool {
        self.default == REQUIRED
    }
}

/// The key of that name.
pub(crate) fn find(keys: &'static [Key], name: &str) -> Option<&'static Key> {
    keys.iter().find(|key| key.name == name)
}

/// The name that a key goes by: its own, or that of the key which it is another name of.
pub(crate) fn first_name<'a>(keys: &'static [Key], name: &'a str) -> &'a str {
    match find(keys, name) {
        Some(Key { status: Status::Alias, meaning: other, .. })
        | Some(Key { status: Status::Old { by: other, on: [] }, .. }) => other,
        _ => name,
    }
}

/// The keys of the section that `name` is among `keys`; none when it is no section, or one that depends on its `type`.
pub(crate) fn inside(keys: &'static [Key], name: &str) -> &'static [Key] {
    match find(keys, first_name(keys, name)).map(|key| key.kind) {
        Some(Kind::Section(section)) => section.keys,
        _ => &[],
    }
}

/// Calls `visit` with the path of each key of a section and of all sections in it; a variant's type stands in brackets.
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

/// `path.name`.
pub(crate) fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_string() } else { format!("{path}.{name}") }
}
