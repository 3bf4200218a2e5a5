//! The cost table's file format: fields, reading, writing and display.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::files::replace;
use crate::format::counted;

/// Version of the file format. Other versions are rejected.
pub(super) const VERSION: u32 = 3;

/// A cost table. Times are in seconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostTable {
    /// Version of the file format.
    pub(super) version: u32,
    /// Conditions under which the table is valid.
    pub(super) conditions: Conditions,
    /// One entry per kind of layer: layers that differ only in the numbers in their names share an entry.
    pub(super) layers: Vec<LayerTimes>,
    /// Time of all layers on the slowest rank, divided by the mean over the ranks; `None` in tables that older versions
    /// wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) slowest_rank: Option<Time>,
    /// Loading a micro-batch.
    pub(super) load: Time,
    /// Seconds per element: `accumulate` per element of a gradient, `gradient_norm` per element of a rank's gradients
    /// in the norm, and `update` per element of the shard that the optimizer updates.
    pub(super) accumulate: Time,
    pub(super) gradient_norm: Time,
    pub(super) update: Time,
    /// Seconds of updating a matrix as a whole, per multiply-add of [`MatrixStates`](zero_optim::MatrixStates); `None`
    /// if the model has no such matrix.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) update_matrix: Option<Time>,
    /// Quantizing to codes and dequantizing; `None` in tables that older versions wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) codes: Option<[CodeTimes; 2]>,
    /// Transfers between the ranks; `None` with one rank.
    pub(super) transfers: Option<Transfers>,
    /// Disk rates; `None` if nothing is offloaded to disk.
    pub(super) disk: Option<Disk>,
}

/// Conditions under which a table is valid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Conditions {
    /// `f32`, `bf16` or `f16`.
    pub(super) dtype: String,
    /// Number of threads of each rank.
    pub(super) threads: usize,
    /// Number of ranks.
    pub(super) ranks: usize,
    /// Transport between the ranks: `shared memory`, `tcp`, `shared memory and tcp` or `threads`.
    pub(super) transport: String,
    pub(super) optimizer: String,
    /// Number of samples per micro-batch.
    pub(super) micro_batch: usize,
    /// `model.tiled_mlp_rows`, if set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) tiled_mlp_rows: Option<usize>,
    /// The keys (with their values) that split sequences or layers across ranks, if any is set. The times of a layer
    /// are then those of one rank's part, including the exchanges between ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) sequences: Option<String>,
}

/// Median, minimum and maximum of measured times.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Time {
    pub(super) median: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

/// Times of a layer for one micro-batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LayerTimes {
    /// The layer's name, with `*` for numbers.
    pub(super) name: String,
    /// Number of elements of the layer's parameters.
    pub(super) parameters: usize,
    /// Number of bytes of the layer's inputs; 0 if a dry run is impossible.
    pub(super) inputs: u64,
    /// Time of the forward. The last layer's forward is part of its backward.
    pub(super) forward: Time,
    pub(super) backward: Time,
    /// Times of the two halves of a split backward.
    pub(super) backward_input: Option<Time>,
    pub(super) backward_weight: Option<Time>,
}

/// Times to quantize and dequantize with one of [`BlockCodes::ALL`](zero_optim::BlockCodes::ALL): seconds per element
/// on all threads of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CodeTimes {
    pub(super) quantize: Time,
    pub(super) dequantize: Time,
}

/// Transfer times, measured on all ranks at the same time. Each rank has its own cores.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Transfers {
    /// Times for the group of all ranks, and for the groups of equal size into which a mesh can divide the ranks.
    pub(super) groups: Vec<GroupTimes>,
    pub(super) broadcast: Line,
    /// A message from the first rank to the last.
    pub(super) send: Line,
    /// Compute speed during an all-gather, as a fraction of the speed without an all-gather.
    pub(super) computing_beside: Time,
    /// Speed of an all-gather during compute, as a fraction of the speed without compute.
    pub(super) transferring_beside: Time,
    /// Speed of a message during compute, as a fraction of the speed without compute; `None` in tables that older
    /// versions wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) sending_beside: Option<Time>,
}

/// Times of collectives in groups of equal size. Together the groups contain all ranks, and all groups run their
/// collectives at the same time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GroupTimes {
    pub(super) group: Group,
    pub(super) all_gather: Line,
    pub(super) reduce_scatter: Line,
    pub(super) all_reduce: Line,
    pub(super) all_to_all: Line,
    /// A message between the two members of each group; `None` for larger groups.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) send: Option<Line>,
}

/// The groups along one axis of a mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Group {
    /// Number of members.
    pub(super) ranks: usize,
    /// Difference between the ranks of two neighbouring members.
    pub(super) apart: usize,
}

impl Group {
    /// Returns the groups into which a mesh can divide `world_size` ranks, from the largest to the smallest.
    pub(super) fn all(world_size: usize) -> Vec<Self> {
        let divisors = |of: usize| (1..=of).rev().filter(move |part| of.is_multiple_of(*part));
        divisors(world_size)
            .filter(|&ranks| ranks > 1)
            .flat_map(|ranks| divisors(world_size / ranks).rev().map(move |apart| Self { ranks, apart }))
            .collect()
    }
}

impl Transfers {
    /// Returns the times of collectives by groups.
    ///
    /// # Errors
    /// Describes the groups if they were not measured.
    pub(super) fn of(&self, group: Group) -> Result<&GroupTimes, String> {
        self.groups.iter().find(|times| times.group == group).ok_or_else(|| format!("the table lacks {group}"))
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.apart {
            1 => write!(f, "groups of {} consecutive ranks", self.ranks),
            apart => write!(f, "groups of {} ranks that are {apart} apart", self.ranks),
        }
    }
}

