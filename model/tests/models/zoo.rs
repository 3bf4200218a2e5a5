//! Tests of the zoo: Hugging Face's names, shapes and initial values; a gradient for every parameter; causality; clear
//! errors; and the same values as a GPT-2 of plain candle operations.

use crate::check::{close, floats, plain_attention_within};
use candle_core::{DType, Device, Result, Tensor};
use std::collections::BTreeMap;
use zero_model::random::Stream;
use zero_model::zoo::{Activation, Gpt2Config, LlamaConfig, MlpConfig, gpt2, llama, mlp};
use zero_model::{Activations, Layers, Model, Pass};

fn small_gpt2() -> Gpt2Config {
    Gpt2Config { vocab_size: 19, n_positions: 12, n_embd: 8, n_layer: 2, n_head: 2, ..Gpt2Config::default() }
}

fn small_llama() -> LlamaConfig {
    LlamaConfig {
        vocab_size: 19,
        hidden_size: 8,
        intermediate_size: 20,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        max_position_embeddings: 12,
        ..LlamaConfig::default()
    }
}

fn built(layers: Layers) -> Model {
    crate::built(layers, DType::F32)
}

fn ids(batch: usize, time: usize) -> Tensor {
    let ids: Vec<u32> = (0..batch * time).map(|i| (i * i + 3 * i) as u32 % 19).collect();
    Tensor::from_vec(ids, (batch, time), &Device::Cpu).unwrap()
}

fn pass(training: bool, layer: usize) -> Pass {
    Pass { training, seed: 1, step: 1, sample: 0, layer: layer as u32 }
}

/// Returns the outputs of the first `end` layers.
fn run_until(model: &Model, end: usize, input: &Tensor, training: bool) -> Result<Activations> {
    let mut layers = model.layers()[..end].iter().enumerate();
    layers.try_fold(input.clone().into(), |x, (layer, built)| built.run(&x, &pass(training, layer)))
}

fn run(model: &Model, input: &Tensor, training: bool) -> Result<Tensor> {
    run_until(model, model.layers().len(), input, training)?.single().cloned()
}

fn loss(model: &Model, input: &Tensor, targets: &Tensor, training: bool) -> Tensor {
    let last = model.layers().len() - 1;
    let x = run_until(model, last, input, training).unwrap();
    model.loss(&x, std::slice::from_ref(targets), &pass(training, last), 1.0).unwrap()
}

/// Maps names to shapes.
fn parameters(model: &Model) -> BTreeMap<String, Vec<usize>> {
    model.parameters().iter().map(|p| (p.name().to_string(), p.shape().dims().to_vec())).collect()
}

fn every_parameter_gets_a_gradient(model: &Model, input: &Tensor, targets: &Tensor) {
    let grads = loss(model, input, targets, true).backward().unwrap();
    for p in model.parameters() {
        let grad = grads.get(p.leaf()).unwrap_or_else(|| panic!("{} has no gradient", p.name()));
        assert_eq!(grad.shape(), p.shape(), "{}", p.name());
        assert!(floats(grad).iter().any(|g| *g != 0.0), "{} has a gradient of zeros", p.name());
    }
}

#[test]
fn gpt2_has_hugging_faces_names_and_layouts() {
    let model = built(gpt2(&small_gpt2()));
    let mut want: BTreeMap<String, Vec<usize>> = BTreeMap::from([
        ("transformer.wte.weight".into(), vec![19, 8]),
        ("transformer.wpe.weight".into(), vec![12, 8]),
        ("transformer.ln_f.weight".into(), vec![8]),
        ("transformer.ln_f.bias".into(), vec![8]),
    ]);
    for i in 0..2 {
        for (name, weight) in [
            ("ln_1", vec![8]),
            ("attn.c_attn", vec![8, 24]),
            ("attn.c_proj", vec![8, 8]),
            ("ln_2", vec![8]),
            ("mlp.c_fc", vec![8, 32]),
            ("mlp.c_proj", vec![32, 8]),
        ] {
            want.insert(format!("transformer.h.{i}.{name}.bias"), vec![weight[weight.len() - 1]]);
            want.insert(format!("transformer.h.{i}.{name}.weight"), weight);
        }
    }
    assert_eq!(parameters(&model), want, "a tied head must not add a parameter");
    let names: Vec<&str> = model.layers().iter().map(|l| l.name()).collect();
    assert_eq!(names, ["transformer", "transformer.h.0", "transformer.h.1", "transformer.ln_f", "lm_head"]);

    let untied = gpt2(&Gpt2Config { tie_word_embeddings: false, ..small_gpt2() }).build(DType::F32).unwrap();
    assert_eq!(parameters(&untied).get("lm_head.weight"), Some(&vec![19, 8]));
    // The published number of parameters.
    assert_eq!(gpt2(&Gpt2Config::default()).build(DType::F32).unwrap().elements(), 124_439_808);
}

