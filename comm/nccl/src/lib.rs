//! A communicator over NCCL, for buffers in the memory of NVIDIA GPUs.
//!
//! `attach` turns a host group into one that also accepts [`DeviceBuffer`](zero_comm::DeviceBuffer)s, such as a
//! `DeviceVector`:
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
//! # Synchronization
//!
//! By default, the ranks synchronize on the host before every operation, each with the signature of its call. If a rank
//! is missing or calls another operation, the error names this rank; NCCL itself would hang or corrupt memory. The cost
//! is one barrier of the host transport per operation: some microseconds within a host and some tens of microseconds
//! between hosts. An operation starts only when the host has seen the end of the previous one on the same connection,
//! so between two operations the GPU is idle for about as long as the barrier takes.
//!
//! Ranks that know that they make the same calls can run ahead ([`Communicator::run_ahead`]): a result is returned as
//! soon as the GPU has the operation in its queue, and collectives are not compared. NCCL's behaviour is undefined if
//! the ranks disagree after all; usually the collective ends at its deadline. `zero-train` compares the validated
//! programs of all ranks before it runs ahead. The two ranks of a message still meet, because a receive that starts
//! early would occupy the GPU until the sender has computed the values.
//!
//! [`Communicator::run_ahead`]: zero_comm::Communicator::run_ahead
//!
//! # Numerics
//!
//! NCCL chooses the order of its sums and rounds 16-bit floats in intermediate steps. Results are bit-identical on all
//! ranks and in every run of one layout on the same machines. They can differ between layouts, and they can differ from
//! the results of the host transports. The result of `Max` is unspecified if any value is NaN.
//!
//! # Environment
//!
//! A group has one NCCL connection for its collectives and two per peer: one for messages to the peer, one for messages
//! from it. Each connection is created on first use and has its own stream. Kernels of several connections run on the
//! device at the same time: set `CUDA_DEVICE_MAX_CONNECTIONS=32` so that they do not queue behind each other. Each
//! connection takes some megabytes of device memory. Loading another kernel while NCCL's kernels wait for other ranks
//! can deadlock: set `CUDA_MODULE_LOADING=EAGER`. `zero-train` sets both for its ranks.

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
