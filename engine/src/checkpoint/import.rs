//! Imports a Hugging Face folder as a checkpoint at step 0.

use std::path::{Path, PathBuf};

use candle_core::DType;
use serde_json::json;
use zero_config::{Config, Warning};

use crate::checkpoint::export::recorded;
use crate::configured_model;
use crate::error::Error;

/// Imports the weights of a Hugging Face folder, of any type that `model.pretrained` accepts, as the checkpoint
/// `root/step-00000000`. It holds only parameters, in f32; training from it starts with fresh optimizer state, under
/// any layout. Returns the path of the checkpoint, and a warning for each key of the folder's `config.json` that has no
/// effect.
///
/// # Errors
/// Fails if `config.json` asks for unsupported features, weights are missing or do not match it, `root` contains
/// checkpoints, or a file cannot be read or written.
pub fn import(folder: &Path, root: &Path) -> Result<(PathBuf, Vec<Warning>), Error> {
    // Check this here, because the error of `model.pretrained` would name a key that the user did not write.
    let file = folder.join("config.json");
    if !file.is_file() {
        let help = "give a folder that `save_pretrained` of Hugging Face's transformers wrote";
        return Err(Error::setting("<DIR>", format!("{} does not exist", file.display()), help));
    }
    let path = |path: &Path| path.display().to_string();
    let mut text = json!({"train_micro_batch_size_per_gpu": 1, "model": {"pretrained": path(folder)}});
    let tokenizer = folder.join("tokenizer.json");
    if tokenizer.is_file() {
        // Record the tokenizer, so that an export can copy it. The data files are not read.
        text["data"] = json!({"train": "none", "tokenizer": path(&tokenizer)});
    }
    let config = Config::parse("checkpoint import", text.to_string())?;
    let model = configured_model::from_config(&config, None)?.build(DType::F32)?;
    Ok((zero_checkpoint::import(folder, &model, root, recorded(&config))?, config.warnings))
}
