//! The file of a cost table: what it holds, how it is read, written and shown.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::format::counted;

/// The form of the file: another one is not read.
pub(super) const VERSION: u32 = 1;

/// What things take. Times are in seconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostTable {
    /// Of the file's form.
    pub(super) version: u32,
    /// What it holds for.
    pub(super) conditions: Conditions,
    /// Layers that differ in more than their numbers.
    pub(super) layers: Vec<LayerTimes>,
    /// To make a micro-batch ready.
    pub(super) load: Time,
    /// Each of these for an element: of a segment's gradient that is added up, of a rank's gradients for their norm, of a rank's part that the
    /// optimizer updates.
    pub(super) accumulate: Time,
    pub(super) gradient_norm: Time,
    pub(super) update: Time,
    /// Between the ranks; of one rank there are none.
    pub(super) transfers: Option<Transfers>,
    /// Where the configuration has something on a disk.
    pub(super) disk: Option<Disk>,
}

/// What a table holds for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Conditions {
    /// `f32` or `bf16`.
    pub(super) dtype: String,
    /// Threads of each rank.
    pub(super) threads: usize,
    /// Ranks that took part.
    pub(super) ranks: usize,
    /// How they talked: `shared memory`, `TCP`.
    pub(super) transport: String,
    pub(super) optimizer: String,
    /// Samples of a micro-batch.
    pub(super) micro_batch: usize,
    /// `model.tiled_mlp_rows`, where that is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) tiled_mlp_rows: Option<usize>,
}

/// Median, smallest and largest.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Time {
    pub(super) median: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

/// A layer and a micro-batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LayerTimes {
    /// Its name, with `*` for numbers.
    pub(super) name: String,
    /// Elements of its parameters.
    pub(super) parameters: usize,
    /// Bytes of its inputs, where they are known before a run.
    pub(super) inputs: u64,
    /// The last layer's is part of its backward.
    pub(super) forward: Time,
    pub(super) backward: Time,
    /// The backward in two halves, where it can be cut.
    pub(super) backward_input: Option<Time>,
    pub(super) backward_weight: Option<Time>,
}

/// Each with all ranks at once, and each rank with its own core or cores.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Transfers {
    pub(super) all_gather: Line,
    pub(super) reduce_scatter: Line,
    pub(super) all_reduce: Line,
    pub(super) broadcast: Line,
    pub(super) send: Line,
    /// How fast a rank computes while an all-gather goes on beside it, as a share of its speed alone.
    pub(super) computing_beside: Time,
    /// How fast the all-gather is meanwhile.
    pub(super) transferring_beside: Time,
}

/// Seconds over bytes. The bytes are those that each rank must send at least: (n−1)/n of a vector that is gathered, reduced into shards or broadcast,
/// twice as many of one that is reduced everywhere, all of a message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Line {
    pub(super) latency: f64,
    pub(super) seconds_per_byte: f64,
    /// What it was drawn through.
    pub(super) points: Vec<Point>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Point {
    pub(super) bytes: f64,
    pub(super) seconds: Time,
}

/// Seconds for a byte, of a rank that has the disk to itself.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Disk {
    pub(super) read: Time,
    pub(super) write: Time,
}

impl Time {
    /// Of samples; nothing took no time.
    pub(super) fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let at = |index: usize| samples.get(index).copied().unwrap_or(0.0);
        Self { median: at(samples.len() / 2), low: at(0), high: at(samples.len().saturating_sub(1)) }
    }

    pub(super) fn scaled(self, by: f64) -> Self {
        Self { median: self.median * by, low: self.low * by, high: self.high * by }
    }
}

