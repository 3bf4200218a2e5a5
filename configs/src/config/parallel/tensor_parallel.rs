//! `tensor_parallel`: divides the parameters of layers among the ranks of a tensor group.

use serde::Serialize;

use crate::config::inactive::TP;
use crate::schema::*;
use crate::table::section;

section! {
    /// `tensor_parallel`.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct TensorParallel(keys) in "tensor_parallel" {
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