#[test]
fn llama_has_hugging_faces_names_and_layouts() {
    let model = built(llama(&small_llama()));
    let mut want: BTreeMap<String, Vec<usize>> = BTreeMap::from([
        ("model.embed_tokens.weight".into(), vec![19, 8]),
        ("model.norm.weight".into(), vec![8]),
        ("lm_head.weight".into(), vec![19, 8]),
    ]);
    for i in 0..2 {
        for (name, shape) in [
            ("input_layernorm", vec![8]),
            ("self_attn.q_proj", vec![8, 8]),
            ("self_attn.k_proj", vec![4, 8]),
            ("self_attn.v_proj", vec![4, 8]),
            ("self_attn.o_proj", vec![8, 8]),
            ("post_attention_layernorm", vec![8]),
            ("mlp.gate_proj", vec![20, 8]),
            ("mlp.up_proj", vec![20, 8]),
            ("mlp.down_proj", vec![8, 20]),
        ] {
            want.insert(format!("model.layers.{i}.{name}.weight"), shape);
        }
    }
    assert_eq!(parameters(&model), want);
    let biases = |config: LlamaConfig| {
        let model = built(llama(&config));
        let of_first = |name: &str| name.strip_prefix("model.layers.0.")?.strip_suffix("_proj.bias").map(String::from);
        let mut names: Vec<_> = model.parameters().iter().filter_map(|p| of_first(p.name())).collect();
        names.sort();
        names.join(" ")
    };
    // Qwen2 has `qkv_bias`; Llama has the other two keys.
    assert_eq!(biases(LlamaConfig { qkv_bias: true, ..small_llama() }), "self_attn.k self_attn.q self_attn.v");
    let attention = LlamaConfig { attention_bias: true, ..small_llama() };
    assert_eq!(biases(attention), "self_attn.k self_attn.o self_attn.q self_attn.v");
    assert_eq!(biases(LlamaConfig { mlp_bias: true, ..small_llama() }), "mlp.down mlp.gate mlp.up");
    // The published number of parameters.
    assert_eq!(llama(&LlamaConfig::default()).build(DType::F32).unwrap().elements(), 6_738_415_616);
}

#[test]
fn initial_values_have_the_stated_spread() {
    let config = Gpt2Config { n_embd: 64, n_layer: 8, vocab_size: 500, ..small_gpt2() };
    let model = built(gpt2(&config));
    for p in model.parameters() {
        let values = floats(p.leaf());
        let want = match p.name() {
            name if name.ends_with("bias") => 0.0,
            name if name.contains("ln_") => 1.0,
            name if name.contains("c_proj") => 0.02 / 4.0,
            _ => 0.02,
        };
        let rms = (values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / values.len() as f64).sqrt();
        assert!((rms - want).abs() <= 0.06 * want, "{}: {rms} for {want}", p.name());
    }
}

