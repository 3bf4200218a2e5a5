//! `model.pretrained`: the keys of a Hugging Face folder become the model, contradictions name both values, and
//! unsupported keys are rejected by name.

use std::fs;

use serde_json::{Value, json};
use tempfile::TempDir;
use zero_config::{Config, Gpt2, Llama, Model, Origin, RopeScaling, Tokenizer};

/// Creates a folder with this `config.json`.
fn folder(config: &Value) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("config.json"), config.to_string()).expect("written");
    folder
}

/// Resolves a configuration with the folder, more keys of its model, and more sections.
fn with(folder: &TempDir, model: &str, more: &str) -> Result<Config, String> {
    let text = format!("train_batch_size: 1\nmodel: {{pretrained: {:?}, {model}}}\n{more}", folder.path());
    Config::parse("ds.yaml", text).map_err(|errors| errors.to_string())
}

fn resolved(config: &Value) -> Config {
    with(&folder(config), "", "").unwrap_or_else(|errors| panic!("{config}\n{errors}"))
}

fn gpt2(config: Config) -> Gpt2 {
    match config.model {
        Some(Model::Gpt2(model)) => model,
        other => panic!("{other:?}"),
    }
}

fn llama(config: &Value) -> Llama {
    match resolved(config).model {
        Some(Model::Llama(model)) => model,
        other => panic!("{other:?}"),
    }
}

/// Returns the message about an unsupported `config.json`, which must be a single error.
fn refused(config: &Value) -> String {
    match with(&folder(config), "", "") {
        Ok(config) => panic!("accepted: {}", config.to_yaml()),
        Err(errors) => {
            assert_eq!(errors.matches("error:").count(), 1, "{errors}");
            errors
        }
    }
}

#[test]
fn sizes_come_from_the_folder_and_other_keys_from_the_file() {
    let config = json!({
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 61, "n_positions": 32, "n_ctx": 32, "n_embd": 24,
        "n_layer": 3, "n_head": 4, "n_inner": null, "embd_pdrop": 0.0, "resid_pdrop": 0, "attn_pdrop": 0.0,
        "layer_norm_epsilon": 1e-6, "torch_dtype": "float32", "use_cache": true, "scale_attn_weights": true,
    });
    let folder = folder(&config);
    let config = with(&folder, "tiled_mlp_rows: 64, vocab_size: auto", "").unwrap();
    assert_eq!(config.warnings, []);
    assert_eq!(config.origins.get("model.n_embd"), Origin::Pretrained);
    assert_eq!(config.origins.get("model.tiled_mlp_rows"), Origin::Line(2));
    assert!(config.to_yaml_with_origins().contains("# pretrained"));
    let model = gpt2(config.clone());
    assert_eq!(model.pretrained.as_deref(), folder.path().to_str());
    assert_eq!((model.vocab_size, model.n_positions, model.n_embd, model.n_layer), (Some(61), 32, 24, 3));
    assert_eq!((model.n_head, model.n_inner, model.layer_norm_epsilon), (4, 96, 1e-6));
    assert_eq!((model.tie_word_embeddings, model.tiled_mlp_rows), (true, Some(64)));

    // The resolved configuration can be used again, even without the folder, and then warns about it.
    assert_eq!(Config::parse("resolved.yaml", config.to_yaml()).unwrap(), config);
    drop(folder);
    let without = Config::parse("resolved.yaml", config.to_yaml()).unwrap();
    assert_eq!(without, config);
    assert_eq!(without.warnings.len(), 1);
    assert!(without.warnings[0].message.ends_with("config.json is not there: the model is what is written here alone"));
}

