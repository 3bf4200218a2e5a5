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
use zero_optim::bench::timed;
use zero_train::train::Steps;

use super::figures::{spread, summary};
use super::ranks::{Role, WARM_UP, take_part};
use crate::arguments::ConfigArgs;

/// Times on one rank. There is one entry per round.
#[derive(Debug, Default)]
struct Times {
    copy: Vec<Duration>,
    stall: Vec<Duration>,
    step: Vec<Duration>,
    step_during: Vec<Duration>,
    background: Vec<Duration>,
    floor: Vec<Duration>,
    waited: Vec<Duration>,
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
        times.step.push(subject.step()?.duration);
        comm.barrier().wait()?;
        times.copy.push(timed(|| target.copy_from_slice(std::hint::black_box(&source))));
        std::hint::black_box(&mut target);
        comm.barrier().wait()?;
        let began = Instant::now();
        times.stall.push(subject.engine_mut().save_checkpoint_in_background(&root, Value::Null)?);
        times.step_during.push(subject.step()?.duration);
        subject.engine_mut().finish_save()?;
        times.background.push(began.elapsed());
        if let Some(ended) = subject.engine_mut().ended_save() {
            ended.result?;
        }
        comm.barrier().wait()?;
        let file = root.join(format!(".floor-{}", comm.rank()));
        let mut written = Ok(());
        times.floor.push(timed(|| written = write(&file, &source)));
        written?;
        std::fs::remove_file(&file)?;
        comm.barrier().wait()?;
        let mut saved = Ok(());
        times.waited.push(timed(|| saved = subject.engine_mut().save_checkpoint(&root).map(drop)));
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
        println!("  copy of the same bytes      {}", summary(&times.copy));
        println!("  background save: step waits {}   {}", summary(&times.stall), over(&times.stall, &times.copy));
        println!("  a step                      {}", summary(&times.step));
        println!(
            "  a step during the save      {}   {}",
            summary(&times.step_during),
            over(&times.step_during, &times.step)
        );
        println!("  background save: committed  {}", summary(&times.background));
        println!("  one file written and synced {}", summary(&times.floor));
        println!("  synchronous save            {}   {}", summary(&times.waited), over(&times.waited, &times.floor));
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
fn over(subject: &[Duration], floor: &[Duration]) -> String {
    spread(subject.iter().zip(floor).map(|(s, f)| s.as_secs_f64() / f.as_secs_f64()).collect(), 2, "×")
}
