//! `model.pretrained`: unsupported keys are rejected by name, and ignored keys are a warning.

use serde_json::json;

use super::{folder, refused, resolved, with};

#[test]
fn keys_that_change_the_arithmetic_are_rejected_by_name() {
    for (kind, key, value, said) in [
        ("gpt2", "activation_function", json!("gelu"), "`activation_function: gelu` is not implemented yet"),
        ("gpt2", "scale_attn_weights", json!(false), "`scale_attn_weights: false` is not implemented yet"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", json!(true), "`scale_attn_by_inverse_layer_idx: true` is not"),
        ("gpt2", "reorder_and_upcast_attn", json!(true), "`reorder_and_upcast_attn: true` is not implemented yet"),
        ("gpt2", "add_cross_attention", json!(true), "`add_cross_attention: true` is not implemented yet"),
        ("gpt2", "pruned_heads", json!({"0": [1]}), "`pruned_heads: {…}` is not implemented yet"),
        (
            "gpt2",
            "hidden_size",
            json!(64),
            "`hidden_size` is 64, and `n_embd`, which has the same meaning, is not written",
        ),
        (
            "gpt2",
            "architectures",
            json!(["GPT2ForSequenceClassification"]),
            "the class supported for gpt2 is GPT2LMHeadModel",
        ),
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
        ("llama", "rope_scaling", json!({"rope_type": 5}), "`rope_type: 5` is not implemented yet"),
        (
            "gemma3_text",
            "num_hidden_layers",
            json!(u64::MAX),
            "`model.num_hidden_layers`: expected an integer from 1 to 16384",
        ),
        ("llama", "rope_parameters", json!({"rope_type": "longrope"}), "`rope_type: longrope` needs `short_factor`"),
        (
            "phi3",
            "rope_scaling",
            json!({"type": "linear", "factor": 2}),
            "the types supported for phi3 are default, longrope",
        ),
        ("phi3", "resid_pdrop", json!(0.1), "`resid_pdrop: 0.1` is not implemented yet"),
        ("phi3", "mlp_bias", json!(true), "`mlp_bias` is not a key of phi3"),
        ("phi3", "lm_head_bias", json!(true), "`lm_head_bias: true` is not implemented yet"),
        (
            "phi3",
            "rope_scaling",
            json!({"type": "longrope", "short_factor": [1], "long_factor": [1]}),
            "needs 48: one for each pair of dimensions of a head",
        ),
        ("gemma3_text", "hidden_activation", json!("gelu"), "`hidden_activation: gelu` is not implemented yet"),
        ("gemma3_text", "use_bidirectional_attention", json!(true), "`use_bidirectional_attention: true` is not"),
        ("gemma3_text", "attn_logit_softcapping", json!(50.0), "`attn_logit_softcapping: 50.0` is not implemented"),
        ("gemma3_text", "final_logit_softcapping", json!(30.0), "`final_logit_softcapping: 30.0` is not implemented"),
        ("gemma3_text", "sliding_window", json!(null), "`sliding_attention` layers need `sliding_window`"),
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
        ("llama", "rope_scaling", json!("linear"), "`rope_scaling` should be a section"),
        ("mistral", "attention_bias", json!(true), "`attention_bias` is not a key of mistral"),
        ("qwen2", "mlp_bias", json!(true), "`mlp_bias` is not a key of qwen2"),
        ("qwen3", "mlp_bias", json!(true), "`mlp_bias` is not a key of qwen3"),
        ("smollm3", "no_rope_layers", json!([1, 0]), "should be a list with an entry for each of 36 layers"),
        ("llama", "resid_pdrop", json!(0.1), "`resid_pdrop: 0.1` is not implemented yet"),
        (
            "llama",
            "rope_parameters",
            json!({"rope_type": "default", "partial_rotary_factor": 0.5}),
            "`partial_rotary_factor: 0.5` of the rotary embedding is not implemented yet",
        ),
        // The schema's messages point to `config.json`.
        ("llama", "hidden_size", json!("wide"), "`model.hidden_size`: expected an integer"),
        ("llama", "head_dim", json!(7), "in pairs: the number must be even"),
        ("llama", "num_key_value_heads", json!(5), "num_key_value_heads 5 does not divide num_attention_heads 32"),
        ("gpt2", "n_layer", json!(0), "`model.n_layer`: expected an integer"),
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
            errors.contains(said)
                && errors.contains("the supported types are gpt2, llama, mistral, qwen2, qwen3, smollm3"),
            "{errors}"
        );
    }
    let images = refused(&json!({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}));
    assert!(
        images.contains(
            "this model also reads images, which is not supported; the text-only Gemma 3 type is `gemma3_text`"
        ),
        "{images}"
    );
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
    let said = "config.json has keys that have no effect here: `new_key`";
    assert!(warnings[0].message.ends_with(said), "{}", warnings[0].message);
    for index in 0..15 {
        config[format!("k{index:02}")] = json!(1);
    }
    let warnings = resolved(&config).warnings;
    assert!(warnings[0].message.ends_with("`k08`, 6 more"), "{}", warnings[0].message);
}
