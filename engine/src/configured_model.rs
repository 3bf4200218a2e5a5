//! Builds models of the zoo from a configuration.

use candle_core::{DType, Device};
use zero_config::{self as config, Config};
use zero_model::ops::{LoraOptions, PreferenceLoss, QuantizationOptions, QuantizedFormat};
use zero_model::{Adapter, BuildError, Layers, Model, Trainable, zoo};

use crate::error::Error;
use crate::{mup, parameter_groups};

/// Returns the layers of the configured model. `vocabulary` is the tokenizer's vocabulary size, for `vocab_size: auto`.
///
/// # Errors
/// Fails if the configuration has no `model` section, or its vocabulary is smaller than the tokenizer's.
pub fn from_config(config: &Config, vocabulary: Option<usize>) -> Result<Layers, Error> {
    let Some(model) = &config.model else {
        return Err(Error::setting(
            "model",
            "the configuration has no model",
            "add a `model` section, for example `model: {type: gpt2, n_layer: 4, n_head: 4, n_embd: 128}`",
        ));
    };
    let base = config.base_model();
    Ok(match model {
        config::Model::Gpt2(model) => {
            let base = match &base {
                Some(config::Model::Gpt2(base)) => Some(gpt2(config, base, vocabulary)?.into()),
                _ => None,
            };
            zoo::gpt2(&zoo::Gpt2Config { base, ..gpt2(config, model, vocabulary)? })
        }
        config::Model::Llama(model) => {
            let base = match &base {
                Some(config::Model::Llama(base)) => Some(llama(config, base, vocabulary)?.into()),
                _ => None,
            };
            zoo::llama(&zoo::LlamaConfig { base, ..llama(config, model, vocabulary)? })
        }
        config::Model::Mlp(model) => {
            let base = match &base {
                Some(config::Model::Mlp(base)) => Some(mlp(base).into()),
                _ => None,
            };
            zoo::mlp(&zoo::MlpConfig { base, ..mlp(model) })
        }
    })
}

fn is_packed(config: &Config) -> bool {
    config.data.as_ref().is_some_and(|data| data.sample_packing)
}

fn gpt2(config: &Config, m: &config::Gpt2, vocabulary: Option<usize>) -> Result<zoo::Gpt2Config, Error> {
    Ok(zoo::Gpt2Config {
        vocab_size: vocab_size(m.vocab_size, vocabulary, m.pretrained.as_deref())?,
        n_positions: m.n_positions,
        n_embd: m.n_embd,
        n_layer: m.n_layer,
        n_head: m.n_head,
        n_inner: Some(m.n_inner),
        activation_function: m.activation_function,
        layer_norm_epsilon: m.layer_norm_epsilon as f32,
        initializer_range: m.initializer_range,
        tie_word_embeddings: m.tie_word_embeddings,
        tiled_mlp_rows: m.tiled_mlp_rows,
        packed: is_packed(config),
        preference: config.preference.as_ref().map(preference_loss),
        embd_pdrop: m.embd_pdrop as f32,
        resid_pdrop: m.resid_pdrop as f32,
        attn_pdrop: m.attn_pdrop as f32,
        base: None,
    })
}

