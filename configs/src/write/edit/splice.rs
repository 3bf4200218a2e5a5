//! Replaces, adds or removes one key of a text.

use std::ops::Range;

use super::layout::{Piece, Shape, Slot};
use super::written::Style;

/// A text with pending changes.
pub(super) struct Splice<'t> {
    text: &'t str,
    /// Ranges to replace and their replacements, in ascending order.
    changes: Vec<(Range<usize>, String)>,
    style: Style,
}

impl<'t> Splice<'t> {
    pub(super) fn new(text: &'t str, style: Style) -> Self {
        Self { text, changes: Vec::new(), style }
    }

    /// Returns the text with all changes applied.
    pub(super) fn finish(mut self) -> Option<String> {
        self.changes.sort_by_key(|(range, _)| (range.start, range.end));
        let (mut out, mut at) = (String::new(), 0);
        for (range, new) in &self.changes {
            out.push_str(self.text.get(at..range.start)?);
            out.push_str(new);
            at = range.end;
        }
        out.push_str(self.text.get(at..)?);
        Some(out)
    }

    /// Replaces the entry's value. Preserves the rest of its line.
    pub(super) fn replace(&mut self, slot: &Slot, value: &str) {
        let Some(colon) = slot.colon else { return self.put(slot.key_end..slot.key_end, format!(": {value}")) };
        let (after, end_of_line) = (colon + 1, self.line_end(colon));
        let piece = &slot.value;
        let is_block = matches!(piece.shape, Shape::Block | Shape::Map { flow: false, .. });
        if is_block {
            // Only an anchor, a tag or the indicator of a block scalar can follow the colon on this line, and none of
            // them contains a `#`.
            let head = &self.text[after..end_of_line];
            let comment = [" #", "\t#"].iter().filter_map(|mark| head.find(mark)).min();
            let head_end = after + comment.map_or(head.len(), |at| head[..at].trim_end().len());
            self.put(after..head_end, format!(" {value}"));
            if piece.end > end_of_line {
                let last = self.line_end(piece.end);
                self.put(end_of_line..last, String::new());
            }
        } else if piece.start > end_of_line {
            self.put(piece.start..piece.end, value.to_string());
        } else {
            let inside = &self.text[after..piece.end.max(after)];
            let spaces = inside.len() - inside.trim_start().len();
            let space = if inside.trim_start().is_empty() { " " } else { &inside[..spaces] };
            self.put(after..piece.end.max(after), format!("{space}{value}"));
        }
    }

    /// Adds an entry to a section. A flow mapping gets `key: value`. A block mapping gets `lines`, which this method
    /// indents.
    pub(super) fn insert(&mut self, section: &Piece, key: &str, value: &str, lines: &[String]) -> Option<()> {
        let Shape::Map { flow, entries } = &section.shape else { return None };
        let line_break = self.line_break();
        let Some(last) = entries.last() else {
            self.put(section.start + 1..section.start + 1, format!("{key}: {value}"));
            return Some(());
        };
        let indent = self.indent(last.key_start);
        if !*flow {
            let indent = indent?;
            let mut at = self.line_end(section.end);
            // Comments with deeper indentation belong to the content of the last entry.
            while let Some((next, width)) = self.comment_line(at)
                && width > indent.len()
            {
                at = next;
            }
            let lines: String = lines.iter().map(|line| format!("{line_break}{indent}{line}")).collect();
            self.put(at..at, lines);
            return Some(());
        }
        let close = section.end - 1;
        let comma = self.comma(last.end(), close);
        let after = comma.map_or(last.end(), |comma| comma + 1);
        if comma.is_none() {
            self.put(after..after, ",".to_string());
        }
        let own_comma = if comma.is_some() { "," } else { "" };
        let line_end = self.line_end(after);
        match indent {
            Some(indent) if line_end <= close => {
                self.put(line_end..line_end, format!("{line_break}{indent}{key}: {value}{own_comma}"));
            }
            _ => self.put(after..after, format!(" {key}: {value}{own_comma}")),
        }
        Some(())
    }

