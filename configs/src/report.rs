//! Collects what is wrong, so that it can be told in one go.

use std::collections::BTreeSet;

use crate::Source;
use crate::errors::{Error, ErrorKind, Errors, Place, Spot, Warning};
use crate::nearest;
use crate::node::At;
use crate::schema::TOP;

/// Most errors that are listed: a file with more of them is the wrong file.
const MAX_LISTED: usize = 50;

/// Characters shown of a line, and before the place in it: JSON is often one line.
const MAX_LINE: usize = 160;
const MAX_BEFORE: usize = 60;

/// What was found so far.
#[derive(Debug, Clone)]
pub(crate) struct Report {
    /// The files; one at least.
    sources: Vec<Source>,
    overrides: Vec<String>,
    /// Path of the pretrained model's `config.json`.
    pretrained: String,
    list: Vec<Error>,
    omitted: usize,
    warnings: Vec<Warning>,
    /// Paths whose value is known to be wrong, so that nothing else is said of them.
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

    /// The first file, which a run is named after.
    pub(crate) fn source(&self) -> &Source {
        &self.sources[0]
    }

    pub(crate) fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// Where [`At::Pretrained`] is.
    pub(crate) fn set_pretrained(&mut self, path: String) {
        self.pretrained = path;
    }

    pub(crate) fn override_text(&self, index: usize) -> &str {
        self.overrides.get(index).map_or("", String::as_str)
    }

    /// Adds an error about the key at `path`, and remembers that its value is wrong.
    pub(crate) fn error(&mut self, kind: ErrorKind, path: &str, at: At, message: String, help: Option<String>) {
        self.poisoned.insert(path.to_string());
        self.add(kind, &[(path, at)], message, help);
    }

    /// Adds an error about several keys, unless one of them is already known to be wrong.
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

    /// Says nothing more about the key at `path`.
    pub(crate) fn poison(&mut self, path: String) {
        self.poisoned.insert(path);
    }

    /// The errors about unknown keys at the top of a file, which is what DeepSpeed ignores; none where not all errors are listed.
    pub(crate) fn unknown_at_the_top(&self) -> impl Iterator<Item = &Error> {
        let listed = if self.omitted == 0 { &self.list[..] } else { &[] };
        listed.iter().filter(|error| is_unknown_at_the_top(error))
    }

    /// Turns these errors into one warning that lists the keys.
    pub(crate) fn ignore_unknown_at_the_top(&mut self) {
        let found: Vec<Place> = self.unknown_at_the_top().flat_map(|error| error.places.clone()).collect();
        let Some(place) = found.first().cloned() else { return };
        self.list.retain(|error| !is_unknown_at_the_top(error));
        for place in &found {
            // That the key nearest to it is missing may be told now.
            if let (Some(near), _) = nearest::unknown_key("", &place.path, &[TOP.keys], &[]) {
                self.poisoned.remove(near);
            }
        }
        let names: Vec<String> = found.iter().map(|place| format!("`{}`", place.path)).collect();
        self.warnings.push(Warning { message: format!("unknown keys are ignored: {}", names.join(", ")), place });
    }

    /// Whether the key at `path`, or a section around it, is known to be wrong.
    pub(crate) fn is_poisoned(&self, path: &str) -> bool {
        let ends = path.match_indices('.').map(|(end, _)| end).chain([path.len()]);
        ends.into_iter().any(|end| self.poisoned.contains(&path[..end]))
    }

    /// Whether further errors are only counted, so that looking for advice would be in vain.
    pub(crate) fn is_full(&self) -> bool {
        self.list.len() >= MAX_LISTED
    }

    pub(crate) fn has_errors(&self) -> bool {
        !self.list.is_empty()
    }

    pub(crate) fn into_warnings(self) -> Vec<Warning> {
        self.warnings
    }

    /// The errors in the order of the file; what has no line comes last.
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
