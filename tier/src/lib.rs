//! The disk tier: a swap file per rank that holds offloaded state outside the page cache.
//!
//! Each rank has one [`SwapFile`] in the folder that `nvme_path` names. The file's space is reserved before training
//! starts. The file has no name, so it disappears with the process, even after a crash, and never contains data of
//! another run. Reads and writes take ownership of an [`AlignedBuffer`] and return it on completion, so several
//! requests can be in flight while the program computes:
//!
//! ```
//! use zero_tier::{BufferPool, Options, SwapFile, align};
//!
//! # let folder = std::env::temp_dir();
//! let pool = BufferPool::new();
//! let file = SwapFile::create(&folder, 1 << 20, &Options::default())?;
//! let mut moments = pool.take(4 * 1000)?;
//! moments.as_f32_mut().fill(0.5);
//! let len = align(4 * 1000) as usize;
//! let written = file.write(8192, moments, len);
//! let read = file.read(8192, pool.take(4 * 1000)?, len); // overlaps the write, so it sees what is written
//! // … compute something else meanwhile …
//! pool.put(written.wait()?);
//! assert_eq!(read.wait()?.as_f32(), [0.5; 1000]);
//! # Ok::<(), zero_tier::DiskError>(())
//! ```
//!
//! [`SwapFile::read_vec`] and [`SwapFile::write_vec`] do the same for vectors. A vector whose first element is at a
//! page boundary is transferred in place, or through huge pages if [`Options::bounce`] is set.
//!
//! Internally, a `Schedule` cuts requests into blocks and decides which block may run next. A `Queue` adds memory,
//! results and counters. io_uring (`ring`) or threads with positioned reads and writes (`positioned`) carry the blocks
//! out. `place` finds the folder and reserves the file.

mod bounce;
mod buffer;
mod error;
mod file;
mod loan;
pub mod measure;
mod pages;
mod place;
mod positioned;
mod queue;
mod ring;
mod schedule;
mod vectors;

pub use buffer::{ALIGNMENT, AlignedBuffer, BufferPool, PoolUsage, align};
pub use error::DiskError;
pub use file::{Backend, Options, SwapFile, io_uring};
pub use pages::{mapped, mapped_peak, observe_mapped, reset_mapped_peak};
pub use place::{check, free_bytes};
pub use queue::{Pending, Statistics};
pub use vectors::{PendingVec, lies_on_pages};
