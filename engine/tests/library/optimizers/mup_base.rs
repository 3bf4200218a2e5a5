//! Base models of µP: initial values of models with a base model, mup's file for a program's own model, and mistakes.

use candle_core::DType;
use candle_nn::Init;
use zero_engine::{Config, configured_layers, configured_model};
use zero_model::BaseShapes;
use zero_model::ops::RopeScaling;
use zero_model::zoo::{Gpt2Config, LlamaConfig, gpt2, llama};

const GPT2: &str = "model: {type: gpt2, vocab_size: 61, n_positions: 16, n_embd: 64, n_layer: 2, n_head: 2}\n";
const LLAMA: &str = "model: {type: llama, vocab_size: 61, hidden_size: 64, intermediate_size: 96, num_hidden_layers: 2, \
                     num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 16}\n";

fn build(text: &str) -> Result<zero_model::Model, String> {
    let config = Config::with_world_size("test.yaml", text, 1).map_err(|error| error.to_string())?;
    let layers = configured_layers(&config, None).map_err(|error| error.to_string())?;
    configured_model::build(&config, layers, DType::F32).map_err(|error| error.to_string())
}

/// Checks the standard deviations of initial weights in models whose widths have different multipliers. The other
/// parameters belong to norms and biases.
#[test]
fn initial_deviations_scale_with_the_width() {
    let gpt2 = GPT2.replace("n_head: 2", "n_head: 2, n_inner: 64, initializer_range: 0.1");
    let llama = LLAMA.replace("max_pos", "tie_word_embeddings: false, initializer_range: 0.1, max_pos");
    let mlp = "model: {type: mlp, input_size: 8, hidden_sizes: [64, 96], output_size: 4}\n";
    let root = |number: f64| number.sqrt();
    type Deviations<'a> = &'a [(&'a str, f64)];
    // The residual stream and the inside of GPT-2's attention are 4 times as wide as in the base model. The inside of
    // feed-forward parts and of Llama's attention is 2 times as wide.
    let of_gpt2: Deviations<'_> = &[
        ("wte.weight", 0.1),
        ("wpe.weight", 0.1),
        ("attn.c_attn.weight", 0.1 / 2.0),
        ("attn.c_proj.weight", 0.1 / 2.0 / root(4.0)),
        ("mlp.c_fc.weight", 0.1 / 2.0),
        ("mlp.c_proj.weight", 0.1 / root(2.0) / root(4.0)),
    ];
    let of_llama: Deviations<'_> = &[
        ("embed_tokens.weight", 0.1),
        ("q_proj.weight", 0.1 / 2.0),
        ("k_proj.weight", 0.1 / 2.0),
        ("v_proj.weight", 0.1 / 2.0),
        ("o_proj.weight", 0.1 / root(2.0)),
        ("gate_proj.weight", 0.1 / 2.0),
        ("up_proj.weight", 0.1 / 2.0),
        ("down_proj.weight", 0.1 / root(2.0)),
        ("lm_head.weight", 0.1),
    ];
    let of_mlp: Deviations<'_> = &[
        ("layers.0.weight", root(2.0 / 8.0)),
        ("layers.1.weight", root(2.0 / 64.0)),
        ("layers.2.weight", root(2.0 / 48.0)),
    ];
    for (model, base, expected) in [
        (&*gpt2, "n_embd: 16, n_inner: 32", of_gpt2),
        (
            &llama,
            "hidden_size: 16, intermediate_size: 48, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 16",
            of_llama,
        ),
        (mlp, "hidden_sizes: [16, 48]", of_mlp),
    ] {
        let text = format!("train_batch_size: 1\n{model}optimizer: {{type: MuAdam}}\nmup: {{base: {{{base}}}}}");
        let model = build(&text).unwrap();
        let mut found = vec![];
        for parameter in model.parameters() {
            let known = expected.iter().find(|(name, _)| parameter.name().ends_with(name));
            match (parameter.init(), known) {
                (Init::Randn { mean: 0.0, stdev }, Some(&(name, expected))) => {
                    assert!((stdev / expected - 1.0).abs() < 1e-12, "{}: {stdev}, not {expected}", parameter.name());
                    found.push(name);
                }
                (Init::Const(value), None) => {
                    assert_eq!(value, f64::from(parameter.name().ends_with("weight")), "{}", parameter.name());
                }
                (init, _) => panic!("{}: {init:?}", parameter.name()),
            }
        }
        assert!(expected.iter().all(|(name, _)| found.contains(name)), "{found:?}");
    }
}

