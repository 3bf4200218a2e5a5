//! Collectives and point-to-point messages between ranks, over threads of one process, shared memory of one host, or
//! TCP.
//!
//! [`threads`] creates all ranks as threads of this process; [`connect`] joins this process to a job of several
//! processes. Both return a [`Communicator`], which behaves the same with every transport:
//!
//! ```
//! use zero_comm::{Buffer, Options, ReduceOp, threads};
//!
//! let ranks = threads(4, &Options::default());
//! let work = ranks.into_iter().map(|comm| {
//!     std::thread::spawn(move || {
//!         let mine = Buffer::from(vec![comm.rank() as f32; 3]);
//!         let pending = comm.all_reduce(mine, ReduceOp::Sum);
//!         // … compute something else in the meantime …
//!         pending.wait()?.into_f32()
//!     })
//! });
//! for rank in work.collect::<Vec<_>>() {
//!     assert_eq!(rank.join().unwrap().unwrap(), vec![6.0; 3]);
//! }
//! ```
//!
//! # Implementation
//!
//! A `Group` checks arguments, orders operations, counts them and maps failures to errors. It hands each operation to a
//! `Lane`, a worker thread, which runs it on an endpoint of a `Fabric`. There are two fabrics. Ranks that are threads
//! of one process read each other's buffers directly. Ranks that are processes exchange streams of chunks through rings
//! in shared memory or through sockets. One engine (`stream`) runs every collective over these streams. In a program
//! that uses the [`SharedAllocator`], processes on one host also access each other's buffers, and only headers pass
//! through the rings. In an all_to_all, no rank knows what the others exchange, so every two ranks compare their
//! counts. Each part goes from one buffer to the other and needs no further memory (`parts`). For buffers in device
//! memory, the ranks first synchronize over their fabric, and then a [`DeviceFabric`] from another crate moves the data
//! (`device`).

mod agreement;
mod auth;
mod bell;
mod buffers;
mod collective;
mod communicator;
mod connect;
mod device;
mod doorkeeper;
mod each_rank;
mod error;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod group;
mod health;
mod hierarchy;
mod inquiry;
mod lane;
pub mod launcher_environment;
mod lock;
pub mod measure;
mod pending;
mod processes;
mod shm;
pub mod store;
mod stream;
mod tcp;
mod threads;
pub mod token;
mod tree;

pub use agreement::agree;
pub use buffers::buffer::Buffer;
pub use buffers::dtype::Dtype;
pub use buffers::ranges::even_counts;
pub use buffers::{copy, heap};
pub use collective::reduction::{ReduceOp, Reduction};
pub use collective::signature::Operation;
pub use collective::stats::{Counter, SizeCounter, Stats};
pub use communicator::{Communicator, Exchanged, Gathered, Options, ProcessTransport, Scattered, ToGather, ToScatter};
pub use connect::connect;
pub use device::{
    DeviceBuffer, DeviceEvent, DeviceFabric, DeviceLane, DeviceMemory, DeviceWork, INVITATION, ShardedMemory,
    flat_block,
};
pub use each_rank::from_each_rank;
pub use error::CommError;
pub use hierarchy::cells;
pub use launcher_environment::{LauncherEnvironment, LauncherEnvironmentError};
pub use pending::Pending;
pub use shm::{SharedAllocator, shared_memory};
/// Bytes that the TCP transport buffers for each peer of a group.
pub use tcp::CHUNK as TCP_CHUNK;
pub use tcp::bind_address;
pub use threads::threads;
pub use tree::{reduce_everywhere, reduce_into};
