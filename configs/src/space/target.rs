//! Resolves a path to the key of the schema. The result depends on the file: the keys of `optimizer.params` depend
//! on `optimizer.type`.

use crate::check::{Check, advice};
use crate::config::Config;
use crate::errors::ErrorKind;
use crate::read::node::{Entry, Node, Value};
use crate::schema::{self, Key, Kind, PARAMS, Status, TYPE, Variant, Variants, join};
use crate::value::expected;

use super::Written;

/// The keys of the schema that a path refers to.
pub(super) struct Target {
    /// Path with the primary names of the keys.
    pub(super) path: String,
    /// What the path means, once for each possible type of the section.
    meanings: Vec<Meaning>,
}

#[derive(Clone, Copy)]
enum Meaning {
    /// The whole file.
    Top,
    Key(&'static Key),
    /// `optimizer.type`.
    Type(&'static Variants),
    /// `optimizer.params`.
    Params(&'static Variant),
}

/// The error of an invalid path.
pub(super) struct Problem {
    pub(super) kind: ErrorKind,
    pub(super) message: String,
    pub(super) help: Option<String>,
}

/// Returns whether the path refers to a section for at least one combination of the enclosing sections' types.
pub(super) fn is_section(path: &str) -> bool {
    let mut meanings = vec![Meaning::Top];
    for name in path.split('.') {
        meanings = meanings.iter().flat_map(|meaning| meaning.down(name, &|_| true)).map(|(_, inner)| inner).collect();
    }
    meanings.iter().any(|meaning| match meaning {
        Meaning::Key(key) => matches!(key.kind, Kind::Section(_) | Kind::Variants(_)),
        Meaning::Params(_) => true,
        Meaning::Top | Meaning::Type(_) => false,
    })
}

/// Resolves `path` in the file whose top-level entries are `root`, together with the other keys of `space`. Returns
/// `Ok(None)` if the type of a section is invalid, which is reported where the type is written.
pub(super) fn find(path: &str, root: &[Entry], space: &[Written<'_>]) -> Result<Option<Target>, Problem> {
    let parts: Vec<&str> = path.split('.').collect();
    let mut meanings = vec![Meaning::Top];
    let mut whole = String::new();
    for (index, part) in parts.iter().enumerate() {
        let mut types = Vec::new();
        if let Some(Meaning::Key(Key { kind: Kind::Variants(variants), .. })) = meanings.first()
            && *part != TYPE
        {
            types = types_of(&whole, root, space);
            if types.is_empty() {
                return Err(untyped(path, &whole, variants));
            }
            if !usable(variants).any(|variant| is_named(variant, &types)) {
                return Ok(None);
            }
        }
        let is_of_type = |variant: &Variant| is_named(variant, &types);
        let next: Vec<_> = meanings.iter().flat_map(|meaning| meaning.down(part, &is_of_type)).collect();
        let Some((name, _)) = next.first() else {
            return Err(unknown(&whole, part, &parts[index + 1..], &meanings, &is_of_type));
        };
        whole = join(&whole, name);
        meanings = next.into_iter().map(|(_, inner)| inner).collect();
        if whole == Config::autotuning {
            let message = "`autotuning` itself cannot be tuned".to_string();
            return Err(Problem { kind: ErrorKind::Value, message, help: None });
        }
    }
    if let Some(Meaning::Key(key)) = meanings.first()
        && key.status == Status::Ignored
    {
        let message = format!("`{whole}` has no effect: {}", key.meaning);
        return Err(Problem { kind: ErrorKind::Value, message, help: None });
    }
    Ok(Some(Target { path: whole, meanings }))
}

/// Returns the possible types of the section at `path`: those in the search space, or else the written one.
fn types_of<'n>(path: &str, root: &'n [Entry], space: &[Written<'n>]) -> Vec<&'n str> {
    let text = |node: &'n Node| match &node.value {
        Value::Text(text) => Some(text.as_str()),
        _ => None,
    };
    let name = join(path, TYPE);
    if let Some(written) = space.iter().find(|written| written.path == name) {
        return match &written.node.value {
            Value::List(items) => items.iter().filter_map(text).collect(),
            _ => text(written.node).into_iter().collect(),
        };
    }
    let mut entries = root;
    let mut found = None;
    for part in name.split('.') {
        found = entries.iter().find(|entry| entry.key == part).map(|entry| &entry.value);
        entries = match found.map(|node| &node.value) {
            Some(Value::Map(inner)) => inner,
            _ => &[],
        };
    }
    found.and_then(text).into_iter().collect()
}

fn usable(variants: &'static Variants) -> impl Iterator<Item = &'static Variant> {
    variants.list.iter().filter(|variant| variant.status == Status::Now)
}

fn is_named(variant: &Variant, names: &[&str]) -> bool {
    names.iter().any(|name| variant.name.eq_ignore_ascii_case(name))
}

fn untyped(path: &str, section: &str, variants: &'static Variants) -> Problem {
    let names: Vec<_> = usable(variants).map(|variant| variant.name).collect();
    let message = format!("`{path}` needs `{section}.type`, which is not set");
    Problem { kind: ErrorKind::Missing, message, help: Some(format!("use one of {}", names.join(", "))) }
}

fn unknown(
    section: &str,
    name: &str,
    rest: &[&str],
    meanings: &[Meaning],
    is_of_type: &dyn Fn(&Variant) -> bool,
) -> Problem {
    let path = join(section, name);
    let mut keys = Vec::new();
    let mut beside = Vec::new();
    for meaning in meanings {
        if let Meaning::Key(key) = meaning
            && !matches!(key.kind, Kind::Section(_) | Kind::Variants(_))
        {
            let message = format!("`{section}` is not a section: it expects {}", expected(&key.kind));
            return Problem { kind: ErrorKind::UnknownKey, message, help: Some(format!("use `{section}`")) };
        }
        keys.extend(meaning.keys(is_of_type));
        if let Meaning::Key(Key { kind: Kind::Variants(variants), .. }) = meaning {
            beside.push(TYPE);
            beside.extend(variants.params);
        }
    }
    let (near, help) = advice::unknown_key(section, name, &keys, &beside);
    let help = match near {
        Some(near) => {
            let path = rest.iter().fold(join(section, near), |path, part| join(&path, part));
            Some(format!("did you mean `{path}`?"))
        }
        None => help,
    };
    Problem { kind: ErrorKind::UnknownKey, message: format!("unknown key `{path}`"), help }
}

impl Meaning {
    /// Returns what `name` means inside this key, with the primary name: one entry for each possible type.
    fn down<'a>(self, name: &'a str, is_of_type: &dyn Fn(&Variant) -> bool) -> Vec<(&'a str, Self)> {
        match self {
            Self::Key(Key { kind: Kind::Variants(variants), .. }) if name == TYPE => {
                return vec![(name, Self::Type(variants))];
            }
            Self::Key(Key { kind: Kind::Variants(variants), .. }) if variants.params == Some(name) => {
                let list = usable(variants).filter(|variant| is_of_type(variant));
                return list.map(|variant| (name, Self::Params(variant))).collect();
            }
            // Keys inside such a key are not checked. The key itself reports the error.
            Self::Key(Key { kind: Kind::Any, .. }) => return vec![(name, self)],
            _ => {}
        }
        let lookup = |keys: &'static [Key]| match schema::find(keys, name) {
            Some(key) if key.status == Status::Alias => schema::find(keys, key.meaning),
            key => key,
        };
        self.keys(is_of_type).into_iter().filter_map(lookup).map(|key| (key.name, Self::Key(key))).collect()
    }

    /// Returns the keys inside.
    fn keys(self, is_of_type: &dyn Fn(&Variant) -> bool) -> Vec<&'static [Key]> {
        match self {
            Self::Top => vec![Config::SECTION.keys],
            Self::Params(variant) => vec![variant.keys],
            Self::Key(Key { kind: Kind::Section(section), .. }) => vec![section.keys],
            Self::Key(Key { kind: Kind::Variants(variants), .. }) => {
                let own = usable(variants).filter(|variant| variants.params.is_none() && is_of_type(variant));
                std::iter::once(variants.shared).chain(own.map(|variant| variant.keys)).collect()
            }
            Self::Key(_) | Self::Type(_) => vec![],
        }
    }
}

impl Target {
    /// Returns the number of possible types of the key's section.
    pub(super) fn len(&self) -> usize {
        self.meanings.len()
    }

    /// Returns the expected kind of a value; `None` for a section.
    pub(super) fn kind(&self) -> Option<Kind> {
        match self.meanings.first() {
            Some(Meaning::Key(Key { kind: Kind::Section(_) | Kind::Variants(_), .. })) => None,
            Some(Meaning::Key(key)) => Some(key.kind),
            _ => None,
        }
    }

    /// Checks a value of the key, for the type with that index. Messages call the key `place`.
    pub(super) fn check(&self, index: usize, check: &mut Check<'_>, place: &str, item: &Node) {
        let name = |name: &str| Entry { key: name.to_string(), key_at: item.at, value: item.clone() };
        match self.meanings.get(index) {
            Some(Meaning::Key(key)) if item.value == Value::Null => {
                if key.is_required() {
                    check.wrong(place, item, format!("expected {}, found nothing", expected(&key.kind)));
                }
            }
            Some(Meaning::Key(key)) => check.entry(place, key, &name(key.name)),
            Some(Meaning::Params(variant)) => check.params(place, item.at, Some(&name(PARAMS)), variant),
            Some(Meaning::Type(variants)) => {
                let section = place.strip_suffix(TYPE).and_then(|place| place.strip_suffix('.')).unwrap_or(place);
                check.variant(section, variants, &[name(TYPE)], item.at);
            }
            Some(Meaning::Top) | None => {}
        }
    }
}