/// The base model and the model have heads of the same size, because each of these rotary embeddings fits only one
/// size.
#[test]
fn heads_of_the_base_models_size_may_use_any_rotation() {
    let base = LlamaConfig {
        vocab_size: 61,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 1,
        num_attention_heads: 2,
        num_key_value_heads: 2,
        max_position_embeddings: 16,
        ..LlamaConfig::default()
    };
    let factors = vec![1.0, 1.5, 2.0, 4.0];
    let long = RopeScaling::LongRope {
        short_factor: factors.clone(),
        long_factor: factors,
        factor: None,
        attention_factor: Some(1.0),
        original_max_position_embeddings: 8,
    };
    // With heads of 8 elements, 8 · 0.35 is rounded down to 2 rotated elements. With heads of 16 elements, the number
    // would be 5, which is odd.
    for base in [
        LlamaConfig { rope_scaling: Some(long), ..base.clone() },
        LlamaConfig { partial_rotary_factor: 0.35, ..base.clone() },
    ] {
        let wide = LlamaConfig { hidden_size: 64, intermediate_size: 96, num_attention_heads: 8, ..base.clone() };
        let model = llama(&LlamaConfig { base: Some(Box::new(base)), ..wide }).build(DType::F32).unwrap();
        let of = |name: &str| {
            let parameter = model.parameters().iter().find(|parameter| parameter.name().ends_with(name)).unwrap();
            parameter.widths().map(|widths| (widths.count(), widths.multiplier(), widths.fan_in_to_fan_out()))
        };
        assert_eq!(of("q_proj.weight"), Some((2, 4.0, 1.0)));
        assert_eq!(of("k_proj.weight"), Some((2, 4.0, 4.0)));
    }
}

#[test]
fn sizes_of_0_in_the_base_model_are_errors() {
    let of_gpt2 = |base: Gpt2Config| gpt2(&Gpt2Config { base: Some(Box::new(base)), ..Gpt2Config::default() });
    let of_llama = |base: LlamaConfig| llama(&LlamaConfig { base: Some(Box::new(base)), ..LlamaConfig::default() });
    let layers = |index: usize| match index {
        0 => (of_gpt2(Gpt2Config { n_head: 0, ..Gpt2Config::default() }), "n_head"),
        1 => (of_gpt2(Gpt2Config { n_embd: 0, ..Gpt2Config::default() }), "n_embd"),
        2 => (of_llama(LlamaConfig { num_attention_heads: 0, ..LlamaConfig::default() }), "num_attention_heads"),
        _ => (of_llama(LlamaConfig { head_dim: Some(0), ..LlamaConfig::default() }), "head_dim"),
    };
    for index in 0..4 {
        let (of_base, name) = layers(index);
        // Base shapes that the program sets replace those of the base model.
        let replaced = layers(index).0.with_base_shapes(BaseShapes::default());
        for (layers, place) in [(of_base, "the base model: "), (replaced, "")] {
            let error = layers.build(DType::F32).err().unwrap().to_string();
            assert!(error.contains(place) && error.contains(&format!("{name} must be at least 1")), "{error}");
        }
    }
}

