//! ZeRO: the assignment of model state to ranks, the passes that add ZeRO's communication to a step, and the gathers,
//! reductions and updates themselves.
//!
//! ZeRO stages are not separate types. A [`Layout`] records for each segment whether parameters, gradients and
//! optimizer state are replicated or sharded; [`passes`] derive the program from it; [`ShardedState`] executes the
//! instructions.

mod accounting;
mod accumulator;
mod coded;
mod disk;
mod error;
mod gpu;
mod grad_buffer;
mod gradients;
mod groups;
mod layout;
mod leaves;
mod narrow;
mod optimizer;
mod options;
mod outer;
mod parameters;
pub mod passes;
mod placement;
mod pool;
mod rank;
mod reductions;
mod rounding;
mod secondary;
mod segment;
mod states;
mod storage;
mod threads;
mod trust;
mod zero;

pub use accounting::expected::{
    Payload, StateBytes, expected_payload, expected_state, expected_tensor_sum, shared_elements, state_formula,
};
pub use accounting::ledger::{CATEGORIES, Category, Ledger};
pub use accounting::network::{HostBytes, Hosts, Route, bytes_on_route};
pub use accumulator::Order;
pub use coded::CodedLevel;
pub use disk::{DiskBytes, DiskUse, disk_buffers, disk_bytes};
pub use error::ZeroError;
pub use gpu::{gpu_copy, gpu_room};
pub use grad_buffer::Grads;
pub use groups::Groups;
pub use layout::{Layout, LayoutOptions, PAGE, TierOptions};
pub use narrow::{Stochastic, Values, update};
pub use options::{Coded, DiskOptions, OnGpu, OuterOptions, OuterShare, Widths, ZeroOptions};
pub use rounding::{to_f32, working};
pub use segment::{Matrix, Piece, Segment, part_of_state};
pub use storage::gpu_tensor;
pub use threads::{adafactor_states, muon_states, update_matrix};
pub use zero::{Kind, Range, ShardedState, longest_kept};
