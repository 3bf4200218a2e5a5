//! `zero-train bench io`: times the disk tier, alternating with plain reads and writes of the same disk.

use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use zero_comm::bench::{median, ratios};
use zero_tier::bench::{Bench, Comparison, Load, Size};
use zero_tier::{Backend, DiskError, Options};

use super::figures::summary;

/// The result, as `--json` prints it.
#[derive(Serialize)]
struct Measured {
    /// `io_uring` or `threads`.
    backend: &'static str,
    /// Whether I/O bypasses the page cache.
    direct: bool,
    /// Size of the file.
    file_bytes: u64,
    notices: Vec<String>,
    loads: Vec<MeasuredLoad>,
}

/// Times of one load (reading, writing or updating), through the disk tier and for its floor. There is one entry per
/// run.
#[derive(Serialize)]
struct MeasuredLoad {
    load: &'static str,
    /// Bytes moved by each run.
    bytes: u64,
    tier_ms: Vec<f64>,
    floor_ms: Vec<f64>,
}

/// Reads, writes and updates a file of this size in `folder` through the disk tier. Runs of each of these loads
/// alternate with runs of its floor. Returns the exit status.
///
/// # Errors
/// Fails if the folder is unsuitable or the disk fails.
pub(crate) fn io(folder: &Path, size: &Size, options: &Options, json: bool) -> anyhow::Result<u8> {
    let explained = |error: DiskError| anyhow::anyhow!("{error}\n  help: {}", error.help());
    let mut bench = Bench::new(folder, size, options).map_err(explained)?;
    let times = |load| bench.compare(load).map(|times| (load, times));
    let loads = Load::ALL.into_iter().map(times).collect::<Result<Vec<_>, _>>().map_err(explained)?;
    let file = bench.swap_file();
    let backend = match file.backend() {
        Backend::IoUring => "io_uring",
        Backend::Positioned => "threads",
    };
    if json {
        let (notices, file_bytes) = (file.notices().to_vec(), file.size());
        let loads = loads.iter().map(|(load, times)| measured(*load, times)).collect();
        let measured = Measured { backend, direct: file.is_direct(), file_bytes, notices, loads };
        println!("{}", serde_json::to_string(&measured)?);
        return Ok(0);
    }
    println!(
        "{}: {} MiB in requests of {} MiB, {} in flight, with {backend}{}; {} runs of each operation alternate with runs of its floor",
        folder.display(),
        file.size() >> 20,
        size.request >> 20,
        size.requests,
        if file.is_direct() { ", bypassing the page cache" } else { "" },
        size.repeats
    );
    for notice in file.notices() {
        println!("  {notice}");
    }
    for (load, times) in &loads {
        let rate = |runs: &[Duration]| times.bytes as f64 / median(runs).as_secs_f64() / 1e9;
        let (tier, floor) = (summary(&times.subject), summary(&times.floor));
        println!("  {:<8}{tier:<34}{:>6.2} GB/s", load.name(), rate(&times.subject));
        println!("    floor {floor:<34}{:>6.2} GB/s", rate(&times.floor));
        let ratios = ratios(&times.subject, &times.floor);
        if let (Some(low), Some(high)) = (ratios.first(), ratios.last()) {
            println!("    times the floor {:>6.2}  ({low:.2} – {high:.2})", ratios[ratios.len() / 2]);
        }
    }
    Ok(0)
}

fn measured(load: Load, times: &Comparison) -> MeasuredLoad {
    let ms = |runs: &[Duration]| runs.iter().map(|time| time.as_secs_f64() * 1e3).collect();
    MeasuredLoad { load: load.name(), bytes: times.bytes, tier_ms: ms(&times.subject), floor_ms: ms(&times.floor) }
}
