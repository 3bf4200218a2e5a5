//! Collectives and point-to-point messages between ranks, over threads of one process, shared memory of one host, or TCP.
//!
//! [`threads`] makes a world of threads, [`connect`] joins this process to a world of processes; both give a
//! [`Communicator`], and nothing behind it can tell which:
//!
//! ```
//! use zero_comm::{Buffer, Options, ReduceOp, threads};
//!
//! let ranks = threads(4, &Options::default());
//! let work = ranks.into_iter().map(|comm| {
//!     std::thread::spawn(move || {
//!         let mine = Buffer::from(vec![comm.rank() as f32; 3]);
//!         let pending = comm.all_reduce(mine, ReduceOp::Sum);
//!         // … compute something else meanwhile …
//!         pending.wait()?.into_f32()
//!     })
//! });
//! for rank in work.collect::<Vec<_>>() {
//!     assert_eq!(rank.join().unwrap().unwrap(), vec![6.0; 3]);
//! }
//! ```
//!
//! How it is built: `Group` (arguments, order, counters, errors) hands each operation to a `Lane` (a worker thread), which
//! carries it out on the endpoints of a `Fabric`. There are two fabrics. Threads read each other's buffers. Processes exchange
//! streams of chunks, and one engine (`stream`) runs every collective over them, whether a chunk goes through a ring in shared
//! memory or a socket. In a program that declares the [`SharedAllocator`], processes of one host reach each other's buffers
//! as well, and only headers go through the rings. Buffers in the memory of devices go behind a `DeviceFabric` of another crate, once the
//! ranks have met for the operation over their own fabric (`device`).

mod agreement;
mod auth;
mod bell;
pub mod bench;
mod buffer;
mod communicator;
mod connect;
pub mod copy;
mod device;
mod doorkeeper;
mod error;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod group;
mod health;
pub mod heap;
mod hierarchy;
mod inquiry;
mod lane;
pub mod launcher_environment;
mod pending;
mod processes;
mod shm;
mod signature;
mod stats;
mod step;
pub mod store;
mod stream;
mod tcp;
mod threads;
pub mod token;
mod tree;

pub use buffer::{Buffer, Dtype};
pub use communicator::{Communicator, Gathered, Options, ReduceOp, Scattered, Transport};
pub use connect::connect;
pub use device::{DeviceBuffer, DeviceFabric, DeviceLane, DeviceMemory, DeviceWork, INVITATION};
pub use error::CommError;
pub use launcher_environment::{LauncherEnvironment, LauncherEnvironmentError};
pub use pending::Pending;
pub use shm::{SharedAllocator, shared_memory};
pub use signature::Operation;
pub use stats::{Counter, SizeCounter, Stats};
/// Bytes that TCP keeps for each peer of a group.
pub use tcp::CHUNK as TCP_CHUNK;
pub use tcp::bind_address;
pub use threads::threads;
