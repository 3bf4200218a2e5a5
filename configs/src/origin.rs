//! Where a resolved value comes from.

use std::collections::BTreeMap;
use std::fmt;

/// Where a resolved value comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// A line of the file, counted from 1.
    Line(usize),
    /// A line of a further file, both counted from 1: the second file is 2.
    LineOf {
        /// Which of the files.
        file: usize,
        /// Line in it.
        line: usize,
    },
    /// `--set` on the command line.
    Set,
    /// Written nowhere: the default.
    Default,
    /// Written as `auto`, or computed from other keys.
    Auto,
    /// The number of ranks that were started.
    Launch,
    /// The folder of the pretrained model.
    Pretrained,
    /// Changed by the program after the configuration was read.
    Program,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(line) => write!(f, "line {line}"),
            Self::LineOf { file, line } => write!(f, "line {line} of file {file}"),
            Self::Set => f.write_str("--set"),
            Self::Default => f.write_str("default"),
            Self::Auto => f.write_str("auto"),
            Self::Launch => f.write_str("ranks started"),
            Self::Pretrained => f.write_str("pretrained"),
            Self::Program => f.write_str("program"),
        }
    }
}

/// The origin of each resolved value, and the value as it was resolved: the fields of a [`Config`](crate::Config) are public, and
/// a comment must not say "line 12" of a value that the program changed since.
#[derive(Debug, Clone, Default)]
pub struct Origins {
    resolved: BTreeMap<String, (Origin, Option<String>)>,
}

impl Origins {
    /// Origin of the key at `path` (`zero_optimization.stage`); the default when it was written nowhere.
    pub fn get(&self, path: &str) -> Origin {
        self.resolved.get(path).map_or(Origin::Default, |(origin, _)| *origin)
    }

    /// Whether a file or `--set` has the key at `path`.
    pub fn is_written(&self, path: &str) -> bool {
        matches!(self.get(path), Origin::Line(_) | Origin::LineOf { .. } | Origin::Set)
    }

    /// Origin of the key at `path` that now has this `value`.
    pub(crate) fn of_value(&self, path: &str, value: &str) -> Origin {
        match self.resolved.get(path) {
            Some((_, Some(before))) if before != value => Origin::Program,
            Some((origin, _)) => *origin,
            None => Origin::Default,
        }
    }

    pub(crate) fn record(&mut self, path: String, origin: Origin) {
        self.resolved.insert(path, (origin, None));
    }

    /// Remembers the values as they were resolved.
    pub(crate) fn seal(&mut self, leaves: Vec<(String, String)>) {
        for (path, value) in leaves {
            self.resolved.entry(path).or_insert((Origin::Default, None)).1 = Some(value);
        }
    }
}
