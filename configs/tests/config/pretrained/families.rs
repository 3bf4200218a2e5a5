//! `model.pretrained`: rotary scaling, windows, and the files of Gemma 3 and Phi.

use serde_json::{Value, json};
use zero_config::{Config, Model, RopeScaling};

use super::{llama, refused, resolved};

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
    // If these keys lack the original length, it comes from the key next to them or from the model's maximum length.
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
    // No layer has a sliding window, so the local base frequency is not used.
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
    // `su` and `yarn` are earlier names of the type. The default of the original length is that of transformers.
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
fn sliding_windows_apply_to_all_some_or_no_layers() {
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
