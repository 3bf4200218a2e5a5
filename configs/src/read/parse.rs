//! Parses YAML (and therefore JSON) into [`Node`]s, with limits on everything that grows with the input.
//!
//! granit-parser is the event parser underneath serde-saphyr. It reports each event with its location, and bounds
//! nesting and look-ahead itself. The tree is built here and not by serde, because serde's deserializers stop at
//! the first error and drop the locations of keys.

use std::collections::{HashMap, HashSet};

use granit_parser::{ErrorKind as Kind, Event, Parser, ScalarStyle, ScanError, Span, Tag, options};

use crate::errors::ErrorKind;
use crate::read::node::{At, Entry, Node, Value};
use crate::read::scalar;
use crate::report::Report;

/// Maximum nesting depth. The schema's deepest key is at depth 7.
const MAX_DEPTH: usize = 64;

/// Maximum number of values and keys, including those repeated by aliases. Lists of files are the only long part of
/// a configuration.
const MAX_NODES: usize = 20_000;

/// Parses the file with that index. Returns `None` and reports an error if the syntax is wrong, or if the file is
/// neither empty nor a mapping: an override or another file would silently replace such a value.
pub(crate) fn file(file: usize, report: &mut Report) -> Option<Node> {
    let text = report.sources()[file].text.clone();
    let body = text.strip_prefix('\u{feff}').unwrap_or(&text);
    match tree(body, Input::File(file), report) {
        Ok(node) if matches!(node.value, Value::Map(_) | Value::Null) => Some(node),
        Ok(node) => {
            let found = node.value.describe();
            let message = format!("the file must consist of keys with values (`key: value`), found {found}");
            report.error(ErrorKind::Value, "", node.at, message, None);
            None
        }
        Err(problem) => {
            let at = problem.at.unwrap_or(At::File { file, line: 1, column: 1, width: 1 });
            report.error(ErrorKind::Syntax, "", at, problem.message, problem.help);
            None
        }
    }
}

/// Parses the value of an override. All nodes are located at that override. The error is a message and advice.
pub(crate) fn override_value(text: &str, index: usize, report: &mut Report) -> Result<Node, (String, Option<String>)> {
    // An override has no anchors for an alias to refer to, so a leading `*` is a glob.
    if text.starts_with('*') {
        return Ok(Node { value: Value::Text(text.to_string()), at: At::Set(index) });
    }
    tree(text, Input::Set(index), report).map_err(|problem| (problem.message, problem.help))
}

/// Parses YAML that is not a configuration, such as the front matter of a page. Returns `None` if it is not YAML.
pub fn yaml(text: &str) -> Option<serde_json::Value> {
    constant(text).map(|node| node.value.to_json())
}

/// Parses a value from the schema.
pub(crate) fn constant(text: &str) -> Option<Node> {
    let mut report = Report::new(crate::Source { name: String::new(), text: String::new() }, &[]);
    tree(text, Input::Set(0), &mut report).ok()
}

struct Problem {
    at: Option<At>,
    message: String,
    help: Option<String>,
}

/// A key whose value has not been parsed yet.
struct Key {
    name: String,
    at: At,
    first: bool,
}

/// A collection that is not closed yet.
enum Open {
    List { items: Vec<Node>, at: At, anchor: usize },
    Map { entries: Vec<Entry>, keys: HashSet<String>, key: Option<Key>, at: At, anchor: usize },
}

/// The source of the text.
#[derive(Debug, Clone, Copy)]
enum Input {
    /// The file with that index.
    File(usize),
    /// The override with that index.
    Set(usize),
}

struct Builder<'r> {
    report: &'r mut Report,
    input: Input,
    open: Vec<Open>,
    /// The node that each anchor names, and the number of nodes in it.
    anchors: HashMap<usize, (Node, usize)>,
    nodes: usize,
    documents: usize,
    root: Option<Node>,
}

