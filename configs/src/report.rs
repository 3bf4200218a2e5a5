//! Collects errors and warnings, so that all of them are reported together.

use std::collections::BTreeSet;

use crate::Source;
use crate::errors::{Error, ErrorKind, Errors, Place, Spot, Warning};
use crate::read::node::At;

/// Maximum number of errors that are listed. A file with more errors is probably the wrong file.
const MAX_LISTED: usize = 50;

/// Maximum number of characters that a message shows of a line, and how many of them may precede the error's column. A
/// JSON file is often a single line.
const MAX_LINE: usize = 160;
const MAX_BEFORE: usize = 60;

/// Errors and warnings found so far.
#[derive(Debug, Clone)]
pub(crate) struct Report {
    /// The files; at least one.
    sources: Vec<Source>,
    overrides: Vec<String>,
    /// Path of the pretrained model's `config.json`.
    pretrained: String,
    list: Vec<Error>,
    omitted: usize,
    warnings: Vec<Warning>,
    /// Paths whose value is invalid. No further errors are reported about them.
    poisoned: BTreeSet<String>,
}

impl Report {
    pub(crate) fn new(source: Source, overrides: &[String]) -> Self {
        Self::of_files(vec![source], overrides)
    }

    pub(crate) fn of_files(sources: Vec<Source>, overrides: &[String]) -> Self {
        Self {
            sources,
            overrides: overrides.to_vec(),
            pretrained: String::new(),
            list: Vec::new(),
            omitted: 0,
            warnings: Vec::new(),
            poisoned: BTreeSet::new(),
        }
    }

    /// Returns a report about the same files and overrides, without any errors or warnings.
    pub(crate) fn anew(&self) -> Self {
        Self { pretrained: self.pretrained.clone(), ..Self::of_files(self.sources.clone(), &self.overrides) }
    }

    /// Returns the first file, which gives the run its name.
    pub(crate) fn source(&self) -> &Source {
        &self.sources[0]
    }

    pub(crate) fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// Sets the path for [`At::Pretrained`].
    pub(crate) fn set_pretrained(&mut self, path: String) {
        self.pretrained = path;
    }

    pub(crate) fn override_text(&self, index: usize) -> &str {
        self.overrides.get(index).map_or("", String::as_str)
    }

    /// Reports an error about the key at `path` and marks its value as invalid.
    pub(crate) fn error(&mut self, kind: ErrorKind, path: &str, at: At, message: String, help: Option<String>) {
        self.poisoned.insert(path.to_string());
        self.add(kind, &[(path, at)], message, help);
    }

    /// Reports an error about several keys, unless one of them already has an error.
    pub(crate) fn contradiction(&mut self, places: &[(&str, At)], message: String, help: Option<String>) {
        if !places.iter().any(|(path, _)| self.is_poisoned(path)) {
            self.add(ErrorKind::Contradiction, places, message, help);
        }
    }

    pub(crate) fn warn(&mut self, path: &str, at: At, message: String) {
        if self.warnings.len() < MAX_LISTED {
            let place = self.place(path, at);
            self.warnings.push(Warning { message, place });
        }
    }

    /// Suppresses further errors about the key at `path`.
    pub(crate) fn poison(&mut self, path: String) {
        self.poisoned.insert(path);
    }

    /// Returns the errors about unknown keys at the top level of a file; DeepSpeed ignores such keys. Returns none if
    /// not all errors are listed.
    pub(crate) fn unknown_at_the_top(&self) -> impl Iterator<Item = &Error> {
        let listed = if self.omitted == 0 { &self.list[..] } else { &[] };
        listed.iter().filter(|error| is_unknown_at_the_top(error))
    }

    /// Replaces the errors of `unknown_at_the_top` by one warning that lists the keys. `nearest` returns the known key
    /// that was suggested in place of an unknown one.
    pub(crate) fn ignore_unknown_at_the_top(&mut self, nearest: impl Fn(&str) -> Option<&'static str>) {
        let found: Vec<Place> = self.unknown_at_the_top().flat_map(|error| error.places.clone()).collect();
        let Some(place) = found.first().cloned() else { return };
        self.list.retain(|error| !is_unknown_at_the_top(error));
        for place in &found {
            // The nearest known key was marked when the unknown key was reported; now it may be reported as missing.
            if let Some(near) = nearest(&place.path) {
                self.poisoned.remove(near);
            }
        }
        let names: Vec<String> = found.iter().map(|place| format!("`{}`", place.path)).collect();
        self.warnings.push(Warning { message: format!("unknown keys are ignored: {}", names.join(", ")), place });
    }

    /// Returns whether the key at `path` or a section around it already has an error.
    pub(crate) fn is_poisoned(&self, path: &str) -> bool {
        let ends = path.match_indices('.').map(|(end, _)| end).chain([path.len()]);
        ends.into_iter().any(|end| self.poisoned.contains(&path[..end]))
    }

    /// Returns whether further errors are only counted. Callers then need not compute advice for them.
    pub(crate) fn is_full(&self) -> bool {
        self.list.len() >= MAX_LISTED
    }

    pub(crate) fn has_errors(&self) -> bool {
        !self.list.is_empty()
    }

    pub(crate) fn into_warnings(self) -> Vec<Warning> {
        self.warnings
    }

    /// Returns the errors in the order of the file; those without a line come last.
    pub(crate) fn into_errors(mut self) -> Errors {
        let mut list = std::mem::take(&mut self.list);
        list.sort_by_key(|error| match error.places.first().map(|place| &place.spot) {
            Some(Spot::File { name, line, column, .. }) => {
                let file = self.sources.iter().position(|source| source.name == *name).unwrap_or(0);
                (file, *line, *column)
            }
            _ => (usize::MAX, 0, 0),
        });
        Errors { list, omitted: self.omitted }
    }

    pub(crate) fn add(&mut self, kind: ErrorKind, places: &[(&str, At)], message: String, help: Option<String>) {
        if self.is_full() {
            self.omitted += 1;
            return;
        }
        let places = places.iter().map(|(path, at)| self.place(path, *at)).collect();
        self.list.push(Error { kind, message, places, help });
    }

    fn place(&self, path: &str, at: At) -> Place {
        let spot = match at {
            At::Set(index) => Spot::Set(self.override_text(index).to_string()),
            At::Default if path.is_empty() => Spot::Whole(self.source().name.clone()),
            At::Default => Spot::Default(self.source().name.clone()),
            At::Launch(ranks) => Spot::Launch(ranks),
            At::Pretrained => Spot::Whole(self.pretrained.clone()),
            At::Program => Spot::Program,
            At::File { file, line, column, width } => spot_in_file(&self.sources[file], line, column, width),
        };
        Place { path: path.to_string(), spot }
    }
}

fn is_unknown_at_the_top(error: &Error) -> bool {
    let in_file = |place: &Place| matches!(place.spot, Spot::File { .. }) && !place.path.contains('.');
    error.kind == ErrorKind::UnknownKey && error.places.iter().all(in_file)
}

fn spot_in_file(source: &Source, line: usize, column: usize, width: usize) -> Spot {
    let mut from = 0;
    let mut text = source.excerpt(line, 0, MAX_LINE + 1);
    if text.chars().count() > MAX_LINE {
        from = column.saturating_sub(1 + MAX_BEFORE);
        text = source.excerpt(line, from, MAX_LINE);
    }
    Spot::File { name: source.name.clone(), line, column, width, text, indent: column - 1 - from }
}
