//! Renders conversations with a Jinja chat template, with the settings and functions that transformers provides to a
//! template.
//!
//! minijinja does not know transformers' tag `{% generation %}`. The tag is replaced by a `filter` block, which has the
//! same white-space control. The filter puts marks around the text that the block renders. The marks are then removed
//! from the text, and their positions are kept.

use std::ops::Range;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::{Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, context, escape_formatter};
use minijinja_contrib::pycompat::unknown_method_callback;
use zero_engine::DataError;

use super::python_text::{text_of, to_json, trim};

/// The marks around generated text. They are noncharacters, which Unicode reserves for internal use by programs.
const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];
const NAME: &str = "chat_template";
/// Maximum number of minijinja's instructions for a conversation, so that a template whose loops never end is an error.
const MAX_INSTRUCTIONS: u64 = 20_000_000;

/// A chat template with the special tokens of its tokenizer.
pub(super) struct Template {
    environment: Environment<'static>,
    /// The file of the template, or the configuration key that holds it.
    pub(super) origin: String,
    /// The texts of the special tokens by name, such as `bos_token`.
    special_tokens: serde_json::Map<String, serde_json::Value>,
    /// Whether the template marks the text that the model generates.
    pub(super) marks_generation: bool,
    /// Whether the template uses the current date.
    pub(super) is_dated: bool,
}

/// A rendered conversation.
pub(super) struct Rendered {
    pub(super) text: String,
    /// Byte ranges of the text inside `{% generation %}`.
    pub(super) generated: Vec<Range<usize>>,
}

/// The error that a template raises with `raise_exception`.
#[derive(Debug)]
struct Raised(String);

impl std::fmt::Display for Raised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

impl Template {
    /// Parses a template. A syntax error names the line.
    pub(super) fn new(
        source: &str,
        origin: String,
        special_tokens: serde_json::Map<String, serde_json::Value>,
    ) -> Result<Self, DataError> {
        // Jinja converts every line break to `\n`.
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let rewritten = rewrite(&source);
        let mut environment = Environment::new();
        environment.set_fuel(Some(MAX_INSTRUCTIONS));
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.set_formatter(|out, state, value| match value.kind() {
            ValueKind::Bool | ValueKind::None | ValueKind::Number | ValueKind::Seq | ValueKind::Map => {
                out.write_str(&text_of(value)?).map_err(Error::from)
            }
            _ => escape_formatter(out, state, value),
        });
        environment.add_filter("string", |value: Value| text_of(&value));
        environment.add_filter("trim", trim);
        environment.add_filter("tojson", to_json);
        // In minijinja, `none` counts as iterable.
        environment.add_test("iterable", |value: Value| {
            matches!(
                value.kind(),
                ValueKind::Seq | ValueKind::Map | ValueKind::Iterable | ValueKind::String | ValueKind::Undefined
            )
        });
        environment.add_filter("generation", |body: String| format!("{}{body}{}", MARKS[0], MARKS[1]));
        environment.add_function("strftime_now", |format: String| strftime(&format, now()));
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
        });
        environment.add_template_owned(NAME, rewritten.clone()).map_err(|error| DataError::Template {
            origin: origin.clone(),
            message: reason(&error),
            help: "correct the template's syntax, or set `data.chat.chat_template` to another template".into(),
        })?;
        Ok(Self {
            environment,
            origin,
            special_tokens,
            marks_generation: rewritten != source,
            is_dated: is_dated(&source),
        })
    }

    /// Returns the text of the `eos_token`, if the tokenizer names one.
    pub(super) fn eos_token(&self) -> Option<&str> {
        self.special_tokens.get("eos_token").and_then(serde_json::Value::as_str)
    }

    /// Renders messages. The error is a message for the user: the argument of `raise_exception`, or a description of
    /// the failure with its line.
    pub(super) fn render(
        &self,
        messages: &[Value],
        tools: &Value,
        add_generation_prompt: bool,
    ) -> Result<Rendered, String> {
        let messages = Value::from(messages.to_vec());
        let context = context! {
            messages, add_generation_prompt,
            tools => tools,
            documents => Value::from(()),
            ..Value::from_serialize(&self.special_tokens)
        };
        let marked = self.environment.get_template(NAME).and_then(|template| template.render(context));
        unmark(&marked.map_err(|error| reason(&error))?)
    }
}

/// Returns whether a template uses the current date.
pub(super) fn is_dated(source: &str) -> bool {
    source.contains("strftime_now")
}

/// Returns the current day as the number of days since 1970 in UTC. Templates see the date of this day.
pub(super) fn today() -> String {
    (now() / 86_400).to_string()
}

