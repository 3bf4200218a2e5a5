//! Byte offsets of keys and values in a text.

use granit_parser::{Event, Parser, ScalarStyle, StructureStyle};

/// The extent of a value.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) shape: Shape,
    /// Start of the value after its anchor and tag; for a block scalar, the start of its first line.
    pub(super) start: usize,
    /// Offset after the last significant character.
    pub(super) end: usize,
}

#[derive(Debug)]
pub(super) enum Shape {
    /// A scalar that ends at its last character, or a list in brackets.
    Inline,
    /// A block scalar (`|`, `>`), or a list with dashes.
    Block,
    Alias,
    Map {
        flow: bool,
        entries: Vec<Slot>,
    },
}

/// The extent of a key and its value.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) key: String,
    pub(super) key_start: usize,
    pub(super) key_end: usize,
    /// Offset of the `:`. `{a}` has none.
    pub(super) colon: Option<usize>,
    pub(super) value: Piece,
}

impl Slot {
    /// Returns the offset after the entry.
    pub(super) fn end(&self) -> usize {
        self.value.end.max(self.colon.map_or(self.key_end, |colon| colon + 1))
    }
}

/// A collection that is not closed yet.
struct Open {
    start: usize,
    flow: bool,
    is_map: bool,
    entries: Vec<Slot>,
    key: Option<(String, usize, usize)>,
    last: usize,
}

/// Returns the layout of a text that is known to be a single YAML document. Returns `None` if it is empty or
/// contains something without a location.
pub(super) fn read(text: &str) -> Option<Piece> {
    let mut open: Vec<Open> = Vec::new();
    let mut root = None;
    for event in Parser::new_from_str(text) {
        let (event, span) = event.ok()?;
        let range = span.byte_range()?;
        let piece = match event {
            Event::Scalar(value, style, ..) => {
                if let Some(Open { is_map: true, key: key @ None, .. }) = open.last_mut() {
                    *key = Some((value.to_string(), range.start, range.end));
                    continue;
                }
                match style {
                    ScalarStyle::Literal | ScalarStyle::Folded => {
                        let end = text.get(..range.end)?.trim_end().len();
                        Piece { shape: Shape::Block, start: range.start, end }
                    }
                    _ => Piece { shape: Shape::Inline, start: range.start, end: range.end },
                }
            }
            Event::Alias(_) => Piece { shape: Shape::Alias, start: range.start, end: range.end },
            Event::SequenceStart(style, ..) | Event::MappingStart(style, ..) => {
                open.push(Open {
                    start: range.start,
                    flow: style == StructureStyle::Flow,
                    is_map: matches!(event, Event::MappingStart(..)),
                    entries: Vec::new(),
                    key: None,
                    last: range.start,
                });
                continue;
            }
            Event::SequenceEnd | Event::MappingEnd => {
                let Open { start, flow, is_map, entries, last, .. } = open.pop()?;
                let shape = match (is_map, flow) {
                    (true, flow) => Shape::Map { flow, entries },
                    (false, true) => Shape::Inline,
                    (false, false) => Shape::Block,
                };
                Piece { shape, start, end: if flow { range.end } else { last } }
            }
            _ => continue,
        };
        match open.last_mut() {
            None => root = Some(piece),
            Some(list) if !list.is_map => list.last = piece.end,
            Some(map) => {
                let (key, key_start, key_end) = map.key.take()?;
                let colon = colon(text, key_end);
                let slot = Slot { key, key_start, key_end, colon, value: piece };
                map.last = slot.end();
                map.entries.push(slot);
            }
        }
    }
    root
}

/// Returns the offset of the `:` after a key.
fn colon(text: &str, key_end: usize) -> Option<usize> {
    let rest = text.get(key_end..)?;
    let at = rest.len() - rest.trim_start().len();
    rest[at..].starts_with(':').then_some(key_end + at)
}