/// The model is built in code, and the file has the format that mup writes.
#[test]
fn base_shapes_are_read_from_mups_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("base.bsh");
    let written = "# This is a base shape file encoded in yaml\n\
                   first.bias:\n- 8\nfirst.weight:\n- 8\n- null\nlast.bias:\n- null\nlast.weight:\n- null\n- 8\n\
                   middle.bias:\n- 8\nmiddle.weight:\n- 8\n- 8\n";
    let layers = || {
        use zero_model::ops::Linear;
        zero_model::Layers::new()
            .layer("first", |vb| Linear::new(3, 32, 0.1, vb))
            .layer("middle", |vb| Linear::new(32, 32, 0.1, vb))
            .layer("last", |vb| Linear::new(32, 2, 0.1, vb))
            .loss(zero_model::ops::cross_entropy)
    };
    let build = |text: &str, mup: &str| {
        std::fs::write(&file, text).unwrap();
        let optimizer = "optimizer: {type: MuSGD, params: {weight_decay: 0.5}}";
        let text = format!("train_batch_size: 1\n{optimizer}\n{}", mup.replace("FILE", &format!("{file:?}")));
        let config = Config::with_world_size("test.yaml", text, 1).map_err(|error| error.to_string())?;
        configured_model::build(&config, layers(), DType::F32).map_err(|error| error.to_string())
    };
    let with_file = "mup: {base_shapes: FILE}";
    let both = format!("train_batch_size: 1\noptimizer: {{type: MuSGD}}\n{with_file}");
    let model = build(written, with_file).unwrap();
    let tunings = model.parameters().iter().map(|parameter| {
        let tuning = parameter.tuning();
        (parameter.name(), tuning.lr_factor, tuning.weight_decay)
    });
    let expected = [
        ("first.bias", 4.0, None),
        ("first.weight", 4.0, Some(0.125)),
        ("middle.bias", 4.0, None),
        ("middle.weight", 1.0, None),
        ("last.bias", 1.0, None),
        ("last.weight", 4.0, Some(0.125)),
    ];
    assert!(tunings.eq(expected));
    let both = Config::with_world_size("test.yaml", both.replace("FILE", &format!("{file:?}")), 1).unwrap();
    let shapes = BaseShapes::new(layers(), layers()).unwrap();
    let error =
        configured_model::build(&both, layers().with_base_shapes(shapes), DType::F32).err().unwrap().to_string();
    assert!(error.contains("mup.base_shapes") && error.contains("`Layers::with_base_shapes`"), "{error}");
    for (text, mup, said) in [
        ("first.bias: 8", with_file, "is not YAML with a list of sizes for each parameter"),
        (&written.replace("first.bias", "second.bias"), with_file, "the base model has a parameter `second.bias`"),
        (&written.replace("first.bias:\n- 8", "first.bias:\n- 8\n- 8"), with_file, "`first.bias` is [32] in the model"),
        (written, "", "the optimizer scales learning rates by the widths of a base model, but no base model is set"),
    ] {
        let error = build(text, mup).err().unwrap_or_default();
        assert!(error.contains(said), "{said}: {error}");
    }
}

#[test]
fn mistakes_are_errors() {
    let gpt2 = GPT2;
    for (model, more, said) in [
        (
            gpt2,
            "optimizer: {type: MuAdam}",
            "the optimizer scales learning rates by the widths of a base model, but the `mup` section is missing",
        ),
        (gpt2, "mup: {base: {n_embd: 16}}", "`mup` needs an optimizer that scales learning rates with the width"),
        (gpt2, "optimizer: {type: MuAdam}\nmup: {}", "`mup` does not describe a base model"),
        (
            gpt2,
            "optimizer: {type: MuAdam}\nmup: {base_shapes: file}",
            "`mup.base_shapes` is for a model that the program builds",
        ),
        (gpt2, "optimizer: {type: MuAdam}\nmup: {base: {n_layer: 1}}", "unknown key `mup.base.n_layer`"),
        (gpt2, "optimizer: {type: MuAdam}\nmup: {base: {hidden_size: 8}}", "`model` has no width `hidden_size`"),
        (
            gpt2,
            "optimizer: {type: MuAdam}\nmup: {base: {n_embd: 15}}",
            "n_head 2 does not divide n_embd 15 in the base model",
        ),
        (
            LLAMA,
            "optimizer: {type: MuAdam}\nmup: {base: {hidden_size: 12, num_attention_heads: 1}}",
            "the default, 2 · 1 / 4, is not an integer",
        ),
        (LLAMA, "optimizer: {type: MuAdam}\nmup: {base: {head_dim: 5}}", "the base model: cannot build layer"),
        (gpt2, "optimizer: {type: MuAdam}\nmup: {base: {n_embd: 16}}\nadapter: {}", "`mup` does not support adapters"),
        ("", "optimizer: {type: MuAdam}\nmup: {base: {n_embd: 16}}", "`mup.base` needs a `model` section"),
    ] {
        let error = build(&format!("train_batch_size: 1\n{model}{more}")).err().unwrap_or_default();
        assert!(error.contains(said), "{more}: {error}");
    }
}