/// Replaces only the tags `generation` and `endgeneration`, so that line numbers do not change.
fn rewrite(source: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(source.len()), source);
    while let Some(open) = rest.find("{%") {
        let (before, tag) = rest.split_at(open + 2);
        out.push_str(before);
        rest = tag;
        let inner = tag.split("%}").next().unwrap_or_default();
        let replacement = match inner.trim_matches(['-', '+']).trim() {
            "generation" => inner.replace("generation", "filter generation"),
            "endgeneration" => inner.replace("endgeneration", "endfilter"),
            _ => continue,
        };
        out.push_str(&replacement);
        rest = &tag[inner.len()..];
    }
    out + rest
}

/// Removes the marks and records their positions.
fn unmark(marked: &str) -> Result<Rendered, String> {
    let (mut text, mut generated, mut open) = (String::with_capacity(marked.len()), Vec::new(), None);
    for c in marked.chars() {
        match (MARKS.iter().position(|&mark| mark == c), open) {
            (None, _) => text.push(c),
            (Some(0), None) => open = Some(text.len()),
            (Some(1), Some(start)) => {
                generated.push(start..text.len());
                open = None;
            }
            _ => return Err("`{% generation %}` is nested, or a message contains U+FDD0 or U+FDD1".into()),
        }
    }
    Ok(Rendered { text, generated })
}