impl CostTable {
    /// Reads a table.
    ///
    /// # Errors
    /// A file that cannot be read, or is no table of this version.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let wrong = |message: String| {
            Error::setting(
                "training.cost_table",
                format!("{}: {message}", path.display()),
                "measure one: `zero-train bench costs --config ds.yaml --out FILE`",
            )
        };
        let text = std::fs::read_to_string(path).map_err(|e| wrong(format!("the cost table cannot be read: {e}")))?;
        let value: serde_json::Value =
            serde_json::from_str(&text).map_err(|e| wrong(format!("this is no cost table: {e}")))?;
        match value.get("version").and_then(serde_json::Value::as_u64) {
            Some(version) if version == u64::from(VERSION) => {}
            Some(version) => return Err(wrong(format!("a cost table of version {version}; this one reads {VERSION}"))),
            None => return Err(wrong("this is no cost table: it has no version".into())),
        }
        serde_json::from_value(value).map_err(|e| wrong(format!("this is no cost table: {e}")))
    }

    /// Writes it, whole or not at all.
    ///
    /// # Errors
    /// A folder that cannot be written to.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        let failed = |e: std::io::Error| {
            Error::setting(&path.display().to_string(), format!("it cannot be written: {e}"), "choose another place")
        };
        let mut text = serde_json::to_string_pretty(self).map_err(|e| failed(e.into()))?;
        text.push('\n');
        let mut beside = path.as_os_str().to_owned();
        beside.push(".tmp");
        std::fs::write(&beside, text).and_then(|()| std::fs::rename(&beside, path)).map_err(failed)
    }
}

impl fmt::Display for CostTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Conditions { dtype, threads, ranks, transport, optimizer, micro_batch, tiled_mlp_rows } = &self.conditions;
        let tiles = tiled_mlp_rows.map_or(String::new(), |rows| format!("MLP in tiles of {rows} rows, "));
        writeln!(
            f,
            "{dtype}, micro-batch {micro_batch}, {tiles}{} × {}, {transport}, {optimizer}; medians (smallest – largest)",
            counted(*ranks, "rank", "ranks"),
            counted(*threads, "thread", "threads"),
        )?;
        for layer in &self.layers {
            writeln!(
                f,
                "  {:<24} forward {}   backward {}",
                layer.name,
                Scaled(layer.forward, 1e3, "ms"),
                Scaled(layer.backward, 1e3, "ms")
            )?;
        }
        write!(f, "  {:<24} {}", "update, a parameter", Scaled(self.update, 1e9, "ns"))?;
        if let Some(transfers) = &self.transfers {
            let lines = [
                ("all_gather", &transfers.all_gather),
                ("reduce_scatter", &transfers.reduce_scatter),
                ("all_reduce", &transfers.all_reduce),
                ("broadcast", &transfers.broadcast),
                ("send", &transfers.send),
            ];
            for (name, Line { latency, seconds_per_byte, .. }) in lines {
                let rate = 1e-9 / seconds_per_byte.max(f64::MIN_POSITIVE);
                write!(f, "\n  {name:<24} {:.1} µs and {rate:.1} GB/s", latency * 1e6)?;
            }
            let percent = |time: Time| Scaled(time, 1e2, "%");
            write!(
                f,
                "\n  beside each other, computing goes on at {} of its speed, an all_gather at {}",
                percent(transfers.computing_beside),
                percent(transfers.transferring_beside),
            )?;
        }
        if let Some(disk) = &self.disk {
            let rate = |time: Time| 1e-9 / time.median.max(f64::MIN_POSITIVE);
            write!(f, "\n  {:<24} reads {:.2} GB/s, writes {:.2} GB/s", "disk", rate(disk.read), rate(disk.write))?;
        }
        Ok(())
    }
}

/// A time in parts of a second.
struct Scaled(Time, f64, &'static str);

impl fmt::Display for Scaled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(time, parts, unit) = self;
        let Time { median, low, high } = time.scaled(*parts);
        write!(f, "{median:.3} {unit} ({low:.3} – {high:.3})")
    }
}

/// A layer's name without its numbers: `transformer.h.*`.
pub(super) fn pattern(name: &str) -> String {
    let is_number = |part: &&str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let parts = name.split('.').map(|part| if is_number(&part) { "*" } else { part });
    parts.collect::<Vec<_>>().join(".")
}
