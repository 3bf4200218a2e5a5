//! `autotuning.space` and `autotuning.sweep.space`: keys of the whole file with the values to try. Every value is
//! checked against its key here, so that a search does not fail after an hour.

mod range;
mod target;

use std::collections::BTreeSet;

use crate::check::Check;
use crate::config::{Dimension, Interval};
use crate::errors::ErrorKind;
use crate::read::node::{At, Entry, Node, Value};
use crate::report::Report;
use crate::schema::{Kind, join};
use crate::value::{Field, Fields, Leaf};
use crate::write::yaml_out;

use target::Target;

/// Maximum number of values in a dimension, and maximum number of dimensions.
const MAX_VALUES: usize = 1000;
const MAX_DIMENSIONS: usize = 100;

/// A key of the space and its value.
struct Written<'n> {
    /// Path as written.
    path: String,
    key_at: At,
    node: &'n Node,
}

impl Check<'_> {
    /// Checks the space at `path` and stores its valid dimensions.
    pub(crate) fn space(&mut self, path: &str, continuous: bool, node: &Node) {
        let Value::Map(entries) = &node.value else {
            let message = format!("expected keys with the values to try, found {}", node.value.describe());
            return self.wrong(path, node, message);
        };
        let mut written = Vec::new();
        flatten("", entries, &mut written);
        if written.len() > MAX_DIMENSIONS {
            return self.wrong(
                path,
                node,
                format!("a search accepts at most {MAX_DIMENSIONS} keys, found {}", written.len()),
            );
        }
        let mut dimensions: Vec<(Dimension, At)> = Vec::new();
        for one in &written {
            let place = join(path, &one.path);
            let target = match target::find(&one.path, self.root, &written) {
                Ok(Some(target)) => target,
                Ok(None) => continue,
                Err(problem) => {
                    self.report.error(problem.kind, &place, one.key_at, problem.message, problem.help);
                    continue;
                }
            };
            let Some((values, range)) = self.values(&place, &target, continuous, one.node) else { continue };
            let dimension = Dimension { path: target.path, values, range };
            if let Some(index) = dimensions.iter().position(|(other, _)| overlap(&other.path, &dimension.path)) {
                let (other, at) = &mut dimensions[index];
                match one.key_at {
                    // Overrides take precedence over the file.
                    At::Set(_) if other.path == dimension.path => (*other, *at) = (dimension, one.node.at),
                    _ => self.overlap(&place, one.key_at, &dimension.path, &other.path.clone(), *at),
                }
                continue;
            }
            dimensions.push((dimension, one.node.at));
        }
        if dimensions.is_empty() && continuous && !self.report.has_errors() {
            self.wrong(path, node, "the space has no values to try".to_string());
        }
        let field = Field { leaf: Leaf::Space(dimensions), at: node.at, auto: false };
        self.fields.values.insert(path.to_string(), field);
    }

    fn overlap(&mut self, place: &str, key_at: At, path: &str, other: &str, at: At) {
        let line = match at {
            At::File { line, .. } => format!(" on line {line}"),
            _ => String::new(),
        };
        let message = match path == other {
            true => format!("`{path}` is given twice"),
            false => format!("`{path}` and `{other}` set the same values"),
        };
        let help = format!("`{other}` is already set{line}; keep one of the two");
        self.report.error(ErrorKind::DuplicateKey, place, key_at, message, Some(help));
    }

    /// Returns the values to try for a key, or a range. Reports invalid values and returns `None`.
    fn values(
        &mut self,
        place: &str,
        target: &Target,
        continuous: bool,
        node: &Node,
    ) -> Option<(Vec<String>, Option<Interval>)> {
        let range;
        let items = match &node.value {
            Value::List(items) => items.as_slice(),
            Value::Map(entries) if entries.iter().any(|entry| matches!(entry.key.as_str(), "low" | "high" | "log")) => {
                let interval = self.interval(place, target, continuous, entries, node)?;
                return Some((Vec::new(), Some(interval)));
            }
            Value::Map(entries) if target.kind().is_some() => match range::steps(entries, node.at, MAX_VALUES) {
                Ok(nodes) => {
                    range = nodes;
                    range.as_slice()
                }
                Err((at, message)) => return self.refuse(place, at, &message),
            },
            Value::Map(_) => {
                let message = "expected a list of sections, or values to try for a key of the section";
                return self.refuse(place, node.at, message);
            }
            _ => std::slice::from_ref(node),
        };
        match items.len() {
            0 => return self.refuse(place, node.at, "expected at least one value, found an empty list"),
            1..=MAX_VALUES => {}
            many => {
                return self.refuse(
                    place,
                    node.at,
                    &format!("a key accepts at most {MAX_VALUES} values, found {many}"),
                );
            }
        }
        let (mut values, mut seen) = (Vec::with_capacity(items.len()), BTreeSet::new());
        let mut valid = true;
        for item in items {
            valid &= self.accepts(place, target, item);
            let value = yaml_out::value(&item.value);
            if !seen.insert(value.clone()) {
                self.refuse::<()>(place, item.at, &format!("{value} is listed twice"));
                valid = false;
            }
            values.push(value);
        }
        valid.then_some((values, None))
    }

    /// Reads a range `{low, high, log}`.
    fn interval(
        &mut self,
        place: &str,
        target: &Target,
        continuous: bool,
        entries: &[Entry],
        node: &Node,
    ) -> Option<Interval> {
        if !continuous {
            let message = "only `autotuning.sweep.space` accepts continuous ranges; use a list, or \
                           `{from: 1, to: 16, times: 2}`";
            return self.refuse(place, node.at, message);
        }
        let Some(is_integer) = target.is_integer() else {
            return self.refuse(
                place,
                node.at,
                "expected a list of values: this key does not accept a continuous range",
            );
        };
        match range::interval(entries, node.at, is_integer) {
            Ok((interval, [low, high])) => {
                let (low, high) = (self.accepts(place, target, low), self.accepts(place, target, high));
                (low && high).then_some(interval)
            }
            Err((at, message)) => self.refuse(place, at, &message),
        }
    }

    /// Returns whether the key accepts the value. If the key's section may have several types, the value must be valid
    /// for at least one of these types.
    fn accepts(&mut self, place: &str, target: &Target, item: &Node) -> bool {
        let mut first = None;
        for index in 0..target.len() {
            let mut report = Report::new(crate::Source { name: String::new(), text: String::new() }, &[]);
            let mut scratch = Check { report: &mut report, fields: Fields::default(), root: &[], is_off: false };
            target.check(index, &mut scratch, place, item);
            if !report.has_errors() {
                return true;
            }
            first.get_or_insert(index);
        }
        if let Some(index) = first {
            let mut told = Check { report: self.report, fields: Fields::default(), root: &[], is_off: false };
            target.check(index, &mut told, place, item);
        }
        false
    }

    fn refuse<T>(&mut self, place: &str, at: At, message: &str) -> Option<T> {
        self.report.error(ErrorKind::Value, place, at, format!("`{place}`: {message}"), None);
        None
    }
}

/// Flattens nested sections and dotted paths into one list.
fn flatten<'n>(path: &str, entries: &'n [Entry], out: &mut Vec<Written<'n>>) {
    for entry in entries {
        let path = join(path, &entry.key);
        match &entry.value.value {
            // A null counts as missing.
            Value::Null => {}
            Value::Map(inner) if target::is_section(&path) && !inner.is_empty() => flatten(&path, inner, out),
            _ => out.push(Written { path, key_at: entry.key_at, node: &entry.value }),
        }
    }
}

/// Returns whether two paths are equal or one contains the other.
fn overlap(one: &str, other: &str) -> bool {
    let (short, long) = if one.len() <= other.len() { (one, other) } else { (other, one) };
    long.strip_prefix(short).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

impl Target {
    /// Returns whether the kind takes integers only. Returns `None` if it does not accept every number of a range.
    fn is_integer(&self) -> Option<bool> {
        match self.kind()? {
            Kind::Int { .. } | Kind::Bytes { .. } => Some(true),
            Kind::Float(_) => Some(false),
            _ => None,
        }
    }
}
