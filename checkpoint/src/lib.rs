//! Checkpoints: safetensors shards and one JSON manifest, committed atomically, loaded into any layout.
//!
//! A checkpoint is a folder `step-00000100` with one `shard-….safetensors` a rank and `manifest.json`. Each rank
//! writes its shard of every parameter, in f32, and of the optimizer state, at every ZeRO stage; so all shards
//! together hold each element once, and a reader with another layout takes just the ranges that it needs.
//!
//! The folder is written under another name, synced, and renamed when every rank is done: a folder that is called
//! `step-…` is complete. `latest` names the newest, for people; loading trusts the manifests. [`Background`] writes a copy of the
//! state while the ranks train on; [`RunLock`] keeps a second run out of the folder.
//!
//! [`verify()`] finds and names what is not as it was written; [`export()`] writes the parameters as Hugging Face's libraries read them;
//! [`load_pretrained`] starts a model from a Hugging Face folder, [`import`] makes a checkpoint of one, and [`load_weights`] takes plain
//! safetensors files.

mod commit;
mod error;
mod export;
mod failpoint;
mod folders;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod import;
mod layout;
mod load;
mod lock;
mod manifest;
mod pretrained;
mod save;
mod shard;
mod snapshot;
mod tensors;
mod together;
mod verify;
mod weights;
mod writer;

pub use error::CheckpointError;
pub use export::{Export, ExportDtype, Exported, export};
pub use failpoint::{FAILPOINTS, failpoints};
pub use folders::{committed, meant, newest, newest_meant, set_back, write_rate};
pub use import::import;
pub use load::load;
pub use lock::RunLock;
pub use manifest::{FORMAT, LossScale, Manifest, ParameterEntry, PieceEntry, ShardEntry, VERSION};
pub use pretrained::{check_pretrained, load_pretrained};
pub use save::{Background, Progress, Save, save};
pub use snapshot::Snapshot;
pub use verify::{Damage, verify};
pub use weights::load_weights;
