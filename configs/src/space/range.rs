//! Parses ranges: `{from: 1, to: 16, times: 2}`, `{from: 0, to: 64, step: 16}` and
//! `{low: 1e-5, high: 1e-2, log: true}`.

use crate::config::Interval;
use crate::read::node::{At, Entry, Node, Value};

/// Location and message of an error.
type Problem = (At, String);

/// A number as written; integers stay integers.
#[derive(Clone, Copy)]
enum Number {
    Int(i128),
    Float(f64),
}

impl Number {
    fn as_f64(self) -> f64 {
        match self {
            Self::Int(number) => number as f64,
            Self::Float(number) => number,
        }
    }
}

/// Returns the values of a range, each located at `at`.
pub(super) fn steps(entries: &[Entry], at: At, most: usize) -> Result<Vec<Node>, Problem> {
    const FORM: &str = "expected a list, one value, or `{from: 1, to: 16, times: 2}` or `{from: 0, to: 64, step: 16}`";
    if let Some(entry) = entries.iter().find(|entry| !["from", "to", "times", "step"].contains(&entry.key.as_str())) {
        return Err((entry.key_at, format!("{FORM}, found `{}`", entry.key)));
    }
    let [Some(from), Some(to)] = [find(entries, "from"), find(entries, "to")] else {
        return Err((at, format!("{FORM}, found a section")));
    };
    let (by, times) = match [find(entries, "times"), find(entries, "step")] {
        [Some(times), None] => (times, true),
        [None, Some(step)] => (step, false),
        _ => return Err((at, "a range needs either `times` or `step`".to_string())),
    };
    let numbers = [number(from)?, number(to)?, number(by)?];
    let [first, last, distance] = numbers.map(Number::as_f64);
    if first > last {
        return Err((from.at, "`from` is more than `to`".to_string()));
    }
    if times && (distance <= 1.0 || first <= 0.0) {
        let at = if distance <= 1.0 { by.at } else { from.at };
        return Err((
            at,
            "a range with `times` must grow: `times` must be more than 1 and `from` more than 0".to_string(),
        ));
    }
    if !times && distance <= 0.0 {
        return Err((by.at, "`step` must be more than 0".to_string()));
    }
    let values = match numbers {
        [Number::Int(first), Number::Int(last), Number::Int(by)] => whole(first, last, by, times, most),
        _ => fractions(first, last, distance, times, most),
    };
    let too_many = (at, format!("a key accepts at most {most} values, but this range has more"));
    let values = values.ok_or(too_many)?;
    Ok(values.into_iter().map(|value| Node { value, at }).collect())
}

/// Returns the integers of a range, or `None` if there are more than `most`.
fn whole(first: i128, last: i128, by: i128, times: bool, most: usize) -> Option<Vec<Value>> {
    let mut values = Vec::new();
    let mut next = Some(first);
    while let Some(value) = next.filter(|value| *value <= last) {
        if values.len() == most {
            return None;
        }
        values.push(Value::Int(value));
        next = if times { value.checked_mul(by) } else { value.checked_add(by) };
    }
    Some(values)
}

/// Returns the floats of a range. Drops the last digits, which are rounding errors: 0.1 + 2 · 0.1 becomes 0.3. The
/// range therefore includes its end.
fn fractions(first: f64, last: f64, by: f64, times: bool, most: usize) -> Option<Vec<Value>> {
    let mut values: Vec<Value> = Vec::new();
    let mut before = f64::NEG_INFINITY;
    for index in 0.. {
        let exact = if times { first * by.powi(index) } else { first + f64::from(index) * by };
        let value = format!("{exact:.13e}").parse().unwrap_or(exact);
        // A step too small to change the value would loop forever.
        if value > last || value <= before {
            break;
        }
        if values.len() == most {
            return None;
        }
        before = value;
        values.push(Value::Float(value));
    }
    Some(values)
}

/// Reads a range between two numbers. Returns the range and the nodes of both numbers.
pub(super) fn interval(entries: &[Entry], at: At, is_integer: bool) -> Result<(Interval, [&Node; 2]), Problem> {
    const FORM: &str = "a continuous range is `{low: 1e-5, high: 1e-2}`, with `log: true` for a logarithmic scale";
    if let Some(entry) = entries.iter().find(|entry| !["low", "high", "log"].contains(&entry.key.as_str())) {
        return Err((entry.key_at, format!("{FORM}; found `{}`", entry.key)));
    }
    let [Some(from), Some(to)] = [find(entries, "low"), find(entries, "high")] else {
        return Err((at, FORM.to_string()));
    };
    let log = match find(entries, "log") {
        None => false,
        Some(Node { value: Value::Bool(log), .. }) => *log,
        Some(node) => return Err((node.at, format!("`log`: expected true or false, found {}", node.value.describe()))),
    };
    let (low, high) = (number(from)?.as_f64(), number(to)?.as_f64());
    if low >= high {
        return Err((from.at, "`low` is not less than `high`".to_string()));
    }
    if log && low <= 0.0 {
        return Err((from.at, "with `log: true`, `low` must be more than 0".to_string()));
    }
    Ok((Interval { low, high, log, is_integer }, [from, to]))
}

fn find<'n>(entries: &'n [Entry], name: &str) -> Option<&'n Node> {
    entries.iter().find(|entry| entry.key == name).map(|entry| &entry.value).filter(|node| node.value != Value::Null)
}

fn number(node: &Node) -> Result<Number, Problem> {
    match node.value {
        Value::Int(number) => Ok(Number::Int(number)),
        Value::Float(number) if number.is_finite() => Ok(Number::Float(number)),
        _ => Err((node.at, format!("expected a number, found {}", node.value.describe()))),
    }
}
