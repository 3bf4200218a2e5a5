//! The options for text generation, and its result.

use super::Sampling;

/// Options for text generation: how tokens are chosen, and when a text ends.
#[derive(Debug, Clone, PartialEq)]
pub struct Generate {
    /// Maximum number of tokens to generate. A text also ends when it reaches the model's maximum length.
    pub max_new_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Seed of the random draws. The i-th draw for a text depends only on the seed, i and the logits. A prompt's text
    /// is therefore the same in each run and does not depend on other prompts.
    pub seed: u64,
    /// Strings that end a text. The text does not include them.
    pub stop: Vec<String>,
    /// Whether to continue after the model's end-of-text tokens.
    pub ignore_eos: bool,
    /// Number of prompts that are processed at the same time. It does not affect the generated texts.
    pub batch: usize,
}

impl Default for Generate {
    /// Returns greedy decoding of up to 128 tokens, eight prompts at a time.
    fn default() -> Self {
        let sampling = Sampling::default();
        Self { max_new_tokens: 128, sampling, seed: 0, stop: vec![], ignore_eos: false, batch: 8 }
    }
}

/// A generated text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generated {
    /// The text after the prompt; empty without a tokenizer.
    pub text: String,
    /// All tokens after the prompt, including the token that ends the text.
    pub tokens: Vec<u32>,
    /// Number of tokens in the prompt.
    pub prompt_tokens: usize,
    /// The reason why the text ends.
    pub finish: Finish,
}

/// The reason why a text ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// An end-of-text token or a stop string was generated.
    Stop,
    /// The text has `max_new_tokens` tokens, or it reached the model's maximum length.
    Length,
}
