//! A Hugging Face folder as a checkpoint at step 0.

use std::path::{Path, PathBuf};

use candle_core::DType;
use serde_json::json;
use zero_config::{Config, Warning};

use crate::checkpoint::export::recorded;
use crate::configured_model;
use crate::error::Error;

/// Writes the weights of a Hugging Face folder (GPT-2, Llama, Mistral or Qwen2) as the checkpoint `root/step-00000000`: parameters alone
/// in f32, from which any layout goes on with an optimizer at its start. Returns its path, and what of the folder's `config.json`
/// has no effect.
///
/// # Errors
/// `config.json` asks for what is not there, weights are missing or do not fit, there are checkpoints in `root`, or a file cannot be
/// read or written.
pub fn import(folder: &Path, root: &Path) -> Result<(PathBuf, Vec<Warning>), Error> {
    // The key of `model.pretrained`, which reads it too, is none of the user's.
    let file = folder.join("config.json");
    if !file.is_file() {
        let help = "name a folder as `save_pretrained` of Hugging Face's transformers writes it";
        return Err(Error::setting("<DIR>", format!("{} is not there", file.display()), help));
    }
    let path = |path: &Path| path.display().to_string();
    let mut text = json!({"train_micro_batch_size_per_gpu": 1, "model": {"pretrained": path(folder)}});
    let tokenizer = folder.join("tokenizer.json");
    if tokenizer.is_file() {
        // So that an export has it; nothing is read of the data.
        text["data"] = json!({"train": "none", "tokenizer": path(&tokenizer)});
    }
    let config = Config::parse("checkpoint import", text.to_string())?;
    let model = configured_model::from_config(&config, None)?.build(DType::F32)?;
    Ok((zero_checkpoint::import(folder, &model, root, recorded(&config))?, config.warnings))
}
