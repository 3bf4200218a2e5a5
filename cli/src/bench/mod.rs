//! `zero-train bench`: benchmarks on this machine. Most of them alternate their subject with a floor: the simplest
//! program that does the same work.

mod arrays;
mod codes;
mod comm;
mod costs;
mod figures;
mod floors;
mod io;
mod offload;
mod ops;
mod optimizers;
mod pipeline;
mod profile;
mod ranks;
mod save;
mod step;

use arrays::{adamw, against_floor};
use figures::{spread, summary};

pub(crate) use comm::comm;
pub(crate) use costs::costs;
pub(crate) use io::io;
pub(crate) use offload::offload;
pub(crate) use ops::{Selection, ops};
pub(crate) use optimizers::optimizers;
pub(crate) use pipeline::pipeline;
pub(crate) use profile::profile;
pub(crate) use save::save;
pub(crate) use step::{Length, step};

/// Times AdamW on one thread, alternating with its floor. Returns the exit status.
///
/// # Errors
/// Never fails; all benchmarks have this signature.
pub(crate) fn adam(millions: usize, repeats: usize) -> anyhow::Result<u8> {
    let times = against_floor(&adamw(), millions * 1_000_000, repeats);
    println!("AdamW on {millions} million f32 parameters, one thread; {repeats} runs alternate with runs of the floor");
    println!("  AdamW                       {}", summary(&times.subject));
    println!("  floor: reads 4, writes 3    {}", summary(&times.floor));
    println!("  share of the floor's rate   {}", spread(times.shares(1.0), 1, "%"));
    Ok(0)
}
