//! The only code that knows `ds.yaml`: DeepSpeed's keys, as typed and resolved.

mod choice;
mod config;
mod errors;
mod origin;
mod yaml_out;

pub use config::*;
pub use errors::{Error, ErrorKind, Errors, Place, Spot, Warning};
pub use origin::{Origin, Origins};