    /// Removes the entry with that index from a section with several entries.
    pub(super) fn remove(&mut self, section: &Piece, index: usize) -> Option<()> {
        let Shape::Map { flow, entries } = &section.shape else { return None };
        let slot = entries.get(index)?;
        let own_line = self.indent(slot.key_start).is_some();
        if !*flow {
            if !own_line {
                return None;
            }
            let lines = self.lines(slot.key_start, slot.end());
            self.put(lines, String::new());
            return Some(());
        }
        let close = section.end - 1;
        let comma = self.comma(slot.end(), close);
        let end = comma.map_or(slot.end(), |comma| comma + 1);
        let line_end = self.line_end(end);
        let next = entries.get(index + 1).map_or(close, |slot| slot.key_start);
        if comma.is_none() {
            let before = index.checked_sub(1).and_then(|index| entries.get(index))?;
            let comma = self.comma(before.end(), slot.key_start)?;
            if own_line && line_end <= next {
                self.put(comma..comma + 1, String::new());
            } else {
                let between = &self.text[comma..slot.key_start];
                if between.contains('#') {
                    return None;
                }
                self.put(comma..end, String::new());
                return Some(());
            }
        }
        if own_line && line_end <= next {
            let lines = self.lines(slot.key_start, end);
            self.put(lines, String::new());
        } else if self.text[end..next].trim().is_empty() && index + 1 < entries.len() {
            self.put(slot.key_start..next, String::new());
        } else {
            self.put(slot.key_start..end, String::new());
        }
        Some(())
    }

    /// Appends lines to the text.
    pub(super) fn append(&mut self, lines: &[String]) {
        let line_break = self.line_break();
        let end = self.text.len();
        let mut new = String::new();
        if !self.text.is_empty() && !self.text.ends_with(['\n', '\r']) {
            new.push_str(line_break);
        }
        for line in lines {
            new.push_str(line);
            new.push_str(line_break);
        }
        self.put(end..end, new);
    }

    /// Returns the style in which the text writes values.
    pub(super) fn style(&self) -> Style {
        self.style
    }

    fn put(&mut self, range: Range<usize>, new: String) {
        self.changes.push((range, new));
    }

    fn line_break(&self) -> &'static str {
        if self.text.contains("\r\n") { "\r\n" } else { "\n" }
    }

    /// Returns the end of the line that contains `at`, without the line break.
    fn line_end(&self, at: usize) -> usize {
        self.text[at..].find(['\n', '\r']).map_or(self.text.len(), |end| at + end)
    }

    /// Returns the start of the line after the line that ends at `end`.
    fn next_line(&self, end: usize) -> usize {
        let rest = &self.text[end..];
        end + if rest.starts_with("\r\n") { 2 } else { usize::from(!rest.is_empty()) }
    }

    /// Returns the whitespace before `at` if nothing else precedes it on its line.
    fn indent(&self, at: usize) -> Option<&'t str> {
        let start = self.text[..at].rfind(['\n', '\r']).map_or(0, |end| end + 1);
        let before = &self.text[start..at];
        before.trim_start_matches([' ', '\t']).is_empty().then_some(before)
    }

    /// Returns the range of the lines that contain the offsets from `from` to `to`, with their line breaks.
    fn lines(&self, from: usize, to: usize) -> Range<usize> {
        let start = self.text[..from].rfind(['\n', '\r']).map_or(0, |end| end + 1);
        start..self.next_line(self.line_end(to))
    }

    /// Returns the offset of the first character after `from` that is not whitespace, if it is a `,`.
    fn comma(&self, from: usize, to: usize) -> Option<usize> {
        let between = self.text.get(from..to)?;
        let at = between.len() - between.trim_start().len();
        between[at..].starts_with(',').then_some(from + at)
    }

    /// If the line that ends at `end` is followed by a comment line, returns the comment's end and its indentation.
    fn comment_line(&self, end: usize) -> Option<(usize, usize)> {
        let start = self.next_line(end);
        let line = self.text.get(start..self.line_end(start))?;
        let width = line.len() - line.trim_start_matches(' ').len();
        line[width..].starts_with('#').then_some((start + line.len(), width))
    }
}