#[test]
fn missing_keys_have_the_defaults_of_transformers() {
    let model = gpt2(resolved(&json!({"model_type": "gpt2"})));
    assert_eq!((model.vocab_size, model.n_positions, model.n_embd, model.n_inner), (Some(50_257), 1024, 768, 3072));
    let of = |kind: &str| llama(&json!({"model_type": kind}));
    let (llama, mistral, qwen2) = (of("llama"), of("mistral"), of("qwen2"));
    let sizes = |m: &Llama| (m.vocab_size, m.intermediate_size, m.num_key_value_heads, m.max_position_embeddings);
    assert_eq!(sizes(&llama), (Some(32_000), 11_008, 32, 2048));
    assert_eq!(sizes(&mistral), (Some(32_000), 14_336, 8, 131_072));
    assert_eq!(sizes(&qwen2), (Some(151_936), 22_016, 32, 32_768));
    assert_eq!([&llama, &mistral, &qwen2].map(|m| m.sliding_window), [None, Some(4096), None]);
    assert_eq!([&llama, &mistral, &qwen2].map(|m| m.qkv_bias), [false, false, true]);
    let (qwen3, smollm3) = (of("qwen3"), of("smollm3"));
    assert_eq!((sizes(&qwen3), qwen3.head_dim, qwen3.qk_norm), ((Some(151_936), 22_016, 32, 32_768), 128, true));
    assert_eq!((sizes(&smollm3), smollm3.head_dim, smollm3.rope_theta), ((Some(128_256), 11_008, 4, 32_768), 128, 2e6));
    assert_eq!((&smollm3.no_rope_layers[..5], smollm3.no_rope_layers.len()), (&[1, 1, 1, 0, 1][..], 36));
    assert!(smollm3.tie_word_embeddings && smollm3.layer_types.is_empty() && !smollm3.qk_norm);
    for model in [llama, mistral, qwen2] {
        assert_eq!((model.hidden_size, model.head_dim, model.rope_theta, model.rms_norm_eps), (4096, 128, 1e4, 1e-6));
        assert!(!model.tie_word_embeddings && !model.attention_bias && !model.mlp_bias && model.rope_scaling.is_none());
    }
}

