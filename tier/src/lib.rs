//! The disk as a tier of memory: state that a rank does not need just now, in a file past the page cache.
//!
//! A rank has one [`SwapFile`] in the folder that `nvme_path` names. Its space is reserved before anything runs, it has no name, so it
//! is gone with the process however that ends, and what it holds never was another run's. Reads and writes take an
//! [`AlignedBuffer`] and give it back when they are done, so that several are under way while the program computes:
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
//! [`SwapFile::read_vec`] and [`SwapFile::write_vec`] do the same for vectors, where they are if their elements begin on a page, or
//! through huge pages (`bounce`), as [`Options`] says.
//!
//! How it is built: a `Schedule` cuts requests into blocks and says which may go next; a `Queue` puts memory, results and
//! counters to it; io_uring (`ring`) or threads with positioned reads and writes (`positioned`) carry blocks out. `place` finds and
//! reserves the file.

pub mod bench;
mod bounce;
mod buffer;
mod error;
mod file;
mod loan;
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
pub use place::check;
pub use queue::{Pending, Statistics};
pub use vectors::{PendingVec, lies_on_pages};
