//! Decoding token by token gives logits that are bit-identical to one pass over the whole sequence, also in a batch
//! with sequences of different lengths.

use crate::built;
use candle_core::{DType, Device, Result, Tensor};
use zero_model::ops::{Activation, Cache};
use zero_model::zoo::{Gpt2Config, LlamaConfig, gpt2, llama};
use zero_model::{Activations, Layers, Model, Pass};

const TIME: usize = 140;
const VOCABULARY: usize = 23;

fn gpt2_of(n_embd: usize, n_head: usize) -> Layers {
    gpt2(&Gpt2Config {
        vocab_size: VOCABULARY,
        n_positions: TIME,
        n_embd,
        n_layer: 2,
        n_head,
        initializer_range: 0.3,
        activation_function: Activation::GeluNew,
        ..Gpt2Config::default()
    })
}

fn llama_of(head_dim: usize, sliding_window: Option<usize>) -> Layers {
    llama(&LlamaConfig {
        vocab_size: VOCABULARY,
        hidden_size: 24,
        intermediate_size: 40,
        num_hidden_layers: 2,
        num_attention_heads: 6,
        num_key_value_heads: 2,
        head_dim: Some(head_dim),
        max_position_embeddings: TIME,
        sliding_window,
        qkv_bias: true,
        initializer_range: 0.3,
        ..LlamaConfig::default()
    })
}

fn ids(seed: usize, len: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * i + seed * i + i / 5) % VOCABULARY) as u32).collect()
}

/// Returns the bits of the values as f32. Widening bf16 to f32 is exact.
fn bits(tensor: &Tensor) -> Result<Vec<u32>> {
    let values = tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
    Ok(values.into_iter().map(f32::to_bits).collect())
}

/// Returns the bits of the logits of every position, from one pass over the whole sequence.
fn whole(model: &Model, tokens: &[u32]) -> Result<Vec<Vec<u32>>> {
    let pass = Pass { training: false, seed: 0, step: 0, sample: 0, layer: 0 };
    let start = Activations::from(Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)?);
    let outputs = model.layers().iter().try_fold(start, |x, layer| layer.run(&x, &pass))?;
    let logits = outputs.single()?;
    (0..tokens.len()).map(|at| bits(&logits.narrow(1, at, 1)?.contiguous()?)).collect()
}

fn next(model: &Model, tokens: &[&[u32]], caches: &mut [&mut Cache]) -> Result<Vec<Vec<u32>>> {
    let time = tokens[0].len();
    let tokens = Tensor::from_vec(tokens.concat(), (caches.len(), time), &Device::Cpu)?;
    let logits = model.next_logits(&tokens, caches)?;
    (0..caches.len()).map(|row| bits(&logits.narrow(0, row, 1)?.contiguous()?)).collect()
}

fn compare(name: &str, model: &Model) -> Result<()> {
    let (one, other) = (ids(1, TIME), ids(7, TIME));
    let (of_one, of_other) = (whole(model, &one)?, whole(model, &other)?);
    // The first sequence starts with many tokens, the other with one. Then both continue in one batch.
    let (mut first, mut second) = (Cache::default(), Cache::default());
    let start = 67;
    assert_eq!(next(model, &[&one[..start]], &mut [&mut first])?[0], of_one[start - 1], "{name}: first tokens");
    assert_eq!(next(model, &[&other[..1]], &mut [&mut second])?[0], of_other[0], "{name}: one token");
    for step in 0..TIME - start {
        let (at, beside) = (start + step, 1 + step);
        let rows = [&one[at..=at], &other[beside..=beside]];
        let got = next(model, &rows, &mut [&mut first, &mut second])?;
        assert_eq!(got[0], of_one[at], "{name}: position {at}");
        assert_eq!(got[1], of_other[beside], "{name}: position {beside} in a batch");
    }
    // Decodes several tokens at a time after the cached ones.
    let rest = TIME - second.tokens();
    assert!(rest > 10);
    let got = next(model, &[&other[second.tokens()..TIME]], &mut [&mut second])?;
    assert_eq!(got[0], of_other[TIME - 1], "{name}: {rest} tokens at once");
    assert_eq!(second.tokens(), TIME);
    let error = next(model, &[&[0]], &mut [&mut second]).unwrap_err().to_string();
    assert!(error.contains("position") || error.contains("index"), "{error}");
    Ok(())
}

#[test]
fn cached_logits_are_bit_identical_to_those_of_the_whole_sequence() -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        compare("gpt2", &built(gpt2_of(24, 3), dtype))?;
        // A head of 80 values is longer than a block of 64. A head of 20 is not a multiple of the vector length, 16.
        compare("gpt2, wide heads", &built(gpt2_of(160, 2), dtype))?;
        compare("llama", &built(llama_of(4, None), dtype))?;
        compare("llama, heads of 20", &built(llama_of(20, None), dtype))?;
        for window in [1, 9, 64, 70] {
            compare(&format!("window of {window}"), &built(llama_of(4, Some(window)), dtype))?;
        }
    }
    Ok(())
}

#[test]
fn a_cache_of_another_batch_or_a_failed_pass_is_refused() -> Result<()> {
    let model = built(gpt2_of(24, 3), DType::F32);
    let mut cache = Cache::default();
    let two = Tensor::zeros((2, 3), DType::U32, &Device::Cpu)?;
    let error = model.next_logits(&two, &mut [&mut cache]).unwrap_err().to_string();
    assert!(error.contains("a batch of 2 rows needs as many caches, but there are 1"), "{error}");
    let mut cache = Cache::default();
    next(&model, &[&[1, 2, 3]], &mut [&mut cache])?;
    let other = built(llama_of(20, None), DType::F32);
    let error = next(&other, &[&[1]], &mut [&mut cache]).unwrap_err().to_string();
    assert!(error.contains("the cache does not have"), "{error}");
    Ok(())
}
