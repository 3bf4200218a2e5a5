//! Writes the `config.json` of a Llama, for the Hugging Face class that has the model's features.

use serde_json::{Value, json};
use zero_config::{Activation, FULL_ATTENTION, Llama, RopeScaling, SLIDING_ATTENTION};

/// A class of transformers; its name lacks the suffix `ForCausalLM`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    SmolLm3,
    Gemma3,
    Phi3,
}

impl Class {
    /// Returns the name and the `model_type` of the class.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Llama => ("Llama", "llama"),
            Self::Mistral => ("Mistral", "mistral"),
            Self::Qwen2 => ("Qwen2", "qwen2"),
            Self::Qwen3 => ("Qwen3", "qwen3"),
            Self::SmolLm3 => ("SmolLM3", "smollm3"),
            Self::Gemma3 => ("Gemma3", "gemma3_text"),
            Self::Phi3 => ("Phi3", "phi3"),
        }
    }
}

/// Selects the Hugging Face class that supports this Llama's features, and returns its `config.json`.
pub(super) fn llama(model: &Llama, vocabulary: usize) -> Result<Value, String> {
    let class = class(model)?;
    let (name, model_type) = class.names();
    let mut fields = json!({
        "architectures": [format!("{name}ForCausalLM")],
        "model_type": model_type,
        "vocab_size": vocabulary,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_theta": model.rope_theta,
        "rms_norm_eps": model.rms_norm_eps,
        "tie_word_embeddings": model.tie_word_embeddings,
        "initializer_range": model.initializer_range,
        "attention_dropout": model.attention_dropout,
    });
    let mut add = |name: &str, value: Value| fields[name] = value;
    if class != Class::Gemma3 {
        add("hidden_act", json!(model.hidden_act));
    }
    if let Some(scaling) = &model.rope_scaling {
        add("rope_scaling", json!(scaling));
    }
    let windowed = model.sliding_window.is_some();
    let of_all = |kind: &str| vec![kind.to_string(); model.num_hidden_layers];
    let layer_types = match model.layer_types.is_empty() {
        true if windowed => of_all(SLIDING_ATTENTION),
        true => of_all(FULL_ATTENTION),
        false => model.layer_types.clone(),
    };
    if let Class::Llama | Class::Qwen3 | Class::SmolLm3 | Class::Gemma3 = class {
        add("attention_bias", json!(model.attention_bias));
    }
    if let Class::Llama | Class::SmolLm3 = class {
        add("mlp_bias", json!(model.mlp_bias));
    }
    match class {
        Class::Llama => {}
        Class::Mistral => add("sliding_window", json!(model.sliding_window)),
        Class::Qwen2 | Class::Qwen3 => {
            add("use_sliding_window", json!(windowed));
            add("sliding_window", json!(model.sliding_window));
            // Without `layer_types`, layers from `max_window_layers` on use the window.
            match model.layer_types.is_empty() {
                true => add("max_window_layers", json!(if windowed { 0 } else { model.num_hidden_layers })),
                false => add("layer_types", json!(layer_types)),
            }
        }
        Class::SmolLm3 => {
            add("use_sliding_window", json!(windowed));
            add("sliding_window", json!(model.sliding_window));
            add("layer_types", json!(layer_types));
            let all = vec![1; model.num_hidden_layers];
            add("no_rope_layers", json!(if model.no_rope_layers.is_empty() { &all } else { &model.no_rope_layers }));
        }
        Class::Gemma3 => {
            // The class needs a window even if no layer uses it.
            add("sliding_window", json!(model.sliding_window.unwrap_or(model.max_position_embeddings)));
            add("layer_types", json!(layer_types));
            add("rope_local_base_freq", json!(model.rope_local_base_freq.unwrap_or(model.rope_theta)));
            add("query_pre_attn_scalar", json!(query_scalar(model) as u64));
            // GELU has two names. Inference engines expect `gelu_pytorch_tanh`.
            let name = match model.hidden_act {
                Activation::GeluNew => "gelu_pytorch_tanh",
                other => other.name(),
            };
            add("hidden_activation", json!(name));
        }
        Class::Phi3 => {
            add("sliding_window", json!(model.sliding_window));
            add("partial_rotary_factor", json!(model.partial_rotary_factor));
            add("original_max_position_embeddings", json!(model.max_position_embeddings));
            if let Some(RopeScaling::LongRope {
                short_factor,
                long_factor,
                factor,
                attention_factor,
                original_max_position_embeddings,
            }) = &model.rope_scaling
            {
                add("original_max_position_embeddings", json!(original_max_position_embeddings));
                // transformers 4 permits these three keys only.
                let mut scaling = json!({"type": "longrope", "short_factor": short_factor, "long_factor": long_factor});
                for (name, value) in [("factor", factor), ("attention_factor", attention_factor)] {
                    if let Some(value) = value {
                        scaling[name] = json!(value);
                    }
                }
                add("rope_scaling", scaling);
            }
        }
    }
    Ok(fields)
}