#[test]
fn every_parameter_is_trained() {
    let targets = ids(2, 7);
    every_parameter_gets_a_gradient(&built(gpt2(&small_gpt2())), &ids(2, 12), &ids(2, 12));
    let dropouts =
        Gpt2Config { embd_pdrop: 0.1, resid_pdrop: 0.1, activation_function: Activation::Gelu, ..small_gpt2() };
    every_parameter_gets_a_gradient(&built(gpt2(&dropouts)), &ids(2, 12), &ids(2, 12));
    every_parameter_gets_a_gradient(&built(llama(&small_llama())), &ids(2, 7), &targets);
    let tied = LlamaConfig { tie_word_embeddings: true, head_dim: Some(6), ..small_llama() };
    every_parameter_gets_a_gradient(&built(llama(&tied)), &ids(2, 7), &targets);
    let biased = LlamaConfig { attention_bias: true, mlp_bias: true, ..small_llama() };
    every_parameter_gets_a_gradient(&built(llama(&biased)), &ids(2, 7), &targets);
    let tiled = LlamaConfig { tiled_mlp_rows: Some(64), ..biased };
    every_parameter_gets_a_gradient(&built(llama(&tiled)), &ids(2, 7), &targets);
    let config =
        MlpConfig { input_size: 5, hidden_sizes: vec![9, 7], num_labels: 3, hidden_act: Activation::Silu, base: None };
    let mut x = vec![0.0; 20];
    Stream::new(1, "x", 0).fill_normal(0, &mut x);
    let x = Tensor::from_vec(x, (4, 5), &Device::Cpu).unwrap();
    let labels = Tensor::new(&[0u32, 2, 1, 1], &Device::Cpu).unwrap();
    every_parameter_gets_a_gradient(&built(mlp(&config)), &x, &labels);
}

#[test]
fn attention_is_causal() {
    for model in [built(gpt2(&small_gpt2())), built(llama(&small_llama()))] {
        let tokens = ids(1, 9);
        let logits = run(&model, &tokens, false).unwrap();
        assert_eq!(logits.dims(), [1, 9, 19]);
        let changed = Tensor::cat(&[tokens.narrow(1, 0, 6).unwrap(), ids(3, 1).t().unwrap().contiguous().unwrap()], 1);
        let other = run(&model, &changed.unwrap(), false).unwrap();
        let head = |x: &Tensor, n| floats(&x.narrow(1, 0, n).unwrap());
        assert_eq!(head(&logits, 6), head(&other, 6));
        assert_ne!(head(&logits, 9), head(&other, 9));
    }
}

/// Computes the logits of a GPT-2 with candle's own operations.
fn plain_gpt2(model: &Model, tokens: &Tensor, heads: usize) -> Result<Tensor> {
    let p = |name: String| model.parameters().iter().find(|p| p.name() == name).expect("a parameter").leaf().clone();
    let norm = |x: &Tensor, name: &str| {
        candle_nn::ops::layer_norm_slow(x, &p(format!("{name}.weight")), &p(format!("{name}.bias")), 1e-5)
    };
    let (batch, time) = tokens.dims2()?;
    let conv = |x: &Tensor, name: String| {
        let weight = p(format!("{name}.weight"));
        x.broadcast_matmul(&weight)?.broadcast_add(&p(format!("{name}.bias")))
    };
    let wte = p("transformer.wte.weight".into());
    let width = wte.dim(1)?;
    let rows = wte.index_select(&tokens.flatten_all()?, 0)?.reshape((batch, time, width))?;
    let mut x = rows.broadcast_add(&p("transformer.wpe.weight".into()).narrow(0, 0, time)?)?;
    for i in 0..2 {
        let name = format!("transformer.h.{i}");
        let qkv = conv(&norm(&x, &format!("{name}.ln_1"))?, format!("{name}.attn.c_attn"))?;
        let part = |at: usize| qkv.narrow(2, at * width, width)?.reshape((batch, time, heads, width / heads));
        let attended = plain_attention_within(&part(0)?, &part(1)?, &part(2)?, |_, _| 0)?;
        let attended = attended.reshape((batch, time, width))?;
        x = (x + conv(&attended, format!("{name}.attn.c_proj"))?)?;
        let inner = conv(&norm(&x, &format!("{name}.ln_2"))?, format!("{name}.mlp.c_fc"))?.gelu()?;
        x = (x + conv(&inner, format!("{name}.mlp.c_proj"))?)?;
    }
    norm(&x, "transformer.ln_f")?.broadcast_matmul(&wte.t()?)
}

