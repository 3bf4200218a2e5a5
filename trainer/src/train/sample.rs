//! Generates text with the trained model.

use candle_core::{DType, Device, Tensor};
use zero_config::{Config, Sample};
use zero_model::random::Stream;

use super::corpus::Corpus;
use crate::data::Tokenizer;
use zero_engine::Engine;
use zero_engine::Error;

/// Returns why no text will be generated although `training.sample` asks for it; otherwise `None`.
///
/// # Errors
/// Fails if the tokenizer cannot encode the prompt. Reporting this before the run saves the run.
pub(super) fn missing(config: &Config, corpus: &Corpus) -> Result<Option<&'static str>, Error> {
    let Some(sample) = &config.training.sample else { return Ok(None) };
    if corpus.vocabulary.is_none() {
        let reason = match config.model {
            Some(zero_config::Model::Mlp(_)) => "an MLP generates no text",
            None => "data passed by the program has no tokenizer",
            _ => "no tokenizer can decode the tokens; set `data.tokenizer` to the tokenizer.json that made them",
        };
        return Ok(Some(reason));
    }
    match corpus.tokenizer.encode(&sample.prompt) {
        Ok(_) => Ok(None),
        Err(error) => Err(Error::setting(
            "training.sample.prompt",
            error.to_string(),
            "write a prompt that the tokenizer can encode",
        )),
    }
}

/// Continues the prompt token by token; a collective. Every rank draws the same tokens, because all have the same
/// logits and the same random numbers. `longest` is the longest sequence that the model accepts. The model's vocabulary
/// may be larger than the tokenizer's, for example to be a round number. Tokens without a text are never drawn.
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
    let random = Stream::new(engine.config().training.seed, "sample", 0);
    for index in 0..sample.tokens {
        let window = &tokens[tokens.len().saturating_sub(longest)..];
        let ids = Tensor::from_slice(window, (1, window.len()), &Device::Cpu)?;
        let logits = engine.forward(ids)?;
        let last = logits.single()?.narrow(1, window.len() - 1, 1)?.flatten_all()?.to_dtype(DType::F32)?;
        let last = last.to_vec1::<f32>()?;
        tokens.push(draw(&last[..last.len().min(known)], sample, random.f32_at(index as u64)));
    }
    Ok(tokenizer.decode(&tokens)?)
}

/// Returns the token at quantile `uniform` of the distribution softmax(logits / temperature), restricted to the `top_k`
/// most likely tokens.
fn draw(logits: &[f32], sample: &Sample, uniform: f32) -> u32 {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    if sample.temperature <= 0.0 {
        return order.first().map_or(0, |&token| token as u32);
    }
    order.truncate(sample.top_k.unwrap_or(usize::MAX).max(1));
    let largest = f64::from(order.first().map_or(0.0, |&token| logits[token]));
    let weight = |token: usize| ((f64::from(logits[token]) - largest) / sample.temperature).exp();
    let mut left = f64::from(uniform) * order.iter().map(|&token| weight(token)).sum::<f64>();
    for &token in &order {
        left -= weight(token);
        if left < 0.0 {
            return token as u32;
        }
    }
    order.last().map_or(0, |&token| token as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(temperature: f64, top_k: Option<usize>) -> Sample {
        Sample { prompt: String::new(), tokens: 1, temperature, top_k }
    }

    #[test]
    fn draws_follow_the_distribution() {
        let logits = [0.0, 2.0, 1.0];
        assert_eq!(draw(&logits, &sample(0.0, None), 0.99), 1);
        assert_eq!(draw(&logits, &sample(1.0, Some(1)), 0.99), 1);
        assert_eq!(draw(&logits, &sample(1.0, None), 0.0), 1);
        assert_eq!(draw(&logits, &sample(1.0, None), 0.9999), 0);
        let n = 10_000;
        let ones = (0..n).filter(|&i| draw(&logits, &sample(1.0, None), i as f32 / n as f32) == 1).count();
        assert!((ones as f64 / n as f64 - 0.6652).abs() < 0.001); // e² / (1 + e + e²)
    }
}
