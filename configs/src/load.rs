//! First phase: parses the files, applies overrides, and checks each value. The second phase fills in defaults and
//! `auto`.

use crate::check::{advice, check};
use crate::config::{Config, Launcher};
use crate::errors::{ErrorKind, Errors};
use crate::pretrained;
use crate::read::node::{At, Node, Value};
use crate::read::overrides;
use crate::read::parse;
use crate::read::source::{MAX_BYTES, Source, too_large};
use crate::report::Report;
use crate::typed::Typed;
use crate::value::Leaf;

/// Parses YAML or JSON and applies `path.to.key=value` overrides, whose values are YAML; an empty value unsets the
/// key. Also reads the `config.json` in the folder that `model.pretrained` names.
///
/// # Errors
/// Only errors that prevent parsing: the text is not YAML, too large, too deeply nested, expands through aliases
/// beyond the limit, or has no keys. [`Typed::resolve`] reports all other errors.
pub fn load(source: Source, overrides: &[String]) -> Result<Typed, Errors> {
    load_files(vec![source], overrides)
}

/// Like [`load`], for several files. Later files override earlier ones key by key. The first file gives the
/// configuration its name.
///
/// # Errors
/// Those of [`load`], and an error if the list of files is empty.
pub fn load_files(sources: Vec<Source>, overrides: &[String]) -> Result<Typed, Errors> {
    if sources.is_empty() {
        return Err(Errors::one(ErrorKind::Missing, "there is no configuration".to_string(), vec![], None));
    }
    if let Some(source) = sources.iter().find(|source| source.text.len() > MAX_BYTES) {
        return Err(too_large(source.name.clone()));
    }
    let count = sources.len();
    let mut report = Report::of_files(sources, overrides);
    let mut root = Node { value: Value::Null, at: At::Default };
    for file in 0..count {
        let Some(further) = parse::file(file, &mut report) else { return Err(report.into_errors()) };
        overrides::merge(&mut root, further);
    }
    overrides::apply(&mut root, overrides, &mut report);
    Typed::of_tree(root, report)
}

impl Typed {
    /// Checks the values of a tree, and reads the `config.json` in the folder that `model.pretrained` names.
    pub(crate) fn of_tree(mut root: Node, mut report: Report) -> Result<Self, Errors> {
        pretrained::apply(&mut root, &mut report);
        match check(&root, &mut report) {
            Some(fields) => Ok(Self { report, fields, root, ignores_unknown_keys: false, ranks_per_host: None }),
            None => Err(report.into_errors()),
        }
    }

    /// Returns the same configuration with these values at these paths.
    pub(crate) fn with(&self, values: &[(String, Node)]) -> Result<Self, Errors> {
        let mut root = self.root.clone();
        for (path, value) in values {
            overrides::set(&mut root, &path.split('.').collect::<Vec<_>>(), value.clone());
        }
        let typed = Self { ranks_per_host: self.ranks_per_host, ..Self::of_tree(root, self.report.anew())? };
        Ok(if self.ignores_unknown_keys { typed.ignore_unknown_keys() } else { typed })
    }

    /// Returns `launcher.num_processes` if it is written.
    pub fn num_processes(&self) -> Option<usize> {
        match self.fields.values.get(Launcher::num_processes)?.leaf {
            Leaf::Int(number) => usize::try_from(number).ok(),
            _ => None,
        }
    }

    /// Replaces the errors about unknown keys at the top of the files by one warning that lists the keys. DeepSpeed
    /// ignores such keys.
    #[must_use]
    pub fn ignore_unknown_keys(mut self) -> Self {
        self.report.ignore_unknown_at_the_top(|key| advice::unknown_key("", key, &[Config::SECTION.keys], &[]).0);
        self.ignores_unknown_keys = true;
        self
    }
}
