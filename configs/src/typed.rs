//! First phase: what was written, checked value by value, each with its place. Defaults and `auto` come in the second.

use crate::check::{self, Fields};
use crate::errors::{ErrorKind, Errors};
use crate::overrides;
use crate::parse;
use crate::pretrained;
use crate::report::Report;
use crate::source::{MAX_BYTES, Source, too_large};
use crate::value::Leaf;

/// A configuration as typed.
///
/// It also holds what is wrong with single keys and values: [`resolve`](Self::resolve) tells that together with what is
/// wrong between them, so that a user sees everything at once.
#[derive(Debug, Clone)]
pub struct Typed {
    pub(crate) report: Report,
    pub(crate) fields: Fields,
}

/// Reads YAML or JSON, with the `config.json` of the folder that `model.pretrained` names, and applies `path.to.key=value` overrides whose values are YAML; an empty value unsets the key.
///
/// # Errors
/// Only what keeps the text from being read: not YAML, too large, too deep, an alias that explodes, no keys at all. Everything
/// else is kept for [`Typed::resolve`].
pub fn load(source: Source, overrides: &[String]) -> Result<Typed, Errors> {
    load_files(vec![source], overrides)
}

/// As [`load`], of several files: what a further one says stands over what those before it say, key by key. The first gives
/// the configuration its name.
///
/// # Errors
/// As [`load`], and when there is no file.
pub fn load_files(sources: Vec<Source>, overrides: &[String]) -> Result<Typed, Errors> {
    if sources.is_empty() {
        return Err(Errors::one(ErrorKind::Missing, "there is no configuration".to_string(), vec![], None));
    }
    if let Some(source) = sources.iter().find(|source| source.text.len() > MAX_BYTES) {
        return Err(too_large(source.name.clone()));
    }
    let count = sources.len();
    let mut report = Report::of_files(sources, overrides);
    let Some(mut root) = parse::file(0, &mut report) else { return Err(report.into_errors()) };
    for file in 1..count {
        let Some(further) = parse::file(file, &mut report) else { return Err(report.into_errors()) };
        overrides::merge(&mut root, further);
    }
    overrides::apply(&mut root, overrides, &mut report);
    pretrained::apply(&mut root, &mut report);
    match check::check(&root, &mut report) {
        Some(fields) => Ok(Typed { report, fields }),
        None => Err(report.into_errors()),
    }
}

impl Typed {
    /// `launcher.num_processes`, when it was written.
    pub fn num_processes(&self) -> Option<usize> {
        match self.fields.values.get("launcher.num_processes")?.leaf {
            Leaf::Int(number) => usize::try_from(number).ok(),
            _ => None,
        }
    }

    /// The keys at the top of the files that are unknown, which are errors; none where there are more errors than are listed.
    pub fn unknown_keys(&self) -> Vec<&str> {
        self.report.unknown_at_the_top().flat_map(|error| &error.places).map(|place| place.path.as_str()).collect()
    }

    /// The same where these keys are one warning that lists them: DeepSpeed ignores them too.
    #[must_use]
    pub fn ignore_unknown_keys(mut self) -> Self {
        self.report.ignore_unknown_at_the_top();
        self
    }

    /// Name of the file.
    pub fn name(&self) -> &str {
        &self.report.source().name
    }
}
