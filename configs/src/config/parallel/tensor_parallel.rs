//! `tensor_parallel`: divides the parameters of layers among the ranks of a tensor group.

use serde::Serialize;

use crate::check::NO_EFFECT;
use crate::config::parallel::sequence_parallel::{near_multiple, uneven_length};
use crate::config::{Config, Data, Gpt2, Llama, Model, Optimizer, PartitionMethod, Pipeline, Quantization, Training};
use crate::read::reader::Resolver;
use crate::schema::*;
use crate::table::section;

section! {
    /// `tensor_parallel`.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct TensorParallel(keys) in Config::tensor_parallel {
        pub autotp_size: usize = key(COUNT_OR_0, "0", "Number of consecutive ranks that split each layer: attention by heads, feed-forward networks by columns, embedding and head by vocabulary. Norms compute slices of sequences. These ranks load the same samples. 0 and 1: no split");
        pub tp_overlap_comm: bool = key(Kind::Bool, "false", "Overlap communication and computation in the backward pass of a split linear layer: compute the input gradient while the input is gathered again, and the weight gradient while the input gradient is summed; results are bit-identical");
        = ignored("vocab_parallel_lm_head", Kind::Bool, "null", "embedding and head are always split by vocabulary");
        = section("tp", &TP, "Number of tensor-parallel ranks");
        = later("partition_config", "null", "How each weight is split").instead("`Layers::tensor_parallel` splits the layers of a custom model");
        = rejected("dtype", "torch.float16", "the value is a data type of PyTorch; use `bf16`");
        = rejected("vocab_parallel_ce_backend", "torch", "the value names a Python package");
        = rejected("injection_policy_tuple", "null", "the value names Python classes");
        = rejected("preset_model", "null", "the value names Python classes");
        = rejected("keep_module_on_host", "false", "the key is for inference, not for training");
        = rejected("kernel_inject", "false", "the key is for inference, not for training");
    }
}

impl TensorParallel {
    /// Checks that layers can be divided evenly, and rejects features that tensor parallelism does not support.
    pub(crate) fn check(config: &Config, resolver: &mut Resolver<'_>) {
        let (size, key) = (config.tensor_size(), Self::autotp_size);
        if size == 1 {
            if config.tensor_parallel.tp_overlap_comm {
                let message = format!("`{}` {NO_EFFECT}: `{key}` is not above 1", Self::tp_overlap_comm);
                resolver.warn(Self::tp_overlap_comm, message);
            }
            return;
        }
        let mut uneven = |path: &'static str, count: usize, what: &str| {
            if !count.is_multiple_of(size) {
                let message = format!("{what} cannot be divided evenly among {size} ranks: `{path}` is {count}");
                let help = format!("set `{key}` to a divisor of {count}");
                resolver.contradiction(&[key, path], message, Some(help));
            }
        };
        match &config.model {
            Some(Model::Gpt2(model)) => {
                uneven(Gpt2::n_head, model.n_head, "heads");
                uneven(Gpt2::n_inner, model.n_inner, "the feed-forward networks");
            }
            Some(Model::Llama(model)) => {
                uneven(Llama::num_attention_heads, model.num_attention_heads, "heads");
                uneven(Llama::num_key_value_heads, model.num_key_value_heads, "heads of keys and values");
                uneven(Llama::intermediate_size, model.intermediate_size, "the feed-forward networks");
            }
            _ => {}
        }
        let chunks = config.slices_of_a_sequence();
        if let Some(length) = config.data.as_ref().and_then(|data| data.sequence_length) {
            let (path, sharing) = (Data::sequence_length, config.context_size());
            let slice = length / sharing;
            if sharing == 1 {
                uneven(path, length, "the tokens of a sample");
            } else if length.is_multiple_of(chunks / size) && !slice.is_multiple_of(size) {
                // The keys that cut sequences report a length that they cannot cut.
                let message = format!(
                    "slices of {slice} tokens cannot be divided evenly among {size} ranks: `{path}` is {length}, and \
                     {sharing} ranks share each sequence"
                );
                let help = near_multiple(config, length, chunks);
                resolver.contradiction(&[key, path], message, Some(help));
            }
        }
        if let Some((path, length)) = uneven_length(config, chunks) {
            let message = format!("sequences of {length} tokens cannot be split into {chunks} slices of equal length");
            let help = near_multiple(config, length, chunks);
            resolver.contradiction(&[path, key], message, Some(help));
        }
        let quantization = config.quantization_config.as_ref();
        let updates_matrices = |of: &Optimizer| matches!(of, Optimizer::Muon(_) | Optimizer::Adafactor(_));
        let is_custom = config.optimizers().iter().any(|(_, optimizer)| matches!(optimizer, Optimizer::Custom(_)));
        let of_matrices = config.optimizers().iter().any(|(_, optimizer)| updates_matrices(optimizer));
        for (is_on, path, why) in [
            (matches!(config.model, Some(Model::Mlp(_))), Model::TYPE, "tensor parallelism does not support an mlp"),
            (
                quantization.is_some_and(|section| section.bnb_4bit_use_double_quant),
                Quantization::bnb_4bit_use_double_quant,
                "double quantization quantizes the scales of several rows together, but ranks hold parts of rows",
            ),
            (of_matrices, Optimizer::TYPE, "the optimizer updates whole matrices, but ranks hold parts of them"),
            (is_custom, Optimizer::TYPE, "a custom optimizer with tensor parallelism is not implemented"),
            (
                config.pipeline.stages > 1 && config.pipeline.partition_method == PartitionMethod::Time,
                Pipeline::partition_method,
                "`time` measures whole layers, but ranks hold parts of layers",
            ),
            (
                config.training.gradient_noise_scale.is_some(),
                Training::gradient_noise_scale,
                "the gradient noise scale needs the squares of whole gradients, but ranks hold parts of them",
            ),
        ] {
            if is_on {
                let help = format!("remove one of the two, or set `{key}: 1`");
                resolver.contradiction(&[path, key], why.to_string(), Some(help));
            }
        }
    }
}
