//! The cost table: what things take on this machine, measured once and read by every plan after.
//!
//! A table says for which dtype, threads, ranks and micro-batch it holds. What a plan needs and it has not is an error that names it;
//! nothing is guessed but the time of a transfer, which is on a line through those that were measured.

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

pub use apply::costs;
pub use measure::{Length, Trainee, measure};
pub use overlap::{Choice, choose};
pub use prediction::{Prediction, RankTimes};
pub use table::CostTable;
