//! Checkpoints: safetensors shards and one JSON manifest, committed atomically and loadable into any layout.
//!
//! A checkpoint is a folder `step-00000100` with one `shard-….safetensors` per rank and a `manifest.json`. At every
//! ZeRO stage, each rank writes its shard of every parameter, in f32, and of the optimizer state. All shards together
//! hold each element once, and a reader with another layout reads only the ranges that it needs.
//!
//! A save writes the folder under a temporary name, syncs it, and renames it when every rank is done, so a folder
//! `step-…` with a manifest is complete. `latest` names the newest checkpoint for human readers; loading relies on the
//! manifests. [`Background`] writes a copy of the state while the ranks keep training. [`RunLock`] prevents a second
//! run from writing the same folder.
//!
//! [`verify()`] finds and names damaged files and tensors. [`export()`] writes the parameters in the format of Hugging
//! Face's libraries. [`load_pretrained`] initializes a model from a Hugging Face folder, [`import`] converts such a
//! folder into a checkpoint, and [`load_weights`] reads plain safetensors files.

mod commit;
mod convert;
mod error;
mod failpoint;
mod folders;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod layout;
mod load;
mod local;
mod lock;
mod manifest;
mod retention;
mod save;
mod shard;
mod snapshot;
mod source;
mod tensors;
mod together;
mod verify;
mod weights;
mod whole;
mod writer;

pub use convert::export::{Contents, Export, ExportDtype, Exported, FOLDED, export};
pub use convert::import::import;
pub use convert::merge::{Merge, is_of_adapter};
pub use convert::pretrained::{check_pretrained, load_pretrained};
pub use error::CheckpointError;
pub use failpoint::{FAILPOINTS, failpoints};
pub use folders::{committed, meant, name, newest, newest_meant, set_back, step, superseded, write_rate};
pub use load::{load, load_to_evaluate};
pub use lock::RunLock;
pub use manifest::{
    CutEntry, FORMAT, LocalPiece, LocalSteps, LossScale, MANIFEST, Manifest, ParameterEntry, PieceEntry, ShardEntry,
    VERSION,
};
pub use retention::Retention;
pub use save::{Background, Progress, Save, save};
pub use snapshot::Snapshot;
pub use together::patiently;
pub use verify::{Damage, verify};
pub use weights::{load_adapter, load_weights};
pub use whole::{fill_base_from_checkpoint, fill_from_adapter, fill_from_checkpoint, fill_from_pretrained};
pub use zero_tier::free_bytes;
