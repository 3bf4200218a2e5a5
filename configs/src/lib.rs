//! The configuration of a run: parses and resolves `ds.yaml`. No other crate interprets DeepSpeed's keys.
//!
//! Configurations are read in two phases. [`load`] parses YAML or JSON into a [`Typed`]: the values as written,
//! each checked against its key and located by line and column or by its `--set`. [`Typed::resolve`] turns it into
//! a [`Config`]: it fills in every default and `auto`, checks keys against each other, and records the [`Origin`]
//! of each value. The errors of both phases are reported together in one [`Errors`]. [`edit`] changes values in the
//! text itself.
//!
//! ```
//! let config = zero_config::Config::parse("ds.yaml", "train_micro_batch_size_per_gpu: 4\nzero_optimization: {stage: 3}").unwrap();
//! assert_eq!(config.train_batch_size, 4);
//! assert_eq!(config.zero.overlap_comm, Some(true));
//!
//! let errors = zero_config::Config::parse("ds.yaml", "train_batch_size: 8\nzero_optimization:\n  stagee: 3").unwrap_err();
//! assert_eq!(
//!     errors.to_string(),
//!     "error: unknown key `zero_optimization.stagee`\n  \
//!        in: zero_optimization.stagee (ds.yaml:3:3)\n      \
//!            3 |   stagee: 3\n        \
//!              |   ^^^^^^\n  \
//!        help: did you mean `stage`?"
//! );
//! ```

mod batch;
mod builder;
mod bytes;
mod changes;
mod check;
mod choice;
mod config;
mod errors;
mod facts;
mod hugging_face;
mod load;
mod nearest;
mod origin;
mod pages;
mod path;
mod pretrained;
mod read;
mod report;
mod resolve;
mod rules;
mod schema;
mod space;
mod table;
mod typed;
mod value;
mod world;
mod write;

pub use builder::Builder;
pub use bytes::bytes;
pub use config::*;
pub use errors::{Error, ErrorKind, Errors, Place, Spot, Warning};
pub use load::{load, load_files};
pub use origin::{Origin, Origins};
pub use pages::deepspeed::deepspeed_keys;
pub use pages::reference::reference;
pub use pretrained::{FetchPretrained, address, fetch_pretrained_with, is_address};
pub use read::parse::yaml;
pub use read::source::{Source, relative_paths_begin};
pub use typed::Typed;
pub use write::edit::edit;