/// Time as a linear function of bytes. Bytes are the minimum that each rank must send: (n−1)/n of the vector for
/// all-gather, reduce-scatter, all-to-all and broadcast, twice that for all-reduce, and the whole message for a send.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Line {
    pub(super) latency: f64,
    pub(super) seconds_per_byte: f64,
    /// The measured points.
    pub(super) points: Vec<Point>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Point {
    pub(super) bytes: f64,
    pub(super) seconds: Time,
}

/// Seconds per byte on one rank. All ranks measure at about the same time, so ranks on one disk share its bandwidth.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Disk {
    pub(super) read: Time,
    pub(super) write: Time,
}

impl Time {
    /// Summarizes samples. Without samples, all times are 0.
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
    /// Fails if the file cannot be read, is not a cost table, or has a different version.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let wrong = |message: String| {
            Error::setting(
                "training.cost_table",
                format!("{}: {message}", path.display()),
                "measure a table with `zero-train bench costs --config ds.yaml --out FILE`",
            )
        };
        let text = std::fs::read_to_string(path).map_err(|e| wrong(format!("cannot read the cost table: {e}")))?;
        let value: serde_json::Value =
            serde_json::from_str(&text).map_err(|e| wrong(format!("not a cost table: {e}")))?;
        match value.get("version").and_then(serde_json::Value::as_u64) {
            Some(version) if version == u64::from(VERSION) => {}
            Some(version) => {
                return Err(wrong(format!(
                    "the cost table has version {version}; this program reads version {VERSION}"
                )));
            }
            None => return Err(wrong("not a cost table: it has no version".into())),
        }
        serde_json::from_value(value).map_err(|e| wrong(format!("not a cost table: {e}")))
    }

    /// Writes the table atomically, through a temporary file.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        let failed = |e: std::io::Error| {
            Error::setting(
                &path.display().to_string(),
                format!("cannot write the cost table: {e}"),
                "choose another file",
            )
        };
        let mut text = serde_json::to_string_pretty(self).map_err(|e| failed(e.into()))?;
        text.push('\n');
        replace(path, text).map_err(failed)
    }
}

impl fmt::Display for CostTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Conditions { dtype, threads, ranks, transport, optimizer, micro_batch, tiled_mlp_rows, sequences } =
            &self.conditions;
        let tiles = tiled_mlp_rows.map_or(String::new(), |rows| format!("MLP in tiles of {rows} rows, "));
        let slices = sequences.as_ref().map_or(String::new(), |sequences| format!("{sequences}, "));
        writeln!(
            f,
            "{dtype}, micro-batch {micro_batch}, {tiles}{slices}{} × {}, {transport}, {optimizer}; medians (minimum – maximum)",
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
        write!(f, "  {:<24} {}", "update per parameter", Scaled(self.update, 1e9, "ns"))?;
        if let Some(time) = self.update_matrix {
            write!(f, "\n  {:<24} {}", "update per multiply-add", Scaled(time, 1e9, "ns"))?;
        }
        if let Some(transfers) = &self.transfers {
            let mut show = |name: &str, line: &Line| {
                let rate = 1e-9 / line.seconds_per_byte.max(f64::MIN_POSITIVE);
                write!(f, "\n  {name:<24} {:.1} µs and {rate:.1} GB/s", line.latency * 1e6)
            };
            for (index, times) in transfers.groups.iter().enumerate() {
                let of = if index == 0 { String::new() } else { format!(" by {}", times.group) };
                show(&format!("all_gather{of}"), &times.all_gather)?;
                show(&format!("reduce_scatter{of}"), &times.reduce_scatter)?;
                show(&format!("all_reduce{of}"), &times.all_reduce)?;
                show(&format!("all_to_all{of}"), &times.all_to_all)?;
                times.send.iter().try_for_each(|send| show(&format!("send{of}"), send))?;
            }
            show("broadcast", &transfers.broadcast)?;
            show("send", &transfers.send)?;
            let percent = |time: Time| Scaled(time, 1e2, "%");
            write!(
                f,
                "\n  when compute and an all_gather overlap, compute runs at {} of its speed, and the all_gather at {}",
                percent(transfers.computing_beside),
                percent(transfers.transferring_beside),
            )?;
            if let Some(sending) = transfers.sending_beside {
                write!(f, ", and a message at {}", percent(sending))?;
            }
        }
        if let Some(disk) = &self.disk {
            let rate = |time: Time| 1e-9 / time.median.max(f64::MIN_POSITIVE);
            write!(f, "\n  {:<24} reads {:.2} GB/s, writes {:.2} GB/s", "disk", rate(disk.read), rate(disk.write))?;
        }
        Ok(())
    }
}

/// Formats a time with a factor and a unit, for display.
struct Scaled(Time, f64, &'static str);

impl fmt::Display for Scaled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(time, parts, unit) = self;
        let Time { median, low, high } = time.scaled(*parts);
        write!(f, "{median:.3} {unit} ({low:.3} – {high:.3})")
    }
}

/// Replaces numbers in a layer's name with `*`, as in `transformer.h.*`.
pub(super) fn pattern(name: &str) -> String {
    let is_number = |part: &&str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let parts = name.split('.').map(|part| if is_number(&part) { "*" } else { part });
    parts.collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_groups_are_those_of_a_mesh() {
        let of = |world| Group::all(world).into_iter().map(|group| (group.ranks, group.apart)).collect::<Vec<_>>();
        assert_eq!(of(1), []);
        assert_eq!(of(4), [(4, 1), (2, 1), (2, 2)]);
        assert_eq!(of(6), [(6, 1), (3, 1), (3, 2), (2, 1), (2, 3)]);
        assert_eq!(of(8), [(8, 1), (4, 1), (4, 2), (2, 1), (2, 2), (2, 4)]);
    }
}
