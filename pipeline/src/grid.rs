//! Draws a timeline as text: one row per stage, one column per time slot.
//!
//! ```text
//! seconds  0              5
//! rank 0   F0 F1 .  .  B0--- .  B1---
//! rank 1   .  F0 B0--- F1 B1--- .  .
//! ```
//!
//! A slot is about as long as the shortest kind of work, so that each piece of work has room for its label. After the
//! label, a longer piece is filled with dashes. A dot marks a slot without compute. A timeline that is wider than the
//! terminal continues in further blocks of rows.

use std::fmt::Write;

use crate::instruction::Instruction;
use crate::mesh::Mesh;
use crate::stages::Stages;
use crate::timeline::Timeline;

/// Minimum number of columns; narrower terminals are drawn at this width.
const NARROWEST: usize = 40;

/// Maximum number of slots. It keeps the drawing of a timeline that consists mostly of waits short.
const SLOTS: f64 = 2000.0;

/// Draws the compute of each stage, taken from its first rank. Lines have at most `columns` characters, but `columns`
/// counts as at least 40.
///
/// `F` is a forward, `B` a backward or its first half, `W` deferred weight gradients, `R` a recomputation and `U` an
/// update. The number after it is the micro-batch. If a stage has more than one chunk, a lower-case letter for the
/// chunk follows.
#[must_use]
pub fn grid(timeline: &Timeline, stages: &Stages, mesh: Mesh, columns: usize) -> String {
    let rows: Vec<Row> = (0..mesh.pipe()).map(|stage| row(timeline, stages, mesh, stage)).collect();
    let slot = slot_length(&rows).max(timeline.makespan() / SLOTS);
    let labels = rows.iter().flat_map(|row| &row.pieces).map(|piece| piece.label.len());
    let cell = labels.max().unwrap_or(1) + 1;
    let lines: Vec<Vec<String>> = rows.iter().map(|row| cells(&row.pieces, slot, cell)).collect();
    let slots = lines.iter().map(Vec::len).max().unwrap_or(0);
    let unit = Unit::of(timeline.makespan());
    let margin = rows.iter().map(|row| row.name.len()).max().unwrap_or(0).max(unit.name.len()) + 2;
    let width = (columns.max(NARROWEST).saturating_sub(margin) / cell).max(1);
    let mut out = String::new();
    for from in (0..slots).step_by(width) {
        let to = slots.min(from + width);
        let mut line = |name: &str, text: &str| {
            let text = format!("{name:margin$}{text}");
            writeln!(out, "{}", text.trim_end()).expect("writing to a string");
        };
        line(unit.name, &header(from, to, slot * unit.per_second, cell));
        for (row, cells) in rows.iter().zip(&lines) {
            let idle = format!("{:cell$}", ".");
            let cells: String = (from..to).map(|slot| cells.get(slot).unwrap_or(&idle).as_str()).collect();
            line(&row.name, &cells);
        }
        if to < slots {
            out.push('\n');
        }
    }
    out
}

/// Consecutive compute of a stage with the same label.
struct Piece {
    label: String,
    start: f64,
    end: f64,
}

struct Row {
    name: String,
    pieces: Vec<Piece>,
}

fn row(timeline: &Timeline, stages: &Stages, mesh: Mesh, stage: usize) -> Row {
    let ranks = mesh.ranks(stage);
    let rank = ranks.start;
    let name = match ranks.len() {
        1 => format!("rank {rank}"),
        _ => format!("ranks {rank}-{}", ranks.end - 1),
    };
    let mut pieces: Vec<Piece> = vec![];
    for event in timeline.events.iter().filter(|event| event.rank == rank && event.is_compute()) {
        let Some(label) = label(&event.instruction, stages) else { continue };
        match pieces.last_mut() {
            Some(piece) if piece.label == label => piece.end = event.end,
            _ => pieces.push(Piece { label, start: event.start, end: event.end }),
        }
    }
    Row { name, pieces }
}

