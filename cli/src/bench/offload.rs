//! `zero-train bench offload`: times the training steps of a configuration with state on a disk, alternating with plain
//! I/O on the same disk.
//!
//! Most I/O belongs to the update: it fetches, updates and writes back each tile of optimizer state, overlapped with
//! the transfers of other tiles. The benchmark times the update inside real steps. The floor reads and writes the same
//! number of bytes with the same amount of memory, and bypasses the page cache. If the arithmetic of the update takes
//! longer than this I/O, the arithmetic is the floor.

use std::time::Duration;

use zero_engine::counted;
use zero_pipeline::{Instruction, Item, Tier};
use zero_tier::{Options, SwapFile};
use zero_train::train::Steps;

use super::figures::{Comparison, median, spread, summary};
use super::floors::disk::Floor;
use super::ranks::{Role, WARM_UP, take_part};
use crate::arguments::ConfigArgs;

/// Bytes read, and bytes written.
type Moved = [u64; 2];

/// Times of the update, of plain I/O with the same number of bytes (the floor), and of the update's arithmetic. Each
/// list has one entry per step.
#[derive(Debug, Default)]
struct Times {
    io: Comparison,
    computing: Vec<Duration>,
}

/// Times whole steps and the update in each of them. Returns the exit status.
///
/// Rank 0 prints its own times. All ranks run the floor at the same time, because they share the disk.
///
/// # Errors
/// Fails if training would fail, or if the configuration offloads no optimizer state to a disk.
pub(crate) fn offload(args: &ConfigArgs, steps: usize) -> anyhow::Result<u8> {
    // The start and end of the update come from the timeline, which needs `training.trace`.
    let traced = ConfigArgs { set: [&args.set[..], &["training.trace=true".into()]].concat(), ..args.clone() };
    let (config, cores, comm) = match take_part(&traced)? {
        Role::Launcher(status) => return Ok(status),
        Role::Rank { config, cores, comm } => (config, cores, comm),
    };
    let mut subject = Steps::open(&config, &comm)?;
    let update = of_update(&subject);
    let Some(folder) = config.zero.offload_optimizer.nvme_path.as_ref().filter(|_| update[1] > 0) else {
        anyhow::bail!(
            "no optimizer state is offloaded to a disk\n  in: zero_optimization.offload_optimizer\n  \
             help: set it to {{device: nvme, nvme_path: FOLDER}}"
        )
    };
    let before = moved(&subject);
    for _ in 0..WARM_UP {
        subject.step()?;
    }
    let after = moved(&subject);
    let step = [0, 1].map(|way| (after[way] - before[way]) / WARM_UP as u64);
    let (mut floor, size) = (Floor::new(in_memory(&subject))?, step[0].max(step[1]));
    let file = SwapFile::create(folder, size, &Options::default())?;
    // A file system does not access the disk to read ranges that were never written.
    floor.run(&file, [0, size])?;
    let (mut whole, mut updates) = (Times::default(), Times::default());
    for _ in 0..steps {
        let seen = subject.engine().timing().spans().len();
        whole.io.subject.push(subject.step()?.duration);
        let last = in_step(&subject, seen);
        updates.io.subject.push(last.update);
        updates.computing.push(last.updating);
        whole.computing.push(last.computing);
        for (times, bytes) in [(&mut updates, update), (&mut whole, step)] {
            comm.barrier().wait()?;
            times.io.floor.push(floor.run(&file, bytes)?);
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

/// Returns the bytes that the updates of one step read and write: tiles of optimizer state, plus gradients and
/// parameters if they are offloaded too.
fn of_update(subject: &Steps) -> Moved {
    let engine = subject.engine();
    let (zero, widths) = (engine.zero(), engine.zero().widths());
    let [mut read, mut written] = [0; 2];
    for (id, segment) in zero.layout().segments().iter().enumerate() {
        if !zero.holds(id) || !zero.owns(id) || segment.tiers.tiles == 0 {
            continue;
        }
        let elements = segment.shard(zero.groups().at().shard).len();
        let lives = |tier, bytes: usize| if tier == Tier::Nvme { bytes as u64 } else { 0 };
        let states = segment.state_bytes(elements, &widths) + elements * widths.master;
        let own = lives(segment.tiers.optimizer, states) + lives(segment.tiers.parameters, elements * widths.parameter);
        let passes = 1 + u64::from(segment.tiers.two_passes);
        written += passes * own;
        read += passes * (own + lives(segment.tiers.gradients, elements * 4));
    }
    [read, written]
}

/// Returns the size of the buffers for tiles in flight, in bytes. The floor uses the same amount of memory.
fn in_memory(subject: &Steps) -> usize {
    let (zero, config) = (subject.engine().zero(), subject.engine().config());
    let (widths, tile) = (zero.widths(), zero.layout().tile());
    let states = zero.layout().segments().iter().map(|segment| segment.state_bytes(tile, &widths)).max().unwrap_or(0);
    // In addition to the states, a tile has a gradient, a master copy and a parameter.
    config.zero.offload_optimizer.buffer_count * (states + tile * (4 + widths.master + widths.parameter))
}

/// Returns the bytes that this rank has read from and written to its disk so far.
fn moved(subject: &Steps) -> Moved {
    let used = subject.engine().zero().disk_use().unwrap_or_default();
    [used.read, used.written]
}

/// Durations within one step.
struct InStep {
    /// Time from the first read of a tile to the last write of a tile.
    update: Duration,
    /// Total time of the arithmetic of the update.
    updating: Duration,
    /// Total time of all arithmetic in the step.
    computing: Duration,
}

/// Returns the times of the last step; its spans begin at index `seen`.
fn in_step(subject: &Steps, seen: usize) -> InStep {
    let engine = subject.engine();
    let instructions = &engine.program().instructions;
    let (mut start, mut end) = (Duration::MAX, Duration::ZERO);
    let (mut updating, mut computing) = (Duration::ZERO, Duration::ZERO);
    for span in &engine.timing().spans()[seen..] {
        match &instructions[span.index] {
            Instruction::MeasureTile { .. } | Instruction::UpdateTile { .. } => {
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
    let [read, written] = moved.map(|bytes| bytes as f64 / 1e6);
    println!("{what}: {read:.1} MB read, {written:.1} MB written");
    let rate = |times: &[Duration]| (read + written) / median(times).as_secs_f64().max(1e-9) / 1e3;
    let Comparison { subject, floor } = &times.io;
    println!("  subject                     {}  {:.2} GB/s", summary(subject), rate(subject));
    println!("  floor                       {}  {:.2} GB/s", summary(floor), rate(floor));
    println!("  arithmetic in the subject   {}", summary(&times.computing));
    println!("  share of the floor's rate   {}", spread(times.io.shares(1.0), 1, "%"));
    let floor = floor.iter().zip(&times.computing).map(|(floor, computing)| *floor.max(computing)).collect();
    let bounded = Comparison { subject: subject.clone(), floor };
    println!("  time / max(floor, arithmetic) {}", spread(bounded.ratios(), 2, "×"));
}