fn llama(config: &Config, m: &config::Llama, vocabulary: Option<usize>) -> Result<zoo::LlamaConfig, Error> {
    // Code can set an activation that the schema of the configuration file does not allow.
    if !matches!(m.hidden_act, config::Activation::Silu | config::Activation::GeluNew) {
        return Err(Error::setting(
            "model.hidden_act",
            "Llama supports only the gates `silu` and `gelu_pytorch_tanh` so far",
            "remove the key",
        ));
    }
    Ok(zoo::LlamaConfig {
        vocab_size: vocab_size(m.vocab_size, vocabulary, m.pretrained.as_deref())?,
        hidden_size: m.hidden_size,
        intermediate_size: m.intermediate_size,
        num_hidden_layers: m.num_hidden_layers,
        num_attention_heads: m.num_attention_heads,
        num_key_value_heads: m.num_key_value_heads,
        head_dim: Some(m.head_dim),
        max_position_embeddings: m.max_position_embeddings,
        rope_theta: m.rope_theta,
        rope_scaling: m.rope_scaling.clone(),
        sliding_window: m.sliding_window,
        layer_types: m.layer_types.iter().map(|kind| layer_type(kind)).collect(),
        rotates: m.no_rope_layers.iter().map(|rotates| *rotates == 1).collect(),
        qk_norm: m.qk_norm,
        query_pre_attn_scalar: m.query_pre_attn_scalar,
        rope_local_base_freq: m.rope_local_base_freq,
        partial_rotary_factor: m.partial_rotary_factor,
        hidden_act: m.hidden_act,
        norm_unit_offset: m.norm_unit_offset,
        post_norms: m.post_norms,
        scale_embeddings: m.scale_embeddings,
        fused_projections: m.fused_projections,
        attention_dropout: m.attention_dropout as f32,
        rms_norm_eps: m.rms_norm_eps as f32,
        tie_word_embeddings: m.tie_word_embeddings,
        qkv_bias: m.qkv_bias,
        attention_bias: m.attention_bias,
        mlp_bias: m.mlp_bias,
        tiled_mlp_rows: m.tiled_mlp_rows,
        packed: is_packed(config),
        preference: config.preference.as_ref().map(preference_loss),
        initializer_range: m.initializer_range,
        base: None,
    })
}

fn mlp(m: &config::Mlp) -> zoo::MlpConfig {
    zoo::MlpConfig {
        input_size: m.input_size,
        hidden_sizes: m.hidden_sizes.clone(),
        num_labels: m.output_size,
        hidden_act: m.activation,
        base: None,
    }
}

fn preference_loss(preference: &config::Preference) -> PreferenceLoss {
    let &config::Preference { kind, beta, loss_type, label_smoothing, simpo_gamma: gamma } = preference;
    match (kind, loss_type) {
        (config::PreferenceType::Orpo, _) => PreferenceLoss::Orpo { beta },
        (config::PreferenceType::SimPo, _) => PreferenceLoss::SimPo { beta, gamma },
        (config::PreferenceType::Dpo, config::DpoLoss::Sigmoid) => PreferenceLoss::Sigmoid { beta },
        (config::PreferenceType::Dpo, config::DpoLoss::Hinge) => PreferenceLoss::Hinge { beta },
        (config::PreferenceType::Dpo, config::DpoLoss::Ipo) => PreferenceLoss::Ipo { beta },
        (config::PreferenceType::Dpo, config::DpoLoss::Robust) => PreferenceLoss::Robust { beta, label_smoothing },
    }
}

/// Converts a layer type by name. The schema has already checked the names.
fn layer_type(name: &str) -> zoo::LayerType {
    match name {
        config::SLIDING_ATTENTION => zoo::LayerType::SlidingAttention,
        _ => zoo::LayerType::FullAttention,
    }
}

fn vocab_size(configured: Option<usize>, tokenizer: Option<usize>, pretrained: Option<&str>) -> Result<usize, Error> {
    match (configured, tokenizer) {
        (Some(configured), Some(needed)) if configured < needed && pretrained.is_some() => Err(Error::setting(
            "data.tokenizer",
            format!("the tokenizer has {needed} tokens, but the pretrained model has {configured}"),
            "use the tokenizer that the model was trained with",
        )),
        (Some(configured), Some(needed)) if configured < needed => Err(Error::setting(
            "model.vocab_size",
            format!("{configured} is smaller than the data's vocabulary of {needed} tokens"),
            format!("set it to at least {needed}, or to `auto`"),
        )),
        (Some(configured), _) => Ok(configured),
        (None, Some(needed)) => Ok(needed),
        (None, None) => Err(Error::setting(
            "model.vocab_size",
            "`auto` takes the vocabulary size from the tokenizer, but the data has no tokenizer",
            "set it to the largest token in the files plus one, or set `data.tokenizer` to the tokenizer.json that produced the files",
        )),
    }
}

