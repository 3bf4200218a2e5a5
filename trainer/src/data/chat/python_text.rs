//! The string representations of values in Python, as a chat template prints them in transformers.

use std::io::{self, Write};

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

/// Returns the text of a value as Python's `str` does.
///
/// # Errors
/// Fails for a list or a map. For example, the content of a message may be a list of parts where the template expects a
/// text.
pub(super) fn text_of(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::Bool => Ok(if value.is_true() { "True" } else { "False" }.into()),
        ValueKind::None => Ok("None".into()),
        ValueKind::Number if !value.is_integer() => Ok(float(f64::try_from(value.clone())?)),
        kind @ (ValueKind::Seq | ValueKind::Map) => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!(
                "the template prints a {kind}, whose string representation is defined only in Python; use `| tojson`"
            ),
        )),
        _ => Ok(value.to_string()),
    }
}

/// Implements the filter `trim`. Unlike minijinja's own filter, it rejects lists and maps.
pub(super) fn trim(value: &Value, characters: Option<String>) -> Result<String, Error> {
    let text = text_of(value)?;
    Ok(match characters {
        Some(characters) => text.trim_matches(|c| characters.contains(c)).into(),
        None => text.trim().into(),
    })
}

/// Returns the text of a number as Python's `repr` does: with an exponent below 10⁻⁴ and from 10¹⁶ on.
fn float(number: f64) -> String {
    let text = format!("{number:e}");
    match text.split_once('e').and_then(|(digits, exponent)| Some((digits, exponent.parse::<i32>().ok()?))) {
        Some((digits, exponent)) if !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => format!("{number:?}"),
    }
}

/// Maximum number of spaces per level of `tojson`.
const MAX_INDENT: usize = 100;

/// Implements the filter `tojson` with the arguments of transformers' filter. It writes the JSON of Python's
/// `json.dumps`, without HTML escapes.
pub(super) fn to_json(value: &Value, arguments: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = arguments.get("indent")?;
    let separators: Option<Vec<String>> = arguments.get("separators")?;
    for name in ["ensure_ascii", "sort_keys"] {
        if arguments.get::<Option<bool>>(name)? == Some(true) {
            let message = format!("tojson does not support `{name}=true`");
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
    }
    arguments.assert_all_used()?;
    if indent > Some(MAX_INDENT) {
        let message = format!("tojson supports an `indent` of at most {MAX_INDENT}");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    if value.is_undefined() {
        return Err(Error::new(ErrorKind::UndefinedError, "tojson cannot serialize a missing value"));
    }
    let (item, key) = match (indent, separators.as_deref()) {
        (Some(_), None) => (",", ": "),
        (None, None) => (", ", ": "),
        (None, Some([item, key])) => (&**item, &**key),
        _ => {
            let message = "tojson accepts `indent`, or `separators` with two strings";
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
    };
    let mut out = Vec::new();
    let format = Json { item, key, indent, depth: 0, is_empty: true };
    value
        .serialize(&mut Serializer::with_formatter(&mut out, format))
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    String::from_utf8(out).map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))
}

/// Formats JSON with these separators and Python's numbers, on one line or with an indent.
struct Json<'a> {
    item: &'a str,
    key: &'a str,
    indent: Option<usize>,
    /// Number of open lists and objects.
    depth: usize,
    /// Whether the innermost open list or object has no items so far.
    is_empty: bool,
}

impl Json<'_> {
    fn open<W: ?Sized + Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.is_empty = true;
        out.write_all(bracket)
    }

    fn next<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.is_empty = false;
        if !first {
            out.write_all(self.item.as_bytes())?;
        }
        self.line(out)
    }

    fn close<W: ?Sized + Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if !self.is_empty {
            self.line(out)?;
        }
        self.is_empty = false;
        out.write_all(bracket)
    }

    fn line<W: ?Sized + Write>(&self, out: &mut W) -> io::Result<()> {
        match self.indent {
            Some(indent) => write!(out, "\n{}", " ".repeat(indent * self.depth)),
            None => Ok(()),
        }
    }
}

impl Formatter for Json<'_> {
    fn write_f64<W: ?Sized + Write>(&mut self, out: &mut W, value: f64) -> io::Result<()> {
        out.write_all(float(value).as_bytes())
    }

    fn begin_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.next(out, first)
    }

    fn begin_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.next(out, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.key.as_bytes())
    }
}