fn tree(text: &str, input: Input, report: &mut Report) -> Result<Node, Problem> {
    let options = options! {
        flow_nesting_limit: MAX_DEPTH,
        block_nesting_limit: MAX_DEPTH,
        disallow_directives: true,
    };
    let mut builder =
        Builder { report, input, open: Vec::new(), anchors: HashMap::new(), nodes: 0, documents: 0, root: None };
    for event in Parser::new_from_str_with_options(text, options) {
        let (event, span) = match event {
            Ok(event) => event,
            Err(error) => return Err(builder.syntax(&error)),
        };
        builder.event(event, span)?;
    }
    let file = if let Input::File(file) = input { file } else { 0 };
    Ok(builder.root.unwrap_or(Node { value: Value::Null, at: At::File { file, line: 1, column: 1, width: 1 } }))
}

impl Builder<'_> {
    fn event(&mut self, event: Event<'_>, span: Span) -> Result<(), Problem> {
        let at = self.at(span);
        match event {
            Event::DocumentStart(..) => {
                self.documents += 1;
                if self.documents > 1 {
                    return Err(self.problem(at, "a second document starts here; a configuration is one document"));
                }
            }
            Event::Scalar(text, style, anchor, tag) => {
                let value = self.scalar(&text, style, tag.as_deref(), at)?;
                if let Some(Open::Map { key: key @ None, keys, .. }) = self.open.last_mut() {
                    let first = keys.insert(text.to_string());
                    *key = Some(Key { name: text.to_string(), at, first });
                    self.count(1, at)?;
                    if !first {
                        self.duplicate(&text, at);
                    }
                    if anchor > 0 {
                        self.anchors.insert(anchor, (Node { value, at }, 1));
                    }
                } else {
                    self.node(Node { value, at }, anchor, 1)?;
                }
            }
            Event::SequenceStart(_, anchor, tag) => {
                self.no_tag(tag.as_deref(), at)?;
                self.open_collection(Open::List { items: Vec::new(), at, anchor }, at)?;
            }
            Event::MappingStart(_, anchor, tag) => {
                self.no_tag(tag.as_deref(), at)?;
                let map = Open::Map { entries: Vec::new(), keys: HashSet::new(), key: None, at, anchor };
                self.open_collection(map, at)?;
            }
            Event::SequenceEnd | Event::MappingEnd => {
                let (value, at, anchor) = match self.open.pop() {
                    Some(Open::List { items, at, anchor }) => (Value::List(items), at, anchor),
                    Some(Open::Map { entries, at, anchor, .. }) => (Value::Map(entries), at, anchor),
                    None => return Err(self.problem(at, "the list or section that ends here has no beginning")),
                };
                self.node(Node { value, at }, anchor, 1)?;
            }
            Event::Alias(id) => {
                let Some((node, count)) = self.anchors.get(&id).cloned() else {
                    return Err(self.problem(at, "this alias is inside the value that it refers to"));
                };
                if let (Some(Open::Map { key: None, .. }), Value::Text(text)) = (self.open.last(), &node.value) {
                    return Err(self.problem(at, &format!("write the key `{text}` itself, not an alias")));
                }
                self.node(node, 0, count)?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Opens a collection. A collection as a key is an error.
    fn open_collection(&mut self, collection: Open, at: At) -> Result<(), Problem> {
        if matches!(self.open.last(), Some(Open::Map { key: None, .. })) {
            return Err(self.problem(at, "a key must be a string, not a list or a section"));
        }
        if self.open.len() >= MAX_DEPTH {
            return Err(self.problem(at, &format!("more than {MAX_DEPTH} levels of nesting")));
        }
        self.open.push(collection);
        Ok(())
    }

    /// Adds a complete node of `count` nodes to the open collection.
    fn node(&mut self, node: Node, anchor: usize, count: usize) -> Result<(), Problem> {
        self.count(count, node.at)?;
        if anchor > 0 {
            let all = node.count();
            self.count(all, node.at)?;
            self.anchors.insert(anchor, (node.clone(), all));
        }
        match self.open.last_mut() {
            None => self.root = Some(node),
            Some(Open::List { items, .. }) => items.push(node),
            Some(Open::Map { entries, key, .. }) => match key.take() {
                Some(Key { name, at, first: true }) => entries.push(Entry { key: name, key_at: at, value: node }),
                Some(_) => {}
                None => return Err(self.problem(node.at, "a key must be a string, not a list or a section")),
            },
        }
        Ok(())
    }

    fn scalar(&self, text: &str, style: ScalarStyle, tag: Option<&Tag>, at: At) -> Result<Value, Problem> {
        let is_text = tag.is_some_and(|tag| tag.is_yaml_core_schema_tag("str"));
        if !is_text {
            self.no_tag(tag, at)?;
        }
        Ok(match style {
            ScalarStyle::Plain if !is_text => scalar::plain(text),
            _ => Value::Text(text.to_string()),
        })
    }

    fn no_tag(&self, tag: Option<&Tag>, at: At) -> Result<(), Problem> {
        match tag {
            Some(tag) => {
                Err(self.problem(at, &format!("the tag `{}` has no meaning in a configuration", tag.original())))
            }
            None => Ok(()),
        }
    }

    fn count(&mut self, more: usize, at: At) -> Result<(), Problem> {
        self.nodes += more;
        match self.nodes > MAX_NODES {
            true => Err(self.problem(at, &format!("more than {MAX_NODES} values after aliases are expanded"))),
            false => Ok(()),
        }
    }

    /// Returns the path of the innermost open collection.
    fn path(&self) -> String {
        let keys = self.open.iter().filter_map(|open| match open {
            Open::Map { key: Some(key), .. } => Some(key.name.as_str()),
            _ => None,
        });
        keys.collect::<Vec<_>>().join(".")
    }

    fn duplicate(&mut self, key: &str, at: At) {
        let path = self.path();
        let first = match self.open.last() {
            Some(Open::Map { entries, .. }) if !self.report.is_full() => {
                entries.iter().find(|entry| entry.key == key).map(|entry| entry.key_at)
            }
            _ => None,
        };
        let help = match first {
            Some(At::File { line, .. }) => format!("it is already on line {line}; keep one of the two"),
            _ => "keep one of the two".to_string(),
        };
        self.report.error(ErrorKind::DuplicateKey, &path, at, format!("`{path}` is written twice"), Some(help));
    }

    fn at(&self, span: Span) -> At {
        match self.input {
            Input::Set(index) => At::Set(index),
            Input::File(file) => {
                let one_line = span.start.line() == span.end.line();
                let width = if one_line { span.end.col().saturating_sub(span.start.col()) } else { 0 };
                At::File { file, line: span.start.line(), column: span.start.col() + 1, width: width.max(1) }
            }
        }
    }

    fn problem(&self, at: At, message: &str) -> Problem {
        Problem { at: Some(at), message: message.to_string(), help: None }
    }

    fn syntax(&self, error: &ScanError) -> Problem {
        let marker = *error.marker();
        let at = self.at(Span::new(marker, marker));
        let message = match error.kind() {
            Kind::RecursionLimitExceeded => format!("more than {MAX_DEPTH} levels of nesting"),
            kind => format!("not YAML: {kind}"),
        };
        // For a tab, the parser's message only tells what token it expected next, so add advice.
        let tab = match self.input {
            Input::File(file) => self.report.sources()[file].excerpt(marker.line(), 0, 1) == "\t",
            Input::Set(_) => false,
        };
        let help = match error.kind() {
            Kind::UnknownAnchor => Some("a `*` at the beginning is an alias in YAML; put a glob in quotes".to_string()),
            _ => tab.then(|| "indent with spaces, not with tabs".to_string()),
        };
        Problem { at: Some(at), message, help }
    }
}
