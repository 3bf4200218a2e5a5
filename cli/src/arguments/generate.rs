//! Arguments of `generate`.

use std::path::PathBuf;

use clap::Args;

/// Options of `generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// Folder of a run or a checkpoint, an export, or a Hugging Face model: config.json, safetensors, tokenizer.json
    #[arg(value_name = "DIR")]
    pub(crate) folder: PathBuf,
    /// Folder of a PEFT adapter to apply to the model
    #[arg(long, value_name = "DIR")]
    pub(crate) adapter: Option<PathBuf>,
    /// tokenizer.json to use instead of the model's own
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// Prompt; may be repeated [default: standard input]
    #[arg(long, short, value_name = "TEXT")]
    pub(crate) prompt: Vec<String>,
    /// File that contains the prompt, or - for standard input; a trailing newline is removed
    #[arg(long, short = 'f', value_name = "FILE", conflicts_with = "prompt")]
    pub(crate) prompt_file: Option<PathBuf>,
    /// Treat each prompt as a user message, rendered with the model's chat template
    #[arg(long, conflicts_with = "input")]
    pub(crate) chat: bool,
    /// System message before the user message
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub(crate) system: Option<String>,
    /// Chat template to use instead of the model's own: a Jinja template, or the path of a file
    #[arg(long, value_name = "TEMPLATE")]
    pub(crate) chat_template: Option<String>,
    /// JSON Lines file, or - for standard input; each line has `prompt` (a string) or `messages` (a conversation)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "prompt_file"])]
    pub(crate) input: Option<PathBuf>,
    /// File, or - for standard output, to which one JSON object per prompt is written: its fields, `text`, `tokens`,
    /// `prompt_tokens` and `finish_reason`
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Maximum number of tokens to generate per prompt
    #[arg(long, short = 'n', value_name = "N", default_value_t = 128)]
    pub(crate) max_new_tokens: usize,
    /// Divide the logits by T; 0 always picks the most likely token
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub(crate) temperature: f64,
    /// Sample from the K most likely tokens
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<usize>,
    /// Sample from the smallest set of most likely tokens whose probabilities sum to at least P
    #[arg(long, value_name = "P")]
    pub(crate) top_p: Option<f64>,
    /// Sample from tokens at least P times as likely as the most likely one
    #[arg(long, value_name = "P")]
    pub(crate) min_p: Option<f64>,
    /// Repetition penalty: divide the logits of tokens that have occurred by R, or multiply negative logits by R
    #[arg(long, value_name = "R", default_value_t = 1.0)]
    pub(crate) repetition_penalty: f64,
    /// Stop generation before this string; may be repeated
    #[arg(long, value_name = "STRING")]
    pub(crate) stop: Vec<String>,
    /// Continue after the model's end-of-text token
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Seed for sampling
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Number of prompts of --input or --output that are processed at the same time; does not affect the generated text
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) batch: u32,
    /// Number of threads [default: one per core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) threads: Option<u32>,
    /// Print only the text, without the number of tokens and the time on standard error
    #[arg(long)]
    pub(crate) quiet: bool,
}