/// Builds a model on the CPU. `training.trainable` and `training.frozen`, or the configured adapters, decide which
/// parameters are trainable. If none of these keys is set, the selection in code ([`Layers::trainable`]) applies.
///
/// # Errors
/// Fails if a pattern is malformed or matches nothing, if nothing is trainable, or if a layer cannot be built.
pub fn build(config: &Config, layers: Layers, dtype: DType) -> Result<Model, Error> {
    build_on(config, layers, dtype, &Device::Cpu)
}

/// Splits the layers for a rank, if the configuration splits layers across ranks.
///
/// # Errors
/// Fails if the layers cannot be split.
pub fn cut(config: &Config, layers: Layers, rank: usize) -> Result<Layers, Error> {
    let ranks = config.tensor_size();
    if ranks > 1 && !layers.is_tensor_parallel() {
        let message = "the layers of this model do not support tensor parallelism";
        let help = "remove the key; in your own program, call `Layers::tensor_parallel` if the layers split their parameters across ranks";
        return Err(Error::setting("tensor_parallel.autotp_size", message, help));
    }
    Ok(layers.cut_among((rank % ranks, ranks)))
}

/// Builds the model like [`build`], with parameters on `device`.
///
/// # Errors
/// Fails in the same cases as [`build`].
pub fn build_on(config: &Config, layers: Layers, dtype: DType, device: &Device) -> Result<Model, Error> {
    let model = selected(config, mup::with_base_shapes(config, layers)?, dtype, device)?;
    let model = model.with_z_loss(config.training.z_loss as f32).map_err(|error| {
        let help = "remove the key, or end the model with a `zoo::LanguageHead`; a custom loss can call \
                    `ops::cross_entropy_with_z_loss`";
        Error::setting("training.z_loss", error.to_string(), help)
    })?;
    parameter_groups::tuned(config, parameter_groups::with_matrices(config, model)?)
}

/// Builds the model with the configured trainable parameters or adapters.
fn selected(config: &Config, layers: Layers, dtype: DType, device: &Device) -> Result<Model, Error> {
    let layers = with_quantization(config, layers);
    let (trainable, frozen) = (&config.training.trainable, &config.training.frozen);
    if let Some(adapter) = &config.adapter {
        return with_adapter(config, adapter, layers)?.build_on(dtype, device).map_err(of_adapter);
    }
    if trainable.is_none() && frozen.is_empty() {
        return layers.build_on(dtype, device).map_err(of_build);
    }
    let of_key = |error: BuildError| {
        let key = match &error {
            BuildError::UnmatchedPattern { pattern, .. } | BuildError::Pattern { pattern, .. }
                if frozen.contains(pattern) =>
            {
                "training.frozen"
            }
            BuildError::UnmatchedPattern { .. } | BuildError::Pattern { .. } => "training.trainable",
            BuildError::NothingTrainable if trainable.is_none() => "training.frozen",
            BuildError::NothingTrainable => "training.trainable",
            _ => return of_build(error),
        };
        parameter_groups::of_patterns(key, error, "leave at least one parameter trainable")
    };
    let selection = Trainable::new(trainable.as_deref(), frozen).map_err(of_key)?;
    layers.trainable(selection).build_on(dtype, device).map_err(of_key)
}

/// Adds the configured adapters to a model.
fn with_adapter(config: &Config, adapter: &config::Adapter, layers: Layers) -> Result<Layers, Error> {
    let both = |key| {
        Error::setting(
            key,
            "`adapter` already selects the trained parameters",
            "remove the key; to train more modules, use `adapter.modules_to_save`",
        )
    };
    if config.training.trainable.is_some() {
        return Err(both("training.trainable"));
    }
    if !config.training.frozen.is_empty() {
        return Err(both("training.frozen"));
    }
    let lora = LoraOptions {
        rank: adapter.r,
        scale: adapter.scale() as f32,
        dropout: adapter.lora_dropout as f32,
        init: adapter.init_lora_weights,
        magnitudes: adapter.use_dora,
        targets: adapter.targets(),
    };
    let lr_ratio = adapter.loraplus_lr_ratio.unwrap_or(1.0);
    Ok(layers.adapter(Adapter { lora, modules_to_save: adapter.modules_to_save.clone(), bias: adapter.bias, lr_ratio }))
}