#[test]
fn written_keys_must_agree_with_the_folder() {
    let config = json!({
        "model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": null, "rms_norm_eps": 1e-5,
        "rope_theta": 500_000, "rope_scaling": {"type": "linear", "factor": 2},
    });
    let folder = folder(&config);
    for same in [
        "type: llama, hidden_size: 32, num_key_value_heads: 4, head_dim: 8",
        "rms_norm_eps: 0.00001, rope_theta: 5.0e5, hidden_act: swish",
        "rope_scaling: {factor: 2.0, rope_type: linear}",
    ] {
        with(&folder, same, "").unwrap_or_else(|errors| panic!("{same}\n{errors}"));
    }
    let errors = with(&folder, "type: llama, hidden_size: 64", "").unwrap_err();
    let path = folder.path().join("config.json");
    let text = "\
error: `model.hidden_size` is `64`, and `32` in the pretrained model
  in: model.hidden_size (ds.yaml:2:";
    assert!(errors.starts_with(text), "{errors}");
    assert!(
        errors.contains(&format!("\n  in: model.hidden_size ({})\n  help: leave it out", path.display())),
        "{errors}"
    );
    for (other, said) in [
        ("type: gpt2", "`model.type` is the text \"gpt2\", and the text \"llama\" in the pretrained model"),
        ("head_dim: 16", "`model.head_dim` is `16`, and `8` in the pretrained model"),
        ("sliding_window: 5", "`model.sliding_window` is `5`, and nothing in the pretrained model"),
        ("qkv_bias: true", "`model.qkv_bias` is `true`, and `false` in the pretrained model"),
        ("tie_word_embeddings: true", "`model.tie_word_embeddings` is `true`, and `false`"),
        ("rope_scaling: {rope_type: linear, factor: 4}", "and {rope_type: the text \"linear\", factor: `2`} in the"),
    ] {
        let errors = with(&folder, other, "").unwrap_err();
        assert!(errors.contains(said), "{other}\n{errors}");
    }
    let both = with(&folder, "", "training: {initial_weights: a.safetensors}").unwrap_err();
    assert!(both.contains("`model.pretrained` and `training.initial_weights` both say what to start from"), "{both}");
}

#[test]
fn rotary_scaling_is_read_in_both_of_its_forms() {
    let llama3 = |original_max_position_embeddings| {
        Some(RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings,
        })
    };
    let keys = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0});
    let with = |more: Value| {
        let mut keys = keys.clone();
        keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        keys
    };
    let of = |more: Value| {
        let mut config = json!({"model_type": "llama", "max_position_embeddings": 4096});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let model = llama(&config);
        (model.rope_theta, model.rope_scaling)
    };
    let before = with(json!({"original_max_position_embeddings": 64}));
    assert_eq!(of(json!({"rope_theta": 5e5, "rope_scaling": before})), (5e5, llama3(64)));
    let inside = with(json!({"original_max_position_embeddings": 64, "rope_theta": 7e5}));
    assert_eq!(of(json!({"rope_theta": 5e5, "rope_parameters": inside})), (7e5, llama3(64)));
    // Without an original length among these keys, it is taken from the key next to them or from the model's
    // maximum length.
    assert_eq!(of(json!({"rope_scaling": keys})), (1e4, llama3(4096)));
    assert_eq!(of(json!({"rope_scaling": before, "original_max_position_embeddings": 128})), (1e4, llama3(128)));
    assert_eq!(of(json!({"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}})), (3.0, None));
    assert_eq!(of(json!({"rope_scaling": null, "rope_theta": 3.0, "partial_rotary_factor": 1.0})), (3.0, None));
    let linear = Some(RopeScaling::Linear { factor: 2.5 });
    assert_eq!(of(json!({"rope_scaling": {"type": "linear", "factor": 2.5}})), (1e4, linear));
}

/// The `config.json` of google/gemma-3-1b-it, and the form in which transformers 5 writes one.
#[test]
fn gemma_3_is_read_in_both_of_its_forms() {
    let published = json!({
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
        "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152, "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
        "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": true, "vocab_size": 262144,
    });
    let config = resolved(&published);
    assert_eq!(config.warnings, []);
    let Some(Model::Llama(model)) = config.model else { panic!() };
    assert_eq!((model.hidden_act, model.query_pre_attn_scalar), (zero_config::Activation::GeluNew, Some(256.0)));
    assert_eq!((model.rope_theta, model.rope_local_base_freq, model.head_dim), (1e6, Some(1e4), 256));
    assert_eq!((model.sliding_window, model.num_key_value_heads), (Some(512), 1));
    let full: Vec<usize> = (0..26).filter(|&layer| model.layer_types[layer] == "full_attention").collect();
    assert_eq!(full, [5, 11, 17, 23]);
    assert!(model.qk_norm && model.norm_unit_offset && model.post_norms && model.scale_embeddings);
    assert!(model.tie_word_embeddings && !model.fused_projections && model.rope_scaling.is_none());

    let nested = llama(&json!({
        "model_type": "gemma3_text", "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 7.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5.0},
        },
    }));
    assert_eq!((nested.rope_theta, nested.rope_local_base_freq), (7.0, Some(5.0)));
    assert_eq!(nested.rope_scaling, Some(RopeScaling::Linear { factor: 8.0 }));
    // No layer has a window, so none has other angles.
    let full = llama(&json!({"model_type": "gemma3_text", "num_hidden_layers": 1, "layer_types": ["full_attention"]}));
    assert_eq!((full.sliding_window, full.rope_local_base_freq, full.rope_theta), (None, None, 1e6));
}

/// The keys of microsoft/Phi-4-mini-instruct and of other Phi models that differ from Llama's.
#[test]
fn phi_3_is_read_with_its_scaling() {
    let factors = |first: f64| (0..48).map(|pair| first + f64::from(pair)).collect::<Vec<f64>>();
    let published = json!({
        "architectures": ["Phi3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
        "bos_token_id": 199999, "embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1, "hidden_act": "silu",
        "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192, "interpolate_factor": 1,
        "lm_head_bias": false, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "phi3",
        "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096, "pad_token_id": 199999, "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
        "rope_scaling": {"long_factor": factors(2.0), "short_factor": factors(1.0), "type": "longrope"},
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0", "use_cache": true, "vocab_size": 200064,
    });
    let config = resolved(&published);
    assert_eq!(config.warnings, []);
    assert_eq!(Config::parse("resolved.yaml", config.to_yaml()).unwrap().model, config.model);
    let Some(Model::Llama(model)) = config.model else { panic!() };
    let scaling = |original_max_position_embeddings| {
        Some(RopeScaling::LongRope {
            short_factor: factors(1.0),
            long_factor: factors(2.0),
            factor: None,
            attention_factor: None,
            original_max_position_embeddings,
        })
    };
    assert_eq!((&model.rope_scaling, model.partial_rotary_factor), (&scaling(4096), 0.75));
    assert_eq!((model.head_dim, model.sliding_window, model.fused_projections), (128, Some(262_144), true));
    assert_eq!((model.hidden_act, model.rms_norm_eps), (zero_config::Activation::Silu, 1e-5));
    let of = |more: Value| {
        let mut config = json!({"model_type": "phi3", "num_attention_heads": 32});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        llama(&config)
    };
    // Earlier names of the type, and transformers' default of the original length.
    for name in ["su", "yarn", "longrope"] {
        let keys = json!({"rope_scaling": {"type": name, "short_factor": factors(1.0), "long_factor": factors(2.0)}});
        assert_eq!(of(keys).rope_scaling, scaling(4096));
    }
    let inside = json!({
        "rope_type": "longrope", "short_factor": factors(1.0), "long_factor": factors(2.0), "rope_theta": 9.0,
        "partial_rotary_factor": 1.0, "original_max_position_embeddings": 4096,
    });
    let model = of(json!({"rope_parameters": inside, "original_max_position_embeddings": 64}));
    assert_eq!((model.rope_scaling, model.rope_theta, model.partial_rotary_factor), (scaling(64), 9.0, 1.0));
    let model = of(json!({}));
    assert_eq!((model.sliding_window, model.rope_scaling, model.num_key_value_heads), (None, None, 32));
    assert_eq!((model.vocab_size, model.max_position_embeddings, model.hidden_size), (Some(32_064), 4096, 3072));
}

#[test]
fn a_window_is_in_all_layers_in_some_or_in_none() {
    let window = |more: Value| {
        let mut config = json!({"num_hidden_layers": 2, "sliding_window": 7});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    let of = |more: Value| llama(&window(more)).sliding_window;
    assert_eq!(of(json!({"model_type": "mistral"})), Some(7));
    assert_eq!(of(json!({"model_type": "mistral", "sliding_window": null})), None);
    assert_eq!(of(json!({"model_type": "llama", "use_sliding_window": false})), None);
    assert_eq!(of(json!({"model_type": "qwen2"})), None);
    let qwen2 = |first: usize| json!({"model_type": "qwen2", "use_sliding_window": true, "max_window_layers": first});
    assert_eq!((of(qwen2(0)), of(qwen2(2))), (Some(7), None));
    let listed = |kinds: [&str; 2]| {
        let kinds = kinds.map(|kind| format!("{kind}_attention"));
        json!({"model_type": "qwen2", "use_sliding_window": true, "layer_types": kinds})
    };
    assert_eq!((of(listed(["full", "full"])), of(listed(["sliding", "sliding"]))), (None, Some(7)));
    for mixed in [qwen2(1), listed(["full", "sliding"])] {
        let model = llama(&window(mixed));
        assert_eq!(
            (model.sliding_window, model.layer_types),
            (Some(7), ["full", "sliding"].map(|kind| format!("{kind}_attention")).to_vec())
        );
    }
    let mut short = window(listed(["full", "full"]));
    short["num_hidden_layers"] = json!(3);
    let said = refused(&short);
    assert!(said.contains("`layer_types` should be a list with an entry for each of 3 layers"), "{said}");
    let said = refused(&window(json!({"model_type": "llama"})));
    assert!(said.contains("`sliding_window: 7` is not implemented yet"), "{said}");
    let said = refused(&window(listed(["full", "chunked"])));
    assert!(said.contains("`layer_types: chunked_attention` is not implemented yet"), "{said}");
}

#[test]
fn keys_that_change_the_arithmetic_are_rejected_by_name() {
    for (kind, key, value, said) in [
        ("gpt2", "activation_function", json!("gelu"), "`activation_function: gelu` is not implemented yet"),
        ("gpt2", "scale_attn_weights", json!(false), "`scale_attn_weights: false` is not implemented yet"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", json!(true), "`scale_attn_by_inverse_layer_idx: true` is not"),
        ("gpt2", "reorder_and_upcast_attn", json!(true), "`reorder_and_upcast_attn: true` is not implemented yet"),
        ("gpt2", "add_cross_attention", json!(true), "`add_cross_attention: true` is not implemented yet"),
        ("gpt2", "pruned_heads", json!({"0": [1]}), "`pruned_heads: {…}` is not implemented yet"),
        ("gpt2", "hidden_size", json!(64), "`hidden_size` is 64 and `n_embd`, which is the same, is not written"),
        ("gpt2", "architectures", json!(["GPT2ForSequenceClassification"]), "implemented of gpt2 is GPT2LMHeadModel"),
        ("llama", "quantization_config", json!({"bits": 4}), "`quantization_config: {…}` is not implemented yet"),
        ("llama", "auto_map", json!({"AutoModel": "x.Y"}), "`auto_map: {…}` is not implemented yet"),
        ("llama", "hidden_act", json!("gelu"), "`hidden_act: gelu` is not implemented yet"),
        ("llama", "num_local_experts", json!(8), "`num_local_experts: 8` is not implemented yet"),
        ("llama", "partial_rotary_factor", json!(0.5), "`partial_rotary_factor: 0.5` is not implemented yet"),
        ("llama", "final_logit_softcapping", json!(30.0), "`final_logit_softcapping: 30.0` is not implemented yet"),
        (
            "llama",
            "rope_scaling",
            json!({"type": "dynamic", "factor": 2}),
            "`rope_type: dynamic` is not implemented yet",
        ),
        (
            "llama",
            "rope_scaling",
            json!({"rope_type": "yarn", "factor": 2}),
            "`rope_type: yarn` is not implemented yet",
        ),
        ("llama", "rope_parameters", json!({"rope_type": "longrope"}), "`rope_type: longrope` needs `short_factor`"),
        ("phi3", "rope_scaling", json!({"type": "linear", "factor": 2}), "implemented of phi3 are default, longrope"),
        ("phi3", "resid_pdrop", json!(0.1), "`resid_pdrop: 0.1` is not implemented yet"),
        ("phi3", "mlp_bias", json!(true), "`mlp_bias` is none of phi3's"),
        ("phi3", "lm_head_bias", json!(true), "`lm_head_bias: true` is not implemented yet"),
        ("phi3", "rope_scaling", json!({"type": "longrope", "short_factor": [1], "long_factor": [1]}), "for 48 pairs"),
        ("gemma3_text", "hidden_activation", json!("gelu"), "`hidden_activation: gelu` is not implemented yet"),
        ("gemma3_text", "use_bidirectional_attention", json!(true), "`use_bidirectional_attention: true` is not"),
        ("gemma3_text", "attn_logit_softcapping", json!(50.0), "`attn_logit_softcapping: 50.0` is not implemented"),
        ("gemma3_text", "final_logit_softcapping", json!(30.0), "`final_logit_softcapping: 30.0` is not implemented"),
        ("gemma3_text", "sliding_window", json!(null), "layers of `sliding_attention` need `sliding_window`"),
        ("gemma3_text", "sliding_window_pattern", json!(0), "`sliding_window_pattern` should be at least 1"),
        (
            "gemma3_text",
            "rope_parameters",
            json!({"rope_type": "default"}),
            "`rope_parameters.rope_type: default` is not",
        ),
        (
            "gemma3_text",
            "rope_parameters",
            json!({"sliding_attention": {"rope_type": "linear", "factor": 2}}),
            "scaled frequencies of `sliding_attention` are not implemented yet",
        ),
        (
            "llama",
            "rope_scaling",
            json!({"rope_type": "linear", "factor": 2, "mscale": 3}),
            "`mscale: 3` of the rotary",
        ),
        ("llama", "rope_scaling", json!({"rope_type": "linear"}), "`rope_type: linear` needs `factor`"),
        ("llama", "rope_scaling", json!("linear"), "it should be a section of keys"),
        ("mistral", "attention_bias", json!(true), "`attention_bias` is none of mistral's"),
        ("qwen2", "mlp_bias", json!(true), "`mlp_bias` is none of qwen2's"),
        ("qwen3", "mlp_bias", json!(true), "`mlp_bias` is none of qwen3's"),
        ("smollm3", "no_rope_layers", json!([1, 0]), "should be a list with an entry for each of 36 layers"),
        ("llama", "resid_pdrop", json!(0.1), "`resid_pdrop: 0.1` is not implemented yet"),
        (
            "llama",
            "rope_parameters",
            json!({"rope_type": "default", "partial_rotary_factor": 0.5}),
            "`partial_rotary_factor: 0.5` of the rotary embedding is not implemented yet",
        ),
        // The schema's message, located in `config.json`.
        ("llama", "hidden_size", json!("wide"), "`model.hidden_size`: expected a whole number"),
        ("llama", "head_dim", json!(7), "rotary embedding turns pairs, so it must be even"),
        ("llama", "num_key_value_heads", json!(5), "num_key_value_heads 5 does not divide num_attention_heads 32"),
        ("gpt2", "n_layer", json!(0), "`model.n_layer`: expected a whole number"),
    ] {
        let mut config = json!({"model_type": kind});
        config[key] = value;
        let folder = folder(&config);
        let errors = with(&folder, "", "").map(|config| config.to_yaml()).expect_err(said);
        assert!(errors.contains(said), "{key}\n{errors}");
        assert!(errors.contains(&folder.path().join("config.json").display().to_string()), "{key}\n{errors}");
    }
    for (config, said) in [
        (json!({"model_type": "mixtral"}), "`model_type: mixtral` is not implemented yet"),
        (json!({"model_type": 3}), "`model_type: 3` is not implemented yet"),
        (json!({}), "`model_type` is missing"),
    ] {
        let errors = refused(&config);
        assert!(
            errors.contains(said) && errors.contains("implemented are gpt2, llama, mistral, qwen2, qwen3, smollm3"),
            "{errors}"
        );
    }
    let images = refused(&json!({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}));
    assert!(images.contains("this model also reads images; of Gemma 3 `gemma3_text` is implemented"), "{images}");
    // All unsupported keys are reported together.
    let two = json!({"model_type": "gpt2", "quantization_config": {"bits": 4}, "activation_function": "relu"});
    assert_eq!(with(&folder(&two), "", "").unwrap_err().matches("error:").count(), 2);
}

#[test]
fn ignored_keys_are_one_warning() {
    let mut config = json!({
        "model_type": "llama", "new_key": [1], "off": false, "nothing": null, "use_cache": false,
        "bos_token_id": 1, "transformers_version": "5.0", "pretraining_tp": 1, "quantization_config": null, "num_experts": 0,
    });
    let warnings = resolved(&config).warnings;
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    let said = "config.json has keys without effect here: `new_key`";
    assert!(warnings[0].message.ends_with(said), "{}", warnings[0].message);
    for index in 0..15 {
        config[format!("k{index:02}")] = json!(1);
    }
    let warnings = resolved(&config).warnings;
    assert!(warnings[0].message.ends_with("`k08`, 6 more"), "{}", warnings[0].message);
}

/// Dropout does not change the weights, so a value in the file takes precedence over the folder's.
#[test]
fn dropout_is_that_of_the_folder_or_of_the_file() {
    let pdrops = |model: &Gpt2| [model.embd_pdrop, model.resid_pdrop, model.attn_pdrop];
    let config = resolved(&json!({"model_type": "gpt2", "resid_pdrop": 0.0, "attn_pdrop": 0.3}));
    assert_eq!(config.warnings, []);
    assert_eq!(config.origins.get("model.attn_pdrop"), Origin::Pretrained);
    // transformers' default is 0.1.
    assert_eq!(pdrops(&gpt2(config)), [0.1, 0.0, 0.3]);
    let folder = folder(&json!({"model_type": "gpt2", "attn_pdrop": 0.3}));
    let config = with(&folder, "attn_pdrop: 0.0, embd_pdrop: 0.2", "").unwrap();
    assert_eq!(config.origins.get("model.attn_pdrop"), Origin::Line(2));
    assert_eq!(pdrops(&gpt2(config)), [0.2, 0.1, 0.0]);
    assert_eq!(llama(&json!({"model_type": "mistral", "attention_dropout": 0.1})).attention_dropout, 0.1);
    assert_eq!(llama(&json!({"model_type": "llama"})).attention_dropout, 0.0);
    let config = Config::parse("ds.yaml", "train_batch_size: 1\nmodel: {type: gpt2}".to_string()).unwrap();
    assert_eq!(pdrops(&gpt2(config)), [0.0; 3]);
    let errors = with(&folder, "attn_pdrop: 1.0", "").unwrap_err();
    assert!(errors.contains("model.attn_pdrop"), "{errors}");
}

#[test]
fn a_folder_that_cannot_be_read_is_one_error() {
    let said = |prepare: &dyn Fn(&TempDir)| {
        let folder = tempfile::tempdir().unwrap();
        prepare(&folder);
        let errors = with(&folder, "", "data: {train: a}").unwrap_err();
        assert!(
            errors.matches("error:").count() == 1 && errors.contains("in: model.pretrained (ds.yaml:2:"),
            "{errors}"
        );
        errors
    };
    let config = |folder: &TempDir| folder.path().join("config.json");
    assert!(said(&|_| ()).contains("config.json is not there"));
    assert!(said(&|folder| fs::create_dir(config(folder)).unwrap()).contains("it is not a file"));
    for text in ["", "{", "[]", "{\"a\": NaN}", &"[".repeat(1000)] {
        assert!(said(&|folder| fs::write(config(folder), text).unwrap()).contains("is not a JSON object"), "{text}");
    }
    let long = format!("{{\"a\": {:?}}}", "x".repeat(1 << 20));
    assert!(said(&|folder| fs::write(config(folder), &long).unwrap()).contains("is larger than 1024 KiB"));
}

#[test]
fn the_folders_tokenizer_is_the_default() {
    let folder = folder(&json!({"model_type": "gpt2"}));
    let of = |data: &str| with(&folder, "", data).unwrap().data.map(|data| data.tokenizer);
    assert_eq!(of("data: {train: a}"), Some(Tokenizer::Byte));
    let path = folder.path().join("tokenizer.json");
    fs::write(&path, "{}").unwrap();
    let taken = Some(Tokenizer::File(path.display().to_string()));
    assert_eq!((of("data: {train: a}"), of("data: {train: a, tokenizer: null}")), (taken.clone(), taken));
    assert_eq!(of("data: {train: a, tokenizer: byte}"), Some(Tokenizer::Byte));
    assert_eq!(of(""), None);
    let config = with(&folder, "", "data: {train: a}").unwrap();
    assert_eq!(config.origins.get("data.tokenizer"), Origin::Pretrained);
}

#[test]
fn models_without_gpu_kernels_name_the_key_that_lacks_one() {
    let key = |config: Value| resolved(&config).model.unwrap().only_on_the_cpu();
    for kind in ["gpt2", "llama", "mistral", "qwen2", "qwen3", "smollm3"] {
        assert_eq!(key(json!({"model_type": kind})), None);
    }
    assert_eq!(key(json!({"model_type": "gemma3_text"})), Some("model.norm_unit_offset"));
    assert_eq!(key(json!({"model_type": "phi3"})), Some("model.fused_projections"));
    assert_eq!(key(json!({"model_type": "phi3", "partial_rotary_factor": 0.5})), Some("model.partial_rotary_factor"));
    assert_eq!(key(json!({"model_type": "llama", "hidden_act": "gelu_new"})), Some("model.hidden_act"));
}
