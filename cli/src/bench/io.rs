//! `zero-train bench io`: times the disk tier, alternating with plain reads and writes of the same disk.

use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use zero_tier::measure::{Load, Size, Transfers};
use zero_tier::{Backend, DiskError, Options};

use super::figures::{Comparison, median, range, summary};
use super::floors::disk::Floor;

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
    load: String,
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
pub(crate) fn io(folder: &Path, size: &Size, repeats: usize, options: &Options, json: bool) -> anyhow::Result<u8> {
    let explained = |error: DiskError| anyhow::anyhow!("{error}\n  help: {}", error.help());
    // The floor has as much memory as the requests in flight.
    let mut floor = Floor::new(size.request.saturating_mul(size.requests)).map_err(explained)?;
    let transfers = Transfers::new(folder, size, options).map_err(explained)?;
    let file = transfers.swap_file();
    let mut times = |load: Load| -> Result<_, DiskError> {
        let moved = load.moved(file.size());
        let mut run = || Ok((transfers.run(load)?, floor.run(file, moved)?));
        run()?;
        let times = (0..repeats).map(|_| run()).collect::<Result<Comparison, _>>()?;
        Ok((format!("{load:?}").to_lowercase(), moved[0] + moved[1], times))
    };
    let loads = Load::ALL.into_iter().map(&mut times).collect::<Result<Vec<_>, _>>().map_err(explained)?;
    let backend = match file.backend() {
        Backend::IoUring => "io_uring",
        Backend::Positioned => "threads",
    };
    if json {
        let ms = |runs: Vec<Duration>| runs.iter().map(|time| time.as_secs_f64() * 1e3).collect();
        let measured = |(load, bytes, Comparison { subject, floor })| MeasuredLoad {
            load,
            bytes,
            tier_ms: ms(subject),
            floor_ms: ms(floor),
        };
        let (notices, file_bytes) = (file.notices().to_vec(), file.size());
        let loads = loads.into_iter().map(measured).collect();
        let measured = Measured { backend, direct: file.is_direct(), file_bytes, notices, loads };
        println!("{}", serde_json::to_string(&measured)?);
        return Ok(0);
    }
    println!(
        "{}: {} MiB in requests of {} MiB, {} in flight, with {backend}{}; {repeats} runs of each operation alternate with runs of its floor",
        folder.display(),
        file.size() >> 20,
        size.request >> 20,
        size.requests,
        if file.is_direct() { ", bypassing the page cache" } else { "" },
    );
    for notice in file.notices() {
        println!("  {notice}");
    }
    for (load, bytes, times) in &loads {
        let rate = |runs: &[Duration]| *bytes as f64 / median(runs).as_secs_f64() / 1e9;
        let (tier, floor) = (summary(&times.subject), summary(&times.floor));
        println!("  {load:<8}{tier:<34}{:>6.2} GB/s", rate(&times.subject));
        println!("    floor {floor:<34}{:>6.2} GB/s", rate(&times.floor));
        let [middle, low, high] = range(times.ratios());
        println!("    times the floor {middle:>6.2}  ({low:.2} – {high:.2})");
    }
    Ok(0)
}