/// Adds the responsible configuration key to an error about an adapter.
fn of_adapter(error: BuildError) -> Error {
    match error {
        BuildError::UnknownTarget { name, modules } => {
            let help = format!("its linear layers are {}", modules.join(", "));
            Error::setting("adapter.target_modules", format!("the model has no linear layer `{name}`"), help)
        }
        BuildError::UnknownModule { name, modules } => {
            let help = format!("its modules are {}", modules.join(", "));
            Error::setting("adapter.modules_to_save", format!("the model has no module `{name}`"), help)
        }
        BuildError::NoLinear => {
            Error::setting("adapter", error.to_string(), "build layers from `ops::Linear::new` or `ops::Conv1D::new`")
        }
        other => of_build(other),
    }
}

/// Quantizes the weights of a model as configured.
fn with_quantization(config: &Config, layers: Layers) -> Layers {
    let Some(quantization) = config.quantization_config.as_ref().filter(|section| section.quantizes()) else {
        return layers;
    };
    let format = match quantization.load_in_8bit {
        true => QuantizedFormat::Int8,
        false => QuantizedFormat::Four {
            code: quantization.bnb_4bit_quant_type,
            double: quantization.bnb_4bit_use_double_quant,
        },
    };
    layers.quantized(QuantizationOptions { format, skip: quantization.llm_int8_skip_modules.clone() })
}

/// Adds the responsible configuration key to an error about quantized weights or about the base model of µP.
fn of_build(error: BuildError) -> Error {
    const KEY: &str = "quantization_config";
    const SKIP: &str = "quantization_config.llm_int8_skip_modules";
    match error {
        BuildError::TrainedQuantized(_) => {
            let help = "add an `adapter` section to train adapters beside frozen weights, or list the module in \
                        `quantization_config.llm_int8_skip_modules`";
            Error::setting(KEY, error.to_string(), help)
        }
        BuildError::UnknownSkipped { name, modules } => {
            let help = format!("its modules are {}", modules.join(", "));
            Error::setting(SKIP, format!("the model has no module `{name}`"), help)
        }
        BuildError::NothingQuantized => {
            Error::setting(KEY, error.to_string(), "build layers from `ops::Linear::new` or `ops::Conv1D::new`")
        }
        BuildError::Base(_) | BuildError::BaseShapes(_) => Error::setting(
            "mup",
            error.to_string(),
            "describe a base model that differs from the model only in its widths",
        ),
        other => other.into(),
    }
}

/// Returns the number of tokens beyond which the model uses a second set of rotary angles for all positions of a
/// sequence, as LongRoPE does; `None` if there is no such limit.
#[must_use]
pub fn tokens_before_other_angles(model: &config::Model) -> Option<usize> {
    match model {
        config::Model::Llama(m) => match &m.rope_scaling {
            Some(config::RopeScaling::LongRope { original_max_position_embeddings, .. }) => {
                Some(*original_max_position_embeddings)
            }
            _ => None,
        },
        config::Model::Gpt2(_) | config::Model::Mlp(_) => None,
    }
}

/// Returns the maximum sequence length of the model; `None` if its inputs are not sequences.
#[must_use]
pub fn longest_sequence(model: &config::Model) -> Option<usize> {
    match model {
        config::Model::Gpt2(m) => Some(m.n_positions),
        config::Model::Llama(m) => Some(m.max_position_embeddings),
        config::Model::Mlp(_) => None,
    }
}
