//! `zero-train bench save`: measures how long checkpoints stall training, alternating with a plain copy and a plain
//! file write.
//!
//! A background save stalls the ranks while it copies their state. Its floor is one thread that copies the same number
//! of bytes between buffers whose pages are already faulted in. A synchronous save stalls the ranks until the
//! checkpoint is written. Its floor writes the same number of bytes to one file per rank and syncs the file.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use zero_engine::{bytes, counted};
use zero_train::train::Steps;

use super::figures::{Comparison, spread, summary, timed};
use super::ranks::{Role, WARM_UP, take_part};
use crate::arguments::ConfigArgs;

/// Times on one rank. There is one entry per round.
#[derive(Debug, Default)]
struct Times {
    /// The stall of a background save, and a copy of the same bytes.
    stall: Comparison,
    /// A step during the save, and a step alone.
    step: Comparison,
    background: Vec<Duration>,
    /// A synchronous save, and a file of the same bytes.
    waited: Comparison,
}

/// Times checkpoints of a configuration in `folder`. Rank 0 prints its own times. Returns the exit status.
///
/// # Errors
/// Fails if training would fail, or if `folder` cannot be written.
pub(crate) fn save(args: &ConfigArgs, folder: &Path, repeats: usize) -> anyhow::Result<u8> {
    let sets = ["training.save_async=true", "training.keep_last=1"].map(String::from);
    let with = ConfigArgs { set: [&args.set[..], &sets].concat(), ..args.clone() };
    let (config, cores, comm) = match take_part(&with)? {
        Role::Launcher(status) => return Ok(status),
        Role::Rank { config, cores, comm } => (config, cores, comm),
    };
    let mut subject = Steps::open(&config, &comm)?;
    for _ in 0..WARM_UP {
        subject.step()?;
    }
    let root = folder.join(".zero-train-bench-save");
    let own = subject.engine().checkpoint_bytes();
    let source = vec![1u8; own as usize];
    let mut target = source.clone();
    // The first save also faults in the pages of the copy, so it is not timed.
    subject.engine_mut().save_checkpoint_in_background(&root, Value::Null)?;
    subject.engine_mut().finish_save()?;
    let mut times = Times::default();
    for _ in 0..repeats {
        times.step.floor.push(subject.step()?.duration);
        comm.barrier().wait()?;
        times.stall.floor.push(timed(|| target.copy_from_slice(std::hint::black_box(&source))));
        std::hint::black_box(&mut target);
        comm.barrier().wait()?;
        let began = Instant::now();
        times.stall.subject.push(subject.engine_mut().save_checkpoint_in_background(&root, Value::Null)?);
        times.step.subject.push(subject.step()?.duration);
        subject.engine_mut().finish_save()?;
        times.background.push(began.elapsed());
        if let Some(ended) = subject.engine_mut().ended_save() {
            ended.result?;
        }
        comm.barrier().wait()?;
        let file = root.join(format!(".floor-{}", comm.rank()));
        let mut written = Ok(());
        times.waited.floor.push(timed(|| written = write(&file, &source)));
        written?;
        std::fs::remove_file(&file)?;
        comm.barrier().wait()?;
        let mut saved = Ok(());
        times.waited.subject.push(timed(|| saved = subject.engine_mut().save_checkpoint(&root).map(drop)));
        saved?;
    }
    comm.barrier().wait()?;
    if comm.rank() == 0 {
        std::fs::remove_dir_all(&root)?;
        println!("{cores}");
        let (ranks, runs) = (counted(comm.size(), "rank", "ranks"), counted(repeats, "run", "runs"));
        println!(
            "{ranks}, each saves {}; times are those of rank 0; the operations alternate, with {runs} of each operation",
            bytes(own)
        );
        println!("  copy of the same bytes      {}", summary(&times.stall.floor));
        println!("  background save: step waits {}   {}", summary(&times.stall.subject), over(&times.stall));
        println!("  a step                      {}", summary(&times.step.floor));
        println!("  a step during the save      {}   {}", summary(&times.step.subject), over(&times.step));
        println!("  background save: committed  {}", summary(&times.background));
        println!("  one file written and synced {}", summary(&times.waited.floor));
        println!("  synchronous save            {}   {}", summary(&times.waited.subject), over(&times.waited));
    }
    comm.barrier().wait()?;
    Ok(0)
}

fn write(file: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = File::create(file)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Formats the ratios of subject to floor, one per round.
fn over(times: &Comparison) -> String {
    spread(times.ratios(), 2, "×")
}