/// Returns the label of an instruction; `None` for instructions that are not drawn, such as loading and accumulation.
fn label(instruction: &Instruction, stages: &Stages) -> Option<String> {
    let (work, layer, micro_batch) = match *instruction {
        Instruction::Forward { layer, micro_batch } => ('F', layer, micro_batch),
        Instruction::Recompute { layer, micro_batch } => ('R', layer, micro_batch),
        Instruction::Backward { layer, micro_batch } | Instruction::BackwardInput { layer, micro_batch } => {
            ('B', layer, micro_batch)
        }
        Instruction::BackwardWeight { layer, micro_batch } => ('W', layer, micro_batch),
        Instruction::Update { .. } | Instruction::MeasureTile { .. } | Instruction::UpdateTile { .. } => {
            return Some("U".into());
        }
        _ => return None,
    };
    let part = stages.chunks().iter().position(|chunk| chunk.contains(&layer))?;
    let chunk = match stages.chunks_per_stage() {
        1 => String::new(),
        _ => letter(part / stages.count()),
    };
    Some(format!("{work}{micro_batch}{chunk}"))
}

/// Returns the label of a chunk: a letter from a to z, or for chunk 26 and later an underscore and the number.
fn letter(chunk: usize) -> String {
    match u8::try_from(chunk) {
        Ok(chunk @ 0..26) => char::from(b'a' + chunk).to_string(),
        _ => format!("_{chunk}"),
    }
}

/// Returns the length of a slot in seconds: the lower quartile of the durations of all pieces except updates, but at
/// least a quarter of their mean. The quartile approximates the shortest kind of work and, unlike the minimum, hardly
/// depends on a single short piece of a measured timeline. The lower limit keeps longer pieces from taking very many
/// slots.
fn slot_length(rows: &[Row]) -> f64 {
    let pieces = rows.iter().flat_map(|row| &row.pieces).filter(|piece| piece.label != "U");
    let mut seconds: Vec<f64> = pieces.map(|piece| piece.end - piece.start).collect();
    seconds.sort_by(f64::total_cmp);
    let mean = seconds.iter().sum::<f64>() / seconds.len().max(1) as f64;
    match seconds.get(seconds.len() / 4) {
        Some(&quartile) if mean > 0.0 => quartile.max(mean / 4.0),
        _ => 1.0,
    }
}

/// Cuts a row into slots. Each piece gets at least one slot. A piece that is shorter than a slot moves the next piece
/// to the right.
fn cells(pieces: &[Piece], slot: f64, cell: usize) -> Vec<String> {
    let mut cells: Vec<String> = vec![];
    for piece in pieces {
        let start = ((piece.start / slot).round() as usize).max(cells.len());
        let end = ((piece.end / slot).round() as usize).max(start + 1);
        cells.resize(start, format!("{:cell$}", "."));
        let dashes = if end - start > 1 { (end - start) * cell - 1 } else { 0 };
        let text = format!("{:<1$}", format!("{:-<dashes$}", piece.label), (end - start) * cell);
        cells.extend((0..end - start).map(|slot| text[slot * cell..(slot + 1) * cell].to_string()));
    }
    cells
}

/// Returns the header line, with the time above every fifth slot.
fn header(from: usize, to: usize, slot: f64, cell: usize) -> String {
    const EVERY: usize = 5;
    let step = slot * EVERY as f64;
    let digits = match step {
        step if step.fract() == 0.0 || step >= 10.0 => 0,
        step if step >= 1.0 => 1,
        _ => 2,
    };
    let tick = |index: usize| {
        let room = (index + EVERY - index % EVERY).min(to) - index;
        let text = match index.is_multiple_of(EVERY) {
            true if index == 0 => "0".to_string(),
            true => format!("{:.digits$}", index as f64 * slot),
            false if index == from => String::new(),
            false => return String::new(),
        };
        // The text may not fit at the end of a line.
        let text = if text.len() < room * cell { text } else { String::new() };
        format!("{text:<0$}", room * cell)
    };
    (from..to).map(tick).collect()
}

/// Unit of the displayed times.
struct Unit {
    name: &'static str,
    per_second: f64,
}

impl Unit {
    fn of(makespan: f64) -> Self {
        let units = [("seconds", 1.0), ("ms", 1e3)];
        let fitting = units.into_iter().find(|(_, per_second)| makespan * per_second >= 1.0);
        let (name, per_second) = fitting.unwrap_or(("µs", 1e6));
        Self { name, per_second }
    }
}
