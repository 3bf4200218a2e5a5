//! Reads the typed values, or defaults from the schema, and records the origin of each.
//!
//! After an error the values are placeholders. [`Typed::resolve`](crate::Typed::resolve) then returns the errors and
//! drops the values.

use std::path::PathBuf;
use std::sync::Arc;

use crate::config::{Dimension, LayerPattern};
use crate::facts::Facts;
use crate::origin::{Origin, Origins};
use crate::read::node::At;
use crate::read::parse;
use crate::report::Report;
use crate::schema::{self, Key, Kind, TYPE, join};
use crate::typed::Typed;
use crate::value::{Field, Fields, Leaf, leaf};

/// State of the second phase, which resolves the configuration.
pub(crate) struct Resolver<'t> {
    pub(crate) typed: &'t Typed,
    pub(crate) fields: &'t Fields,
    pub(crate) report: Report,
    pub(crate) origins: Origins,
    pub(crate) facts: Facts,
    /// Keys at the top of the file.
    pub(crate) keys: &'static [Key],
}

/// Reads one section.
pub(crate) struct Reader<'r, 't> {
    resolver: &'r mut Resolver<'t>,
    path: String,
    keys: &'static [Key],
}

/// Reads a key that may have no value.
pub(crate) trait Find: Sized {
    /// Reads the key. Returns `None` if its value is null, `auto` or computed.
    fn find(keys: &mut Reader<'_, '_>, name: &'static str) -> Option<Self>;
}

/// Reads a key that always has a value.
pub(crate) trait Read: Sized {
    /// Reads the key; returns a placeholder after an error.
    fn read(keys: &mut Reader<'_, '_>, name: &'static str) -> Self;
}

impl<T: Find> Read for Option<T> {
    fn read(keys: &mut Reader<'_, '_>, name: &'static str) -> Self {
        T::find(keys, name)
    }
}

/// Implements [`Find`] and [`Read`] for types that are converted from a [`Leaf`], each with its placeholder.
macro_rules! read_as {
    ($( $type:ty: $leaf:pat => $value:expr, else $placeholder:expr; )+) => { $(
        impl $crate::read::reader::Find for $type {
            fn find(keys: &mut $crate::read::reader::Reader<'_, '_>, name: &'static str) -> Option<Self> {
                match keys.leaf(name) {
                    $leaf => Some($value),
                    _ => None,
                }
            }
        }

        impl $crate::read::reader::Read for $type {
            fn read(keys: &mut $crate::read::reader::Reader<'_, '_>, name: &'static str) -> Self {
                <Self as $crate::read::reader::Find>::find(keys, name).unwrap_or($placeholder)
            }
        }
    )+ };
}

pub(crate) use read_as;

read_as! {
    bool: Leaf::Bool(value) => value, else false;
    u16: Leaf::Int(value) => u16::try_from(value).unwrap_or(Self::MAX), else 0;
    u32: Leaf::Int(value) => u32::try_from(value).unwrap_or(Self::MAX), else 0;
    u64: Leaf::Int(value) => value, else 0;
    usize: Leaf::Int(value) => Self::try_from(value).unwrap_or(Self::MAX), else 1;
    f64: Leaf::Float(value) => value, else 0.0;
    [f64; 2]: Leaf::Pair(value) => value, else [0.0; 2];
    String: Leaf::Text(value) => value, else Self::new();
    PathBuf: Leaf::Text(value) => value.into(), else Self::new();
    Vec<String>: Leaf::Texts(values) => values, else Self::new();
    Vec<usize>: Leaf::Ints(values) => values.into_iter().map(|value| value.try_into().unwrap_or(usize::MAX)).collect(),
        else Self::new();
    Vec<f64>: Leaf::Floats(values) => values, else Self::new();
    Vec<Dimension>: Leaf::Space(dimensions) => dimensions.into_iter().map(|(dimension, _)| dimension).collect(),
        else Self::new();
    // The schema's check has already reported invalid patterns.
    Vec<LayerPattern>: Leaf::Texts(values) => values.iter().filter_map(|text| LayerPattern::new(text).ok()).collect(),
        else Self::new();
}

impl<'t> Resolver<'t> {
    /// Returns a reader of the keys at the top of the file.
    pub(crate) fn top(&mut self) -> Reader<'_, 't> {
        Reader { path: String::new(), keys: self.keys, resolver: self }
    }

    /// Returns whether the section is written.
    pub(crate) fn has_section(&self, path: &str) -> bool {
        self.fields.sections.contains_key(path)
    }

    /// Returns the location of the key or section at `path`.
    pub(crate) fn at(&self, path: &str) -> At {
        let value = self.fields.values.get(path).map(|field| field.at);
        value.or_else(|| self.fields.sections.get(path).copied()).unwrap_or(At::Default)
    }

    /// Reports keys that contradict each other, unless one of them already has an error.
    pub(crate) fn contradiction(&mut self, paths: &[&str], message: String, help: Option<String>) {
        let places: Vec<(&str, At)> = paths.iter().map(|path| (*path, self.at(path))).collect();
        self.report.contradiction(&places, message, help);
    }

