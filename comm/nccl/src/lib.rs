//! A communicator over NCCL, for buffers in the memory of NVIDIA's GPUs.
//!
//! `attach` makes of a group on the host one that also takes [`DeviceBuffer`](zero_comm::DeviceBuffer)s, such as a `DeviceVector`:
//!
//! ```
//! # #[cfg(feature = "cuda")]
//! # mod example {
//! use zero_comm::{Buffer, Communicator, ReduceOp};
//! use zero_nccl::DeviceVector;
//!
//! fn sum_of_ones(host: &dyn Communicator, local_rank: usize) -> Result<Buffer, Box<dyn std::error::Error>> {
//!     let device = zero_cuda::Device::open(local_rank)?;
//!     let comm = zero_nccl::attach(host, &device)?;
//!     let vector = DeviceVector::upload(&Buffer::from(vec![1f32; 1000]), &device)?;
//!     Ok(comm.all_reduce(vector.into(), ReduceOp::Sum).wait()?)
//! }
//! # }
//! ```
//!
//! Before every operation the ranks meet on the host, each with what it is about to do. That is how a rank that is missing, or does
//! something else, is found and named, instead of left to NCCL, which would wait for ever or mix up memory. It costs a barrier of the host's
//! transport for each operation, some microseconds within a host and some tens between hosts, against the milliseconds of a bucket.
//! There is no switch: what NCCL does when ranks disagree is undefined. An operation is begun when the host has seen the end of the one
//! before it on the same connection, so between two there is a gap of about as long again: few large operations are better than many.
//!
//! What NCCL does not promise, and so this does not either: its sums have an order of its own, and 16-bit floats are rounded on the way.
//! They have the same bits on all ranks and in every run of one layout on the same machines, not in another layout and not those of the host's
//! transports. `Max` of values among which there is a NaN is not said.
//!
//! A group has a connection of NCCL's for its collectives, and one for the messages with each peer in each direction, made when it is first
//! used, each with a stream of its own. Kernels of several of them are on the device at once: set `CUDA_DEVICE_MAX_CONNECTIONS=32`, so that
//! they do not queue behind each other, and mind that each takes some megabytes of the device's memory. While they wait for each other no
//! kernel should be loaded: set `CUDA_MODULE_LOADING=EAGER`. `zero-train` sets both for its ranks.

#[cfg(feature = "cuda")]
mod fabric;
#[cfg(feature = "cuda")]
mod lane;
#[cfg(feature = "cuda")]
mod vector;

#[cfg(feature = "cuda")]
pub use fabric::{attach, attach_recorded};
#[cfg(feature = "cuda")]
pub use vector::DeviceVector;