fn reason(error: &Error) -> String {
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        if let Some(Raised(message)) = inner.downcast_ref() {
            return format!("the template rejects the conversation: {message}");
        }
        source = inner.source();
    }
    let line = error.line().map_or(String::new(), |line| format!("line {line}: "));
    format!("{line}{}{}", error.kind(), error.detail().map_or(String::new(), |detail| format!(": {detail}")))
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Formats seconds since 1970 in UTC. Supports the fields of C's `strftime` that templates use.
fn strftime(format: &str, seconds: u64) -> Result<String, Error> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let (mut day, time) = (seconds / 86_400, seconds % 86_400);
    let weekday = DAYS[(day % 7) as usize];
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while day >= 365 + u64::from(is_leap(year)) {
        day -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let of_year = day + 1;
    let mut month = 0;
    for length in [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if day < length {
            break;
        }
        (day, month) = (day - length, month + 1);
    }
    let name = MONTHS[month % 12];
    let (mut out, mut rest) = (String::new(), format.chars());
    while let Some(c) = rest.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        out += &match rest.next() {
            Some('Y') => year.to_string(),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{:02}", month + 1),
            Some('B') => name.into(),
            Some('b' | 'h') => name[..3].into(),
            Some('d') => format!("{:02}", day + 1),
            Some('j') => format!("{of_year:03}"),
            Some('A') => weekday.into(),
            Some('a') => weekday[..3].into(),
            Some('H') => format!("{:02}", time / 3600),
            Some('M') => format!("{:02}", time / 60 % 60),
            Some('S') => format!("{:02}", time % 60),
            Some('F') => format!("{year}-{:02}-{:02}", month + 1, day + 1),
            Some('T') => format!("{:02}:{:02}:{:02}", time / 3600, time / 60 % 60, time % 60),
            Some('%') => "%".into(),
            other => {
                let message = format!("strftime_now does not support `%{}`", other.map_or(String::new(), String::from));
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        };
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn template(source: &str) -> Result<Template, DataError> {
        let special = json!({"bos_token": "<s>"});
        Template::new(source, "t.jinja".into(), special.as_object().unwrap().clone())
    }

    fn render(source: &str, messages: serde_json::Value) -> Result<Rendered, String> {
        let messages: Vec<Value> = messages.as_array().unwrap().iter().map(Value::from_serialize).collect();
        template(source).unwrap().render(&messages, &Value::from(()), false)
    }

    #[test]
    fn generated_text_is_found_whatever_the_white_space_around_the_tags() {
        for (source, text, generated) in [
            (
                "{% for m in messages %}\n  {% generation %}\n{{ m }}\n  {% endgeneration %}\n{% endfor %}",
                "a\nb\n",
                vec!["a\n", "b\n"],
            ),
            ("x {{- '' }}{% generation -%}  {{ messages[0] }} {%- endgeneration %} y", "xa y", vec!["a"]),
            ("{%-generation-%}a{%- endgeneration -%} b", "ab", vec!["a"]),
            ("{{ bos_token }}{# {% generation %} #}é{% generation %}é{% endgeneration %}", "<s>éé", vec!["é"]),
            ("{{ '{% generate %}' }}", "{% generate %}", vec![]),
            ("a\r\n{% generation %}\r\nb\rc{% endgeneration %}\r\n", "a\nb\nc", vec!["b\nc"]),
        ] {
            let rendered = render(source, json!(["a", "b"])).unwrap();
            let found: Vec<&str> = rendered.generated.iter().map(|range| &rendered.text[range.clone()]).collect();
            assert_eq!((rendered.text.as_str(), found), (text, generated), "{source}");
        }
    }

    #[test]
    fn values_are_printed_as_python_prints_them() {
        let value = json!([{"b": [1, 2.5, null], "a": "<é>"}]);
        let print = |source: &str| render(source, value.clone()).map(|rendered| rendered.text);
        assert_eq!(print("{{ messages[0] | tojson }}").unwrap(), r#"{"b": [1, 2.5, null], "a": "<é>"}"#);
        assert_eq!(print("{{ messages[0].b | tojson(separators=(',', ':')) }}").unwrap(), "[1,2.5,null]");
        assert_eq!(print("{{ messages[0].b | tojson(indent=2) }}").unwrap(), "[\n  1,\n  2.5,\n  null\n]");
        assert_eq!(print("{{ true }} {{ none }} {{ missing }}").unwrap(), "True None ");
        let numbers = json!([1e-7, 1e-5, 1e-4, 0.1, -0.0, 1e15, 1e16, 1.5e300, 3, u64::MAX]);
        let print_numbers = |source: &str| render(source, json!([numbers])).map(|rendered| rendered.text);
        // The numbers as Python's `json.dumps` and `str` write them.
        let expected = "1e-07, 1e-05, 0.0001, 0.1, -0.0, 1000000000000000.0, 1e+16, 1.5e+300, 3, 18446744073709551615";
        assert_eq!(print_numbers("{{ messages[0] | tojson }}").unwrap(), format!("[{expected}]"));
        let lines = format!("[\n  {}\n]", expected.replace(", ", ",\n  "));
        assert_eq!(print_numbers("{{ messages[0] | tojson(indent=2) }}").unwrap(), lines);
        let each = "{% for n in messages[0] %}{{ n }}{{ '' if loop.last else ', ' }}{% endfor %}";
        assert_eq!(print_numbers(each).unwrap(), expected);
        assert_eq!(print_numbers(&each.replace("{ n }", "{ n | string | trim }")).unwrap(), expected);
        let nested = "{{ {'a': [], 'b': {}, 'c': [[1], {'d': 2}]} | tojson(indent=1) }}";
        let expected = "{\n \"a\": [],\n \"b\": {},\n \"c\": [\n  [\n   1\n  ],\n  {\n   \"d\": 2\n  }\n ]\n}";
        assert_eq!(print(nested).unwrap(), expected);
        assert_eq!(print("{{ ' a ' | trim }}{{ '<a>' | trim('<>') }}{{ missing | trim }}").unwrap(), "aa");
        assert_eq!(print("{{ ' a-b '.strip().split('-')[-1] }}").unwrap(), "b");
        assert_eq!(print("{% for n in messages[0].b[::-1] %}{{ n }},{% endfor %}").unwrap(), "None,2.5,1,");
        assert_eq!(
            print("{{ tools is iterable }} {{ '' is iterable }} {{ messages is iterable }}").unwrap(),
            "False True True"
        );
        for source in ["{{ messages }}", "{{ messages | trim }}", "{{ messages[0] | string }}"] {
            assert!(print(source).unwrap_err().contains("use `| tojson`"), "{source}");
        }
        assert!(print("{{ messages | tojson(sort_keys=true) }}").unwrap_err().contains("sort_keys"));
    }

    #[test]
    fn errors_name_the_line_or_the_templates_own_message() {
        let syntax = template("a\n{% if %}").err().unwrap().to_string();
        assert!(syntax.starts_with("t.jinja: line 2: syntax error: "), "{syntax}");
        let raised = render("{% macro m() %}{{ raise_exception('no roles') }}{% endmacro %}\n{{ m() }}", json!([]));
        assert_eq!(raised.err().unwrap(), "the template rejects the conversation: no roles");
        assert!(render("\n{{ messages[0]['role'] }}", json!([])).err().unwrap().starts_with("line 2: undefined value"));
        assert!(render("{{ messages[0] }}", json!(["\u{fdd1}"])).err().unwrap().contains("U+FDD1"));
    }

    #[test]
    fn a_template_without_end_is_an_error() {
        let source = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}";
        assert!(render(source, json!([])).err().unwrap().contains("fuel"));
        let indented = |indent| render(&format!("{{{{ [[1]] | tojson(indent={indent}) }}}}"), json!([]));
        assert!(indented("1000000000").err().unwrap().contains("an `indent` of at most 100"));
        assert_eq!(indented("2").unwrap().text, "[\n  [\n    1\n  ]\n]");
    }

    #[test]
    fn dates_are_those_of_strftime() {
        let all = "%a %A %d %b %B %m %Y %y %j %H:%M:%S %F %T %%";
        assert_eq!(
            strftime(all, 1_709_210_096).unwrap(), // date -u -d @1709210096
            "Thu Thursday 29 Feb February 02 2024 24 060 12:34:56 2024-02-29 12:34:56 %"
        );
        assert_eq!(strftime("%F %j", 1_735_689_599).unwrap(), "2024-12-31 366");
        assert!(strftime("%Q", 0).is_err());
    }
}
