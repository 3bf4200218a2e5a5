//! Generates text with the trained model.

use candle_core::{DType, Device, Tensor};
use zero_config::{Config, Sample};
use zero_model::random::Stream;

use super::corpus::Corpus;
use crate::data::Tokenizer;
use crate::generate::Sampling;
use zero_engine::{Batch, Engine, Error};
use zero_model::zoo::POSITION_IDS;

/// Returns the reason why `training.sample` cannot generate text. Returns `None` if it can, or if it is not set.
///
/// # Errors
/// Fails if the tokenizer cannot encode the prompt. Called before training, so that no training time is lost.
pub(super) fn missing(config: &Config, corpus: &Corpus) -> Result<Option<&'static str>, Error> {
    let Some(sample) = &config.training.sample else { return Ok(None) };
    if config.preference.is_some() {
        return Ok(Some("with `preference`, the model returns no logits; use `zero-train generate` with a checkpoint"));
    }
    if corpus.vocabulary.is_none() {
        let reason = match config.model {
            Some(zero_config::Model::Mlp(_)) => "an MLP generates no text",
            None => "data passed by the program has no tokenizer",
            _ => "no tokenizer can decode the tokens; set `data.tokenizer` to the tokenizer.json that produced them",
        };
        return Ok(Some(reason));
    }
    match corpus.tokenizer.encode(&sample.prompt) {
        Ok(_) => Ok(None),
        Err(error) => Err(Error::setting(
            "training.sample.prompt",
            error.to_string(),
            "set it to a prompt that the tokenizer can encode",
        )),
    }
}

/// Continues the prompt token by token; a collective. All ranks draw the same tokens, because they have the same logits
/// and the same random numbers. `longest` is the length of the longest sequence that the model accepts. Tokens that the
/// tokenizer does not have are never drawn, even if the model's vocabulary is larger.
pub(super) fn generate(
    engine: &mut Engine,
    tokenizer: &Tokenizer,
    sample: &Sample,
    longest: usize,
) -> Result<String, Error> {
    let mut tokens = tokenizer.encode(&sample.prompt)?;
    if tokens.is_empty() {
        tokens.push(0);
    }
    let known = tokenizer.vocabulary();
    let top_k = sample.top_k.map(|k| k.max(1));
    let sampling = Sampling { temperature: sample.temperature, top_k, ..Sampling::default() };
    let random = Stream::new(engine.config().training.seed, "sample", 0);
    // Ranks that split layers have slices of the same length, so the window is padded. The padding comes after the
    // window and does not affect it.
    let parts = engine.config().tensor_size();
    let longest = (longest / parts * parts).max(parts);
    for index in 0..sample.tokens {
        let window = &tokens[tokens.len().saturating_sub(longest)..];
        let length = window.len().next_multiple_of(parts);
        let padded: Vec<u32> = window.iter().copied().chain(std::iter::repeat(0)).take(length).collect();
        let ids = Tensor::from_vec(padded, (1, length), &Device::Cpu)?;
        let mut batch = Batch::from(ids);
        if engine.model().signature().inputs.iter().any(|(input, _)| input == POSITION_IDS) {
            let position_ids = Tensor::arange(0, length as u32, &Device::Cpu)?.unsqueeze(0)?;
            batch = batch.input(POSITION_IDS, position_ids);
        }
        let logits = engine.forward(batch)?;
        let last = logits.single()?.narrow(1, window.len() - 1, 1)?.flatten_all()?.to_dtype(DType::F32)?;
        let mut last = last.to_vec1::<f32>()?;
        last.truncate(known);
        tokens.push(sampling.next(&mut last, &[], random.f32_at(index as u64)));
    }
    Ok(tokenizer.decode(&tokens)?)
}
