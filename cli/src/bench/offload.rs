//! `zero-train bench offload`: the steps of a configuration whose state lives on a disk, in turn with the disk alone.
//!
//! The update is what reads and writes most: each tile of optimizer state comes, is updated and goes, beside others that come and go. It
//! is timed inside of real steps. Its floor is the same number of bytes, read and written plainly past the page cache, to and from as much
//! memory; where the arithmetic of the update takes longer than that, the arithmetic is the floor.

use std::time::Duration;

use zero_comm::bench::median;
use zero_config::Dtype;
use zero_pipeline::{Instruction, Item, Tier};
use zero_tier::bench::Floor;
use zero_train::counted;
use zero_train::train::Steps;

use super::figures::{spread, summary};
use super::ranks::{Role, WARM_UP, take_part};
use crate::arguments::ConfigArgs;

/// Bytes that are read and written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Moved {
    read: u64,
    written: u64,
}

/// Times of a load, of its floor on the disk, and of its arithmetic.
#[derive(Debug, Default)]
struct Times {
    subject: Vec<Duration>,
    floor: Vec<Duration>,
    computing: Vec<Duration>,
}

/// Times steps and the update in them; rank 0 tells of its own disk, which all ranks use at the same time.
///
/// # Errors
/// What training itself would say, or a configuration without anything on a disk.
pub(crate) fn offload(args: &ConfigArgs, steps: usize) -> anyhow::Result<u8> {
    // The timeline says when the update began and ended.
    let traced = ConfigArgs { set: [&args.set[..], &["training.trace=true".into()]].concat(), ..args.clone() };
    let (config, cores, comm) = match take_part(&traced)? {
        Role::Launcher(status) => return Ok(status),
        Role::Rank { config, cores, comm } => (config, cores, comm),
    };
    let mut subject = Steps::open(&config, &comm)?;
    let update = of_update(&subject);
    let Some(folder) = config.zero.offload_optimizer.nvme_path.as_ref().filter(|_| update.written > 0) else {
        anyhow::bail!(
            "nothing that an update reads is on a disk\n  in: zero_optimization.offload_optimizer\n  \
             help: {{device: nvme, nvme_path: FOLDER}} puts it there"
        )
    };
    let before = moved(&subject);
    for _ in 0..WARM_UP {
        subject.step()?;
    }
    let after = moved(&subject);
    let count = WARM_UP as u64;
    let step = Moved { read: (after.read - before.read) / count, written: (after.written - before.written) / count };
    let mut floor = Floor::new(folder, step.read.max(step.written), in_memory(&subject))?;
    let (mut whole, mut updates) = (Times::default(), Times::default());
    for _ in 0..steps {
        let seen = subject.engine().timing().spans().len();
        whole.subject.push(subject.step()?.duration);
        let last = in_step(&subject, seen);
        updates.subject.push(last.update);
        updates.computing.push(last.updating);
        whole.computing.push(last.computing);
        for (times, bytes) in [(&mut updates, update), (&mut whole, step)] {
            comm.barrier().wait()?;
            times.floor.push(floor.run(bytes.read, bytes.written)?);
        }
    }
    if comm.rank() == 0 {
        println!("{cores}");
        let (ranks, steps) = (counted(comm.size(), "rank", "ranks"), counted(steps, "step", "steps"));
        println!("{} parameters, {ranks}, {steps} after {WARM_UP}", subject.parameters());
        print("update", update, &updates);
        print("whole step", step, &whole);
    }
    comm.barrier().wait()?;
    Ok(0)
}

/// What the updates of a step move: tiles of state, with their gradients and parameters as far as those live there too.
fn of_update(subject: &Steps) -> Moved {
    let engine = subject.engine();
    let (zero, is_half) = (engine.zero(), engine.config().working_dtype() != Dtype::F32);
    let (width, kinds) = if is_half { (2, zero.state_names().len() + 1) } else { (4, zero.state_names().len()) };
    let mut update = Moved { read: 0, written: 0 };
    for (id, segment) in zero.layout().segments().iter().enumerate() {
        if !zero.holds(id) || !zero.owns(id) || segment.tiers.tiles == 0 {
            continue;
        }
        let elements = segment.shard(engine.replica()).len();
        let lives = |tier, width: usize| if tier == Tier::Nvme { (elements * width) as u64 } else { 0 };
        let written = lives(segment.tiers.optimizer, 4 * kinds) + lives(segment.tiers.parameters, width);
        update.written += written;
        update.read += written + lives(segment.tiers.gradients, 4);
    }
    update
}

