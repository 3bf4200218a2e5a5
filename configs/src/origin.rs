//! The origin of each resolved value.

use std::collections::BTreeMap;
use std::fmt;

/// The origin of a resolved value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// A line of the file, counted from 1.
    Line(usize),
    /// A line of a further file. Files and lines are counted from 1, so the second file is 2.
    LineOf {
        /// Index of the file.
        file: usize,
        /// Line in the file.
        line: usize,
    },
    /// `--set` on the command line.
    Set,
    /// The default; the key is not written.
    Default,
    /// Written as `auto`, or computed from other keys.
    Auto,
    /// The number of started ranks.
    Launch,
    /// The folder of the pretrained model.
    Pretrained,
    /// Set by the program: with [`Builder`](crate::Builder), or in a field after the configuration was read.
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

/// The origin of each resolved value, and the value at the time of resolution. The fields of a
/// [`Config`](crate::Config) are public, so a program may change a value later. The origin of a changed value is the
/// program, not "line 12".
#[derive(Debug, Clone, Default)]
pub struct Origins {
    resolved: BTreeMap<String, (Origin, Option<String>)>,
}

impl Origins {
    /// Returns the origin of the key at `path` (`zero_optimization.stage`), or the default if the key is not
    /// written.
    pub fn get(&self, path: &str) -> Origin {
        self.resolved.get(path).map_or(Origin::Default, |(origin, _)| *origin)
    }

    /// Returns whether a file, `--set` or the program sets the key at `path`.
    pub fn is_written(&self, path: &str) -> bool {
        matches!(self.get(path), Origin::Line(_) | Origin::LineOf { .. } | Origin::Set | Origin::Program)
    }

    /// Returns the origin of the key at `path`, whose current value is `value`.
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

    /// Stores the resolved values for later comparison.
    pub(crate) fn seal(&mut self, leaves: Vec<(String, String)>) {
        for (path, value) in leaves {
            self.resolved.entry(path).or_insert((Origin::Default, None)).1 = Some(value);
        }
    }
}
