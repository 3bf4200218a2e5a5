//! Arguments of `generate`.

use std::path::PathBuf;

use clap::Args;

/// Options of `generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// Folder of a run or a checkpoint, an export, or a Hugging Face model: config.json, safetensors, tokenizer.json
    #[arg(value_name = "DIR")]
    pub(crate) folder: PathBuf,
    /// Folder of an adapter in PEFT's format, on top of the model
    #[arg(long, value_name = "DIR")]
    pub(crate) adapter: Option<PathBuf>,
    /// tokenizer.json to use instead of the model's own
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// Text to continue; may be repeated [default: standard input]
    #[arg(long, short, value_name = "TEXT")]
    pub(crate) prompt: Vec<String>,
    /// File with the text to continue, or - for standard input; a line break at its end is removed
    #[arg(long, short = 'f', value_name = "FILE", conflicts_with = "prompt")]
    pub(crate) prompt_file: Option<PathBuf>,
    /// Treat each prompt as the message of a user, rendered with the model's chat template
    #[arg(long, conflicts_with = "input")]
    pub(crate) chat: bool,
    /// System message before the user's
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub(crate) system: Option<String>,
    /// Chat template to use instead of the model's own: a Jinja template, or its file
    #[arg(long, value_name = "TEMPLATE")]
    pub(crate) chat_template: Option<String>,
    /// File of JSON lines, or - for standard input; each line has `prompt` (a text) or `messages` (a conversation)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "prompt_file"])]
    pub(crate) input: Option<PathBuf>,
    /// File to write, or - for standard output, one JSON object per prompt: its fields, `text`, `tokens`, `prompt_tokens`
    /// and `finish_reason`
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Maximum number of tokens of a text
    #[arg(long, short = 'n', value_name = "N", default_value_t = 128)]
    pub(crate) max_new_tokens: usize,
    /// Divide the logits by T; 0 takes the most likely token
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub(crate) temperature: f64,
    /// Draw from the K most likely tokens
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<usize>,
    /// Draw from the smallest set of most likely tokens whose probabilities sum to at least P
    #[arg(long, value_name = "P")]
    pub(crate) top_p: Option<f64>,
    /// Draw from tokens at least P times as likely as the most likely one
    #[arg(long, value_name = "P")]
    pub(crate) min_p: Option<f64>,
    /// Divide the logits of tokens that have occurred by R, or multiply them if they are negative
    #[arg(long, value_name = "R", default_value_t = 1.0)]
    pub(crate) repetition_penalty: f64,
    /// End a text before this string; may be repeated
    #[arg(long, value_name = "STRING")]
    pub(crate) stop: Vec<String>,
    /// Continue after the model's end-of-text token
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Seed of the random draws
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Number of prompts of --input or --output that are generated at the same time; does not affect the texts
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) batch: u32,
    /// Number of threads [default: one per core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) threads: Option<u32>,
    /// Print only the text, without the number of tokens and the time on standard error
    #[arg(long)]
    pub(crate) quiet: bool,
}