#[test]
fn gpt2_agrees_with_candles_own_operations() {
    // Weights are larger than in training, so that no operation is nearly linear.
    let model = built(gpt2(&Gpt2Config { initializer_range: 0.5, ..small_gpt2() }));
    let (tokens, targets) = (ids(3, 11), ids(11, 3).t().unwrap());
    let logits = run(&model, &tokens, true).unwrap();
    let plain = plain_gpt2(&model, &tokens, 2).unwrap();
    close("logits", &logits, &plain, 1e-5);
    let grads = loss(&model, &tokens, &targets, true).backward().unwrap();
    let plain_loss = candle_nn::loss::cross_entropy(&plain.flatten_to(1).unwrap(), &targets.flatten_all().unwrap());
    let plain_grads = plain_loss.unwrap().backward().unwrap();
    for p in model.parameters() {
        close(p.name(), grads.get(p.leaf()).unwrap(), plain_grads.get(p.leaf()).unwrap(), 1e-4);
    }
}

/// The head computes the loss without storing its logits; `.loss(…)` computes the logits first.
#[test]
fn the_loss_of_a_head_matches_its_logits() {
    let (tokens, targets) = (ids(2, 12), ids(12, 2).t().unwrap());
    for layers in [|| gpt2(&small_gpt2()), || llama(&small_llama())] {
        let (model, over_logits) = (built(layers()), built(layers().loss(zero_model::ops::cross_entropy)));
        let (got, want) = (loss(&model, &tokens, &targets, true), loss(&over_logits, &tokens, &targets, true));
        assert_eq!(floats(&got), floats(&want));
        let (grads, grads_want) = (got.backward().unwrap(), want.backward().unwrap());
        for (p, q) in model.parameters().iter().zip(over_logits.parameters()) {
            assert_eq!(floats(grads.get(p.leaf()).unwrap()), floats(grads_want.get(q.leaf()).unwrap()), "{}", p.name());
        }
        let evaluation = loss(&model, &tokens, &targets, false);
        assert_eq!(floats(&evaluation), floats(&want));
        assert!(!evaluation.track_op(), "an evaluation must not track gradients");
    }
}

#[test]
fn evaluation_disables_dropout() {
    let model = built(gpt2(&Gpt2Config { embd_pdrop: 0.5, resid_pdrop: 0.5, ..small_gpt2() }));
    let without = built(gpt2(&small_gpt2()));
    let tokens = ids(2, 12);
    let evaluation = floats(&run(&model, &tokens, false).unwrap());
    assert_eq!(evaluation, floats(&run(&without, &tokens, false).unwrap()));
    assert_ne!(evaluation, floats(&run(&model, &tokens, true).unwrap()));
}

#[test]
fn errors_name_the_invalid_field() {
    let refused = |layers: Layers, words: &str| {
        let message = layers.build(DType::F32).expect_err("an error was expected").to_string();
        assert!(message.contains(words), "`{message}` does not contain `{words}`");
    };
    refused(gpt2(&Gpt2Config { n_head: 3, ..small_gpt2() }), "n_embd = 8 is not a multiple of n_head = 3");
    refused(gpt2(&Gpt2Config { n_head: 0, ..small_gpt2() }), "n_head must be at least 1");
    refused(gpt2(&Gpt2Config { n_layer: 0, ..small_gpt2() }), "n_layer must be at least 1");
    refused(llama(&LlamaConfig { num_key_value_heads: 3, ..small_llama() }), "num_key_value_heads = 3");
    refused(llama(&LlamaConfig { num_attention_heads: 3, ..small_llama() }), "num_attention_heads = 3");
    refused(llama(&LlamaConfig { head_dim: Some(3), ..small_llama() }), "even head size");
    refused(llama(&LlamaConfig { sliding_window: Some(0), ..small_llama() }), "sliding_window must be at least 1");
    let config =
        MlpConfig { input_size: 0, hidden_sizes: vec![], num_labels: 3, hidden_act: Activation::Relu, base: None };
    refused(mlp(&config), "must be at least 1");
    assert_eq!(Activation::from_name("gelu_fast"), None);

    let message = |model: Model| run(&model, &ids(1, 13), true).unwrap_err().to_string();
    assert!(message(built(gpt2(&small_gpt2()))).contains("13 tokens is longer than n_positions = 12"));
    assert!(message(built(llama(&small_llama()))).contains("13 tokens is longer than the 12 positions"));
    let outside = Tensor::new(&[[19u32]], &Device::Cpu).unwrap();
    let message = run(&built(gpt2(&small_gpt2())), &outside, true).unwrap_err().to_string();
    assert!(message.contains("index 19 at position 0 is not below 19"), "{message}");
}