/// Bytes of the tiles that are in memory at a time: what is read and written goes to and from these.
fn in_memory(subject: &Steps) -> usize {
    let (zero, config) = (subject.engine().zero(), subject.engine().config());
    // The states with a master if there is one, gradients, and parameters.
    let width = if config.working_dtype() == Dtype::F32 { 4 + 4 } else { 4 + 4 + 2 };
    config.zero.offload_optimizer.buffer_count * zero.layout().tile() * (4 * zero.state_names().len() + width)
}

/// What this rank's disk did so far.
fn moved(subject: &Steps) -> Moved {
    let used = subject.engine().zero().disk_use().unwrap_or_default();
    Moved { read: used.read, written: used.written }
}

/// Times in a step.
struct InStep {
    /// From the first read of a tile to the last write.
    update: Duration,
    /// Of the arithmetic in it.
    updating: Duration,
    /// Of all arithmetic.
    computing: Duration,
}

/// Times in the last step, whose spans begin at `seen`.
fn in_step(subject: &Steps, seen: usize) -> InStep {
    let engine = subject.engine();
    let instructions = &engine.program().instructions;
    let (mut start, mut end) = (Duration::MAX, Duration::ZERO);
    let (mut updating, mut computing) = (Duration::ZERO, Duration::ZERO);
    for span in &engine.timing().spans()[seen..] {
        match &instructions[span.index] {
            Instruction::UpdateTile { .. } => {
                updating += span.end - span.start;
                computing += span.end - span.start;
            }
            Instruction::Forward { .. }
            | Instruction::Recompute { .. }
            | Instruction::Backward { .. }
            | Instruction::BackwardInput { .. }
            | Instruction::BackwardWeight { .. }
            | Instruction::GradientNorm
            | Instruction::Update { .. } => {
                computing += span.end - span.start;
                continue;
            }
            Instruction::Fetch { item: Item::Tile { .. } }
            | Instruction::AwaitFetch { item: Item::Tile { .. } }
            | Instruction::Offload { item: Item::Tile { .. } }
            | Instruction::AwaitOffload { item: Item::Tile { .. } } => {}
            _ => continue,
        }
        (start, end) = (start.min(span.start), end.max(span.end));
    }
    InStep { update: end.saturating_sub(start), updating, computing }
}

fn print(what: &str, moved: Moved, times: &Times) {
    let megabytes = |bytes: u64| bytes as f64 / 1e6;
    println!("{what}: {:.1} MB read, {:.1} MB written", megabytes(moved.read), megabytes(moved.written));
    let rate = |times: &[Duration]| (moved.read + moved.written) as f64 / median(times).as_secs_f64().max(1e-9) / 1e9;
    println!("  subject                     {}  {:.2} GB/s", summary(&times.subject), rate(&times.subject));
    println!("  floor                       {}  {:.2} GB/s", summary(&times.floor), rate(&times.floor));
    println!("  arithmetic in the subject   {}", summary(&times.computing));
    let both = times.subject.iter().zip(&times.floor);
    let of_rate = both.clone().map(|(subject, floor)| floor.as_secs_f64() / subject.as_secs_f64() * 100.0);
    println!("  of the floor's rate         {}", spread(of_rate.collect(), 1, "%"));
    let bound = both.zip(&times.computing).map(|((subject, floor), computing)| (subject, floor.max(computing)));
    let times = bound.map(|(subject, bound)| subject.as_secs_f64() / bound.as_secs_f64());
    println!("  times the longer of floor and arithmetic {}", spread(times.collect(), 2, "×"));
}