/// Selects the Hugging Face class with this Llama's features.
fn class(model: &Llama) -> Result<Class, String> {
    let no_class = |of: &str| Err(format!("no Hugging Face class has {of}"));
    let some_slide = !model.layer_types.is_empty();
    let some_rotate = !model.no_rope_layers.is_empty();
    let of_gemma = [
        ("norm_unit_offset", model.norm_unit_offset),
        ("post_norms", model.post_norms),
        ("scale_embeddings", model.scale_embeddings),
        ("rope_local_base_freq", model.rope_local_base_freq.is_some()),
        ("query_pre_attn_scalar", model.query_pre_attn_scalar.is_some()),
    ];
    let of_others = [
        ("qkv_bias", model.qkv_bias),
        ("mlp_bias", model.mlp_bias),
        ("no_rope_layers", some_rotate),
        ("partial_rotary_factor", model.partial_rotary_factor < 1.0),
    ];
    let used = |features: &[(&'static str, bool)]| features.iter().find(|(_, is_used)| *is_used).map(|(name, _)| *name);
    if model.fused_projections {
        let of_none =
            [("qk_norm", model.qk_norm), ("attention_bias", model.attention_bias), ("layer_types", some_slide)];
        if let Some(feature) = used(&of_gemma).or(used(&of_others[..3])).or(used(&of_none)) {
            return no_class(&format!("`{feature}` and `fused_projections`"));
        }
        return match model.rope_scaling {
            None | Some(RopeScaling::LongRope { .. }) => Ok(Class::Phi3),
            Some(_) => no_class("`fused_projections` and this `rope_scaling`"),
        };
    }
    if let Some(feature) = used(&of_gemma) {
        if let Some(other) = used(&of_others) {
            return no_class(&format!("`{feature}` and `{other}`"));
        }
        if !(model.norm_unit_offset && model.post_norms && model.scale_embeddings && model.qk_norm) {
            let of = format!(
                "`{feature}` without all of `norm_unit_offset`, `post_norms`, `scale_embeddings` and `qk_norm`"
            );
            return no_class(&of);
        }
        if query_scalar(model).fract() != 0.0 {
            return no_class("a `query_pre_attn_scalar` that is not a whole number");
        }
        let slides = model.sliding_window.is_some();
        if slides && model.rope_local_base_freq.is_none() && model.rope_scaling.is_some() {
            return no_class("`rope_scaling` in the `sliding_attention` layers of a Gemma 3 model");
        }
        return Ok(Class::Gemma3);
    }
    if model.partial_rotary_factor < 1.0 {
        return no_class("`partial_rotary_factor` without `fused_projections`");
    }
    match (model.qk_norm, model.qkv_bias) {
        (true, true) => no_class("`qkv_bias` and `qk_norm`"),
        (true, false) if model.mlp_bias => no_class("`mlp_bias` and `qk_norm`"),
        (_, true) if model.mlp_bias || model.attention_bias => no_class("these biases"),
        (true, _) | (_, true) if some_rotate => no_class("`no_rope_layers` and `qk_norm` or `qkv_bias`"),
        (true, false) => Ok(Class::Qwen3),
        (false, true) => Ok(Class::Qwen2),
        (false, false) if some_rotate || some_slide => Ok(Class::SmolLm3),
        (false, false) => match (model.sliding_window, model.attention_bias || model.mlp_bias) {
            (None, _) => Ok(Class::Llama),
            (Some(_), false) => Ok(Class::Mistral),
            (Some(_), true) => Ok(Class::SmolLm3),
        },
    }
}

fn query_scalar(model: &Llama) -> f64 {
    model.query_pre_attn_scalar.unwrap_or(model.head_dim as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use zero_config::{Config, Model};

    const GEMMA3: &str = "norm_unit_offset: true, post_norms: true, scale_embeddings: true, qk_norm: true";
    const LONG: &str = "rope_scaling: {rope_type: longrope, short_factor: [1, 2], long_factor: [3, 4], \
                        original_max_position_embeddings: 64}";

    fn model(keys: &str) -> Llama {
        let text = format!(
            "train_batch_size: 1\nmodel: {{type: llama, vocab_size: 61, hidden_size: 16, num_attention_heads: 4, \
             num_hidden_layers: 2, {keys}}}"
        );
        match Config::parse("test.yaml", text).unwrap_or_else(|errors| panic!("{errors}")).model {
            Some(Model::Llama(model)) => model,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_exported_config_json_is_read_as_the_same_model() {
        for (keys, class) in [
            (String::new(), "Llama"),
            ("sliding_window: 5".into(), "Mistral"),
            (GEMMA3.into(), "Gemma3"),
            (format!("{GEMMA3}, sliding_window: 5, rope_local_base_freq: 7, query_pre_attn_scalar: 3"), "Gemma3"),
            (
                format!(
                    "{GEMMA3}, sliding_window: 5, rope_local_base_freq: 7, layer_types: [sliding_attention, full_attention], \
                     rope_scaling: {{rope_type: linear, factor: 8}}, attention_bias: true, hidden_act: gelu_pytorch_tanh"
                ),
                "Gemma3",
            ),
            ("fused_projections: true".into(), "Phi3"),
            (format!("fused_projections: true, sliding_window: 5, {LONG}"), "Phi3"),
            ("fused_projections: true, partial_rotary_factor: 0.5, hidden_act: gelu_new".into(), "Phi3"),
            (LONG.into(), "Llama"),
        ] {
            let before = model(&keys);
            let fields = llama(&before, 61).unwrap();
            assert_eq!(fields["architectures"], json!([format!("{class}ForCausalLM")]), "{keys}");
            let folder = tempfile::tempdir().unwrap();
            std::fs::write(folder.path().join("config.json"), fields.to_string()).unwrap();
            let text = format!("train_batch_size: 1\nmodel: {{pretrained: {:?}}}", folder.path());
            let config = Config::parse("again.yaml", text).unwrap_or_else(|errors| panic!("{keys}\n{errors}"));
            assert_eq!(config.warnings, [], "{keys}");
            let Some(Model::Llama(mut after)) = config.model else { panic!("{keys}") };
            after.pretrained = None;
            if class == "Gemma3" {
                // The Gemma 3 class writes out the value that the key has by default.
                after.query_pre_attn_scalar = before.query_pre_attn_scalar;
            }
            assert_eq!(after, before, "{keys}");
        }
    }

    #[test]
    fn features_without_a_hugging_face_class_are_named() {
        for (keys, said) in [
            ("norm_unit_offset: true", "`norm_unit_offset` without all of `norm_unit_offset`, `post_norms`"),
            ("query_pre_attn_scalar: 4", "`query_pre_attn_scalar` without all of"),
            (&format!("{GEMMA3}, mlp_bias: true"), "`norm_unit_offset` and `mlp_bias`"),
            (&format!("{GEMMA3}, query_pre_attn_scalar: 4.5"), "that is not a whole number"),
            (
                &format!("{GEMMA3}, sliding_window: 5, rope_scaling: {{rope_type: linear, factor: 8}}"),
                "`rope_scaling` in the `sliding_attention` layers of a Gemma 3 model",
            ),
            ("partial_rotary_factor: 0.5", "`partial_rotary_factor` without `fused_projections`"),
            ("fused_projections: true, qk_norm: true", "`qk_norm` and `fused_projections`"),
            ("fused_projections: true, mlp_bias: true", "`mlp_bias` and `fused_projections`"),
            (
                "fused_projections: true, rope_scaling: {rope_type: linear, factor: 8}",
                "`fused_projections` and this `rope_scaling`",
            ),
        ] {
            let error = llama(&model(keys), 61).unwrap_err();
            assert!(error.starts_with("no Hugging Face class has") && error.contains(said), "{keys}: {error}");
        }
    }
}