    /// Adds a warning about the key at `path`.
    pub(crate) fn warn(&mut self, path: &str, message: String) {
        let at = self.at(path);
        self.report.warn(path, at, message);
    }
}

impl<'t> Reader<'_, 't> {
    /// Returns a reader of a section inside this one, if it is written.
    pub(crate) fn inner(&mut self, name: &str) -> Option<Reader<'_, 't>> {
        let is_written = self.resolver.has_section(&join(&self.path, name));
        is_written.then(|| self.section(name))
    }

    /// Returns a reader of a section inside this one, whether or not it is written.
    pub(crate) fn section(&mut self, name: &str) -> Reader<'_, 't> {
        Reader { keys: schema::inside(self.keys, name), path: join(&self.path, name), resolver: self.resolver }
    }

    /// Reads each section of a list with `read`. Returns `None` if the list is not written.
    pub(crate) fn list<T>(&mut self, name: &str, mut read: impl FnMut(&mut Reader<'_, 't>) -> T) -> Option<Vec<T>> {
        let (path, keys) = (join(&self.path, name), schema::inside(self.keys, name));
        let items = (0..).map(|index: usize| join(&path, &index.to_string()));
        let written: Vec<String> = items.take_while(|path| self.resolver.has_section(path)).collect();
        let item = |path| read(&mut Reader { resolver: self.resolver, path, keys });
        (!written.is_empty()).then(|| written.into_iter().map(item).collect())
    }

    /// Returns the `type` of a section inside this one, and a reader of the keys of that variant.
    pub(crate) fn variant(&mut self, name: &str, default: &'static str) -> (&'static str, Reader<'_, 't>) {
        let section = join(&self.path, name);
        let path = join(&section, TYPE);
        let written = match self.resolver.fields.values.get(&path) {
            Some(Field { leaf: Leaf::Text(text), at, .. }) => {
                self.resolver.origins.record(path, origin(*at));
                text.as_str()
            }
            _ => default,
        };
        let (list, params) = match schema::find(self.keys, name).map(|key| key.kind) {
            Some(Kind::Variants(variants)) => (variants.list, variants.params),
            _ => (&[][..], None),
        };
        let variant = list.iter().find(|variant| variant.name == written);
        let (found, keys) = variant.map_or((default, &[][..]), |variant| (variant.name, variant.keys));
        let path = params.map_or(section.clone(), |params| join(&section, params));
        (found, Reader { resolver: self.resolver, path, keys })
    }

    /// Returns the values that defaults depend on.
    pub(crate) fn facts(&self) -> Facts {
        self.resolver.facts
    }

    /// Returns the configuration as written.
    pub(crate) fn typed(&self) -> Arc<Typed> {
        Arc::new(self.resolver.typed.clone())
    }

    /// Returns the name of the file.
    pub(crate) fn file(&self) -> &str {
        &self.resolver.report.source().name
    }

    /// Returns the value of a key, or its default, and records its origin.
    pub(crate) fn leaf(&mut self, name: &str) -> Leaf {
        let path = join(&self.path, name);
        let default = || schema::find(self.keys, name).map_or(Leaf::Null, default);
        let (leaf, origin) = match self.resolver.fields.values.get(&path) {
            Some(Field { leaf: Leaf::Null, auto: true, .. }) => (default(), Origin::Auto),
            Some(Field { leaf, auto: true, .. }) => (leaf.clone(), Origin::Auto),
            Some(Field { leaf, at, .. }) => (leaf.clone(), origin(*at)),
            None => (default(), Origin::Default),
        };
        if let Leaf::Space(dimensions) = &leaf {
            for (dimension, at) in dimensions {
                self.resolver.origins.record(join(&path, &dimension.path), self::origin(*at));
            }
        }
        self.resolver.origins.record(path, origin);
        leaf
    }
}

/// Returns the default of a key as written in the schema.
pub(crate) fn default(key: &Key) -> Leaf {
    let text = key.default;
    if text == "auto" && key.auto == schema::Auto::Engine {
        return Leaf::Auto;
    }
    if text.starts_with('=') || key.is_required() || text == "null" {
        return Leaf::Null;
    }
    match key.kind {
        // Defaults of these kinds are written without quotes in the schema.
        Kind::Text | Kind::Choice { .. } | Kind::Partition => Leaf::Text(text.to_string()),
        kind => parse::constant(text).and_then(|node| leaf(&kind, &node.value)).unwrap_or(Leaf::Null),
    }
}

fn origin(at: At) -> Origin {
    match at {
        At::File { file: 0, line, .. } => Origin::Line(line),
        At::File { file, line, .. } => Origin::LineOf { file: file + 1, line },
        At::Set(_) => Origin::Set,
        At::Default => Origin::Default,
        At::Launch(_) => Origin::Launch,
        At::Pretrained => Origin::Pretrained,
        At::Program => Origin::Program,
    }
}
