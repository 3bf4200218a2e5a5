//! Cost tables: the times of layers, transfers and the optimizer on this machine. A table is measured once and used by
//! every later plan.
//!
//! A table records the dtype, threads, ranks and micro-batch that it is valid for. Planning fails if the table lacks an
//! entry that the plan needs; the error names the entry. Only transfers of unmeasured sizes are estimated, from a line
//! through the measured sizes.

mod apply;
mod between;
pub mod cut;
mod fit;
pub mod forms;
mod measure;
pub(crate) mod overlap;
mod prediction;
pub mod subject;
mod table;
mod transfers;

pub use apply::costs;
pub use measure::{Length, Trainee, measure};
pub use overlap::{Choice, choose};
pub use prediction::{Prediction, RankTimes};
pub use table::CostTable;
