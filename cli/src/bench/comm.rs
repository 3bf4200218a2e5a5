//! `zero-train bench comm`: times collectives between processes of this machine. Each collective alternates with its
//! floor: the memory traffic of the collective alone.

use std::time::Duration;

use zero_comm::launcher_environment::LauncherEnvironment;
use zero_comm::{CommError, Operation, Options, ProcessTransport, measure, token};

use zero_train::process::launch::{self, Job, Team};

use super::figures::{Comparison, median, range};
use super::floors::collective::Floor;

/// Starts the ranks, or runs the benchmark if this process is one of them. Returns the exit status.
///
/// # Errors
/// Fails if `transport` is unknown, if the ranks cannot connect, or if a rank is lost.
pub(crate) fn comm(ranks: usize, megabytes: usize, repeats: usize, transport: &str) -> anyhow::Result<u8> {
    let transport = match transport {
        "auto" => ProcessTransport::Auto,
        "shared_memory" => ProcessTransport::SharedMemory,
        "tcp" => ProcessTransport::Tcp,
        other => anyhow::bail!("unknown transport `{other}`; use auto, shared_memory or tcp"),
    };
    let place = LauncherEnvironment::from_environment(|name| std::env::var(name).ok())?;
    if place == LauncherEnvironment::alone() {
        return Ok(launch::launch(Team::new(ranks, 1), &Job::here(None), None)?);
    }
    let options = Options { transport, token: token::find(|name| std::env::var_os(name))?, ..Options::default() };
    let comm = zero_comm::connect(&place, &options)?;
    let print = |line: String| {
        if comm.rank() == 0 {
            println!("{line}");
        }
    };
    print(format!(
        "{} processes over {}: f32 vectors; {repeats} runs of each operation alternate with runs of its floor; times are those of the slowest rank",
        comm.size(),
        comm.transport()
    ));
    print(format!(
        "  {:<15}{:>10}  {:<30}{:>7}  {:<33}{}",
        "operation", "bytes", "ms (from – to)", "GB/s", "floor: memory traffic alone", "time / floor"
    ));
    let times = |bytes, repeats, operation| -> Result<Comparison, CommError> {
        let mut floor = Floor::new(operation, bytes, comm.size());
        let [subject, floor] = measure::times(&*comm, operation, bytes, repeats, || floor.run())?;
        Ok(Comparison { subject, floor })
    };
    for operation in [
        Operation::AllReduce,
        Operation::ReduceScatter,
        Operation::AllGather,
        Operation::AllToAll,
        Operation::Broadcast,
    ] {
        let bytes = megabytes * 1_000_000;
        let times = times(bytes, repeats, operation)?;
        let rate = bytes as f64 / median(&times.subject).as_secs_f64() / 1e9;
        let [middle, low, high] = range(times.ratios());
        print(format!(
            "  {:<15}{bytes:>10}  {:<30}{rate:>7.1}  {:<33}{middle:.2} ({low:.2} – {high:.2})",
            operation.name(),
            spread(&times.subject, 1e3),
            spread(&times.floor, 1e3),
        ));
    }
    print(format!("  {:<15}{:>10}  µs (from – to), with all ranks awake", "operation", "bytes"));
    for (operation, bytes) in [(Operation::Barrier, 0), (Operation::AllReduce, 4), (Operation::AllReduce, 1024)] {
        let times = times(bytes, repeats * 100, operation)?;
        print(format!("  {:<15}{bytes:>10}  {}", operation.name(), spread(&times.subject, 1e6)));
    }
    comm.barrier().wait()?;
    Ok(0)
}

/// Formats the median, minimum and maximum. The unit is 1/`parts` of a second.
fn spread(times: &[Duration], parts: f64) -> String {
    let [middle, low, high] = range(times.iter().map(|time| time.as_secs_f64() * parts).collect());
    format!("{middle:.3} ({low:.3} – {high:.3})")
}
