//! Options of `checkpoint`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

/// Options of `checkpoint`.
#[derive(Debug, Args)]
pub(crate) struct CheckpointArgs {
    /// The command.
    #[command(subcommand)]
    pub(crate) what: Checkpoint,
}

/// Options of `checkpoint export` and `checkpoint merge`.
#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// Folder of a checkpoint, or of a run to use its newest checkpoint
    #[arg(value_name = "DIR")]
    pub(crate) folder: PathBuf,
    /// Output folder, or a store URL such as s3://bucket/model; must be new or empty
    #[arg(long, value_name = "FOLDER")]
    pub(crate) out: PathBuf,
    /// Data type of the weights
    #[arg(long, value_enum, default_value_t = Floats::F32)]
    pub(crate) dtype: Floats,
    /// Export the moving averages that training.ema keeps instead of the weights; the averages of AdamWScheduleFree are
    /// always exported
    #[arg(long)]
    pub(crate) ema: bool,
    /// Maximum size of the tensors in one file
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = size)]
    pub(crate) max_shard_size: u64,
}

/// The commands for checkpoints.
#[derive(Debug, Subcommand)]
pub(crate) enum Checkpoint {
    /// Print a checkpoint's step, layout and parameters, and the shards that contain them
    Inspect {
        /// Folder of a checkpoint, or of a run to use its newest checkpoint
        #[arg(value_name = "DIR")]
        folder: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Read a whole checkpoint and list each damaged shard and tensor; exit status 1 if anything is damaged
    Verify {
        /// Folder of a checkpoint, or of a run to verify all its checkpoints
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
    /// Convert a Hugging Face model folder to a checkpoint at step 0 that training can resume from
    Import {
        /// Folder with config.json and model.safetensors, or with several safetensors files and their index
        #[arg(value_name = "DIR")]
        folder: PathBuf,
        /// Folder without checkpoints, in which step-00000000 is created
        #[arg(long, value_name = "FOLDER")]
        out: PathBuf,
    },
    /// Write the weights as a Hugging Face model: safetensors, config.json, tokenizer
    Export(ExportArgs),
    /// Merge trained LoRA adapters into the weights of their base model, and export it for Hugging Face's libraries
    Merge(ExportArgs),
}

/// The data types of exported weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Floats {
    /// Unchanged
    F32,
    /// Rounded
    Bf16,
    /// Rounded; fails if a value is too large
    F16,
}

pub(super) fn size(text: &str) -> Result<u64, String> {
    zero_config::bytes(text).ok_or_else(|| "give a number of bytes, or a size such as 80GiB or 800MB".to_string())
}
