//! Reads the typed values, or defaults from the schema, and records the origin of each.
//!
//! After an error the values are placeholders. [`Typed::resolve`](crate::Typed::resolve) then returns the errors and
//! drops the values.

use std::path::PathBuf;

use crate::check::{Field, Fields};
use crate::choice::Choice;
use crate::config::Dimension;
use crate::node::At;
use crate::origin::{Origin, Origins};
use crate::parse;
use crate::report::Report;
use crate::schema::{self, Key, Kind, Variants, join};
use crate::value::{Leaf, leaf};

/// State of the second phase.
pub(crate) struct Resolver<'t> {
    pub(crate) fields: &'t Fields,
    pub(crate) report: Report,
    pub(crate) origins: Origins,
}

/// Reads one section.
pub(crate) struct Reader<'r, 't> {
    resolver: &'r mut Resolver<'t>,
    path: String,
    keys: &'static [Key],
}

impl<'t> Resolver<'t> {
    /// Returns a reader of the keys at the top of the file.
    pub(crate) fn top(&mut self) -> Reader<'_, 't> {
        Reader { resolver: self, path: String::new(), keys: schema::TOP.keys }
    }

    /// Returns a reader of the section with that name at the top of the file.
    pub(crate) fn section(&mut self, name: &str) -> Reader<'_, 't> {
        let keys = match schema::find(schema::TOP.keys, name).map(|key| key.kind) {
            Some(Kind::Section(section)) => section.keys,
            _ => &[],
        };
        Reader { resolver: self, path: name.to_string(), keys }
    }

    /// Returns the `type` of a section at the top of the file, and a reader of the keys of that variant.
    pub(crate) fn variant(&mut self, name: &str, default: &'static str) -> (&'static str, Reader<'_, 't>) {
        let path = join(name, "type");
        let written = match self.fields.values.get(&path) {
            Some(Field { leaf: Leaf::Text(text), at, .. }) => {
                self.origins.record(path, origin(*at));
                text.as_str()
            }
            _ => default,
        };
        let Some(Kind::Variants(Variants { params, list, .. })) =
            schema::find(schema::TOP.keys, name).map(|key| key.kind)
        else {
            return (default, Reader { resolver: self, path: name.to_string(), keys: &[] });
        };
        let variant = list.iter().find(|variant| variant.name == written);
        let (found, keys) = variant.map_or((default, &[][..]), |variant| (variant.name, variant.keys));
        let path = params.map_or(name.to_string(), |params| join(name, params));
        (found, Reader { resolver: self, path, keys })
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
        let keys = match schema::find(self.keys, name).map(|key| key.kind) {
            Some(Kind::Section(section)) => section.keys,
            _ => &[],
        };
        Reader { path: join(&self.path, name), resolver: self.resolver, keys }
    }

    pub(crate) fn bool(&mut self, name: &str) -> bool {
        self.optional_bool(name).unwrap_or(false)
    }

    pub(crate) fn optional_bool(&mut self, name: &str) -> Option<bool> {
        match self.leaf(name) {
            Leaf::Bool(value) => Some(value),
            _ => None,
        }
    }

    pub(crate) fn int(&mut self, name: &str) -> usize {
        self.optional_int(name).unwrap_or(1)
    }

    /// Returns `None` for `auto` or a value that is computed.
    pub(crate) fn optional_int(&mut self, name: &str) -> Option<usize> {
        self.optional_u64(name).map(|value| usize::try_from(value).unwrap_or(usize::MAX))
    }

    pub(crate) fn u64(&mut self, name: &str) -> u64 {
        self.optional_u64(name).unwrap_or(0)
    }

    pub(crate) fn optional_u64(&mut self, name: &str) -> Option<u64> {
        match self.leaf(name) {
            Leaf::Int(value) => Some(value),
            _ => None,
        }
    }

    pub(crate) fn float(&mut self, name: &str) -> f64 {
        self.optional_float(name).unwrap_or(0.0)
    }

    pub(crate) fn optional_float(&mut self, name: &str) -> Option<f64> {
        match self.leaf(name) {
            Leaf::Float(value) => Some(value),
            _ => None,
        }
    }

    pub(crate) fn pair(&mut self, name: &str) -> [f64; 2] {
        match self.leaf(name) {
            Leaf::Pair(value) => value,
            _ => [0.0; 2],
        }
    }

    pub(crate) fn text(&mut self, name: &str) -> String {
        self.optional_text(name).unwrap_or_default()
    }

    pub(crate) fn optional_text(&mut self, name: &str) -> Option<String> {
        match self.leaf(name) {
            Leaf::Text(value) => Some(value),
            _ => None,
        }
    }

    pub(crate) fn optional_path(&mut self, name: &str) -> Option<PathBuf> {
        self.optional_text(name).map(PathBuf::from)
    }

    pub(crate) fn texts(&mut self, name: &str) -> Option<Vec<String>> {
        match self.leaf(name) {
            Leaf::Texts(value) => Some(value),
            _ => None,
        }
    }

    pub(crate) fn ints(&mut self, name: &str) -> Vec<usize> {
        match self.leaf(name) {
            Leaf::Ints(values) => {
                values.into_iter().map(|value| usize::try_from(value).unwrap_or(usize::MAX)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Returns the dimensions of a search space, each with the location of its values.
    pub(crate) fn space(&mut self, name: &str) -> Vec<(Dimension, At)> {
        let Leaf::Space(dimensions) = self.leaf(name) else { return Vec::new() };
        for (dimension, at) in &dimensions {
            let path = join(&join(&self.path, name), &dimension.path);
            self.resolver.origins.record(path, origin(*at));
        }
        dimensions
    }

    /// Returns the variant of `T` with the written spelling. `otherwise` is a placeholder after an error.
    pub(crate) fn choice<T: Choice>(&mut self, name: &str, otherwise: T) -> T {
        self.optional_choice(name).unwrap_or(otherwise)
    }

    pub(crate) fn optional_choice<T: Choice>(&mut self, name: &str) -> Option<T> {
        self.optional_text(name).and_then(|text| T::from_name(&text))
    }

    fn leaf(&mut self, name: &str) -> Leaf {
        let path = join(&self.path, name);
        let default = || schema::find(self.keys, name).map_or(Leaf::Null, default);
        let (leaf, origin) = match self.resolver.fields.values.get(&path) {
            Some(Field { leaf: Leaf::Null, auto: true, .. }) => (default(), Origin::Auto),
            Some(Field { leaf, auto: true, .. }) => (leaf.clone(), Origin::Auto),
            Some(Field { leaf, at, .. }) => (leaf.clone(), origin(*at)),
            None => (default(), Origin::Default),
        };
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
