//! Keys of `model`, `data`, `training` and `launcher`. DeepSpeed has no such sections; its users write these
//! settings in Python.

use super::*;
use crate::choice::Choice as _;
use crate::config::{
    Compute, DataFormat, GpuTransport, InstructionSet, Nonfinite, OnSpike, StopMode, TokenDtype, Transport,
    WeightDecayOn,
};

/// Upper bound that keeps every product of a model's sizes far from overflow.
const WIDTH: Kind = Kind::Int { min: 1, max: 1 << 20 };
const DEPTH: Kind = Kind::Int { min: 1, max: 1 << 14 };
const VOCABULARY: Kind = Kind::Int { min: 1, max: 1 << 30 };
const POSITIONS: Kind = Kind::Int { min: 1, max: 1 << 30 };
/// `zero_model::ops::TILE_UNIT`: sums over rows are bit-identical with tiles of a multiple of this many rows.
const TILES: Kind = Kind::Multiple { of: 64, max: 1 << 30 };
const TILED: &str = "Rows (samples × positions) of a micro-batch that the feed-forward part computes at a time, as DeepSpeed's TiledMLP: it keeps no inner activations and makes them again in the backward; null: all rows, and they are kept";
const PRETRAINED: &str = "Hugging Face folder of GPT-2, Llama, Mistral or Qwen2, relative to the working directory: `config.json` says type and sizes, of which what is written here must be the same, and training starts from its weights, `model.safetensors` or several files with an index, unless it resumes. Its `tokenizer.json` is taken where `data.tokenizer` is not written; null: weights are drawn from the seed";
const DROPOUT: &str = "Dropout; more than 0 is not implemented yet (Hugging Face's default is 0.1)";

#[rustfmt::skip]
pub(super) static MODEL: Variants = Variants {
    params: None,
    shared: &[],
    list: &[
        Variant { name: "gpt2", meaning: "GPT-2, with Hugging Face's names", status: Status::Now, keys: GPT2 },
        Variant { name: "llama", meaning: "Llama, with Hugging Face's names", status: Status::Now, keys: LLAMA },
        Variant { name: "mlp", meaning: "Fully connected layers", status: Status::Now, keys: MLP },
    ],
};

#[rustfmt::skip]
static GPT2: &[Key] = &[
    key("pretrained", Kind::Path, "null", PRETRAINED),
    engine("vocab_size", VOCABULARY, "50257", "Number of tokens; auto: the tokenizer's"),
    key("n_positions", POSITIONS, "1024", "Longest sequence"),
    key("n_embd", WIDTH, "768", "Width of the residual stream"),
    key("n_layer", DEPTH, "12", "Number of blocks"),
    key("n_head", WIDTH, "12", "Attention heads; divides n_embd"),
    key("n_inner", WIDTH, "= 4 · n_embd", "Width inside the feed-forward part"),
    key("activation_function", Kind::Choice { names: &["gelu_new", "gelu_pytorch_tanh"], later: &["gelu", "relu", "silu"] }, "gelu_new", "Non-linearity of the feed-forward part"),
    key("layer_norm_epsilon", POSITIVE, "1.0e-5", "Added to the variance in layer norm"),
    key("initializer_range", NON_NEGATIVE, "0.02", "Standard deviation of the initial weights"),
    key("tie_word_embeddings", Kind::Bool, "true", "The head shares the embedding's weights"),
    key("tiled_mlp_rows", TILES, "null", TILED),
    later("embd_pdrop", "0.0", DROPOUT),
    later("resid_pdrop", "0.0", DROPOUT),
    later("attn_pdrop", "0.0", DROPOUT),
];

#[rustfmt::skip]
static LLAMA: &[Key] = &[
    key("pretrained", Kind::Path, "null", PRETRAINED),
    engine("vocab_size", VOCABULARY, "32000", "Number of tokens; auto: the tokenizer's"),
    key("hidden_size", WIDTH, "4096", "Width of the residual stream"),
    key("intermediate_size", WIDTH, "11008", "Width inside the feed-forward part"),
    key("num_hidden_layers", DEPTH, "32", "Number of blocks"),
    key("num_attention_heads", WIDTH, "32", "Attention heads"),
    key("num_key_value_heads", WIDTH, "= num_attention_heads", "Heads of keys and values; divides num_attention_heads"),
    key("head_dim", WIDTH, "= hidden_size / num_attention_heads", "Width of a head; even"),
    key("max_position_embeddings", POSITIONS, "2048", "Longest sequence"),
    key("rope_theta", POSITIVE, "10000.0", "Base of the rotary embedding's frequencies"),
    section("rope_scaling", &ROPE_SCALING, "How the rotary embedding's frequencies are scaled for sequences longer than those of an earlier training; null: they are not"),
    key("sliding_window", POSITIONS, "null", "How many positions one attends to, its own included, as Mistral; null: all before it"),
    key("rms_norm_eps", POSITIVE, "1.0e-6", "Added to the mean square in RMS norm"),
    key("tie_word_embeddings", Kind::Bool, "false", "The head shares the embedding's weights"),
    key("tiled_mlp_rows", TILES, "null", TILED),
    key("initializer_range", NON_NEGATIVE, "0.02", "Standard deviation of the initial weights"),
    key("qkv_bias", Kind::Bool, "false", "Biases in the projections of queries, keys and values, as Qwen2"),
    key("attention_bias", Kind::Bool, "false", "Biases in all four projections of the attention"),
    key("mlp_bias", Kind::Bool, "false", "Biases in the three projections of the feed-forward part"),
    key("hidden_act", Kind::Choice { names: &["silu", "swish"], later: &["gelu", "gelu_new", "relu"] }, "silu", "Non-linearity of the gate"),
];

#[rustfmt::skip]
static ROPE_SCALING: Section = Section { switch: Switch::Keys, keys: &[
    key("rope_type", Kind::Choice { names: &["default", "linear", "llama3"], later: &["dynamic", "yarn", "longrope"] }, REQUIRED, "default: none; linear: every frequency divided by factor; llama3: the low ones, as Llama 3.1"),
    key("factor", POSITIVE, "null", "What frequencies are divided by; with linear and llama3"),
    key("low_freq_factor", POSITIVE, "null", "llama3: a pair that turns less often than this over the original positions is divided"),
    key("high_freq_factor", POSITIVE, "null", "llama3: a pair that turns more often than this is kept; larger than low_freq_factor"),
    key("original_max_position_embeddings", POSITIONS, "null", "llama3: longest sequence of the earlier training"),
] };

#[rustfmt::skip]
static MLP: &[Key] = &[
    key("input_size", WIDTH, REQUIRED, "Width of the input"),
    key("hidden_sizes", Kind::Ints { min: 1, max: 1 << 20 }, "[]", "Widths of the hidden layers"),
    key("output_size", WIDTH, REQUIRED, "Width of the output"),
    key("activation", Kind::Choice { names: &["relu", "gelu", "silu"], later: &[] }, "relu", "Non-linearity between layers"),
];

#[rustfmt::skip]
pub(super) static DATA: Section = Section { switch: Switch::Keys, keys: &[
    key("train", Kind::Paths, REQUIRED, "File, glob, or list of them, relative to the working directory"),
    key("eval", Kind::Paths, "null", "The same, to evaluate on"),
    key("eval_fraction", Kind::Float(FRACTION), "0.0", "Part of the training data's end that is kept for evaluation when `eval` is not given"),
    key("format", Kind::Choice { names: DataFormat::NAMES, later: &[] }, "auto", "How files are read; auto: by the name's end; bytes: as they are, whatever they hold, by the byte tokenizer"),
    key("tokenizer", Kind::Text, "byte", "byte, or the path of a Hugging Face tokenizer.json"),
    key("sequence_length", POSITIONS, "= the model's longest", "Tokens per sample"),
    key("text_key", Kind::Text, "text", "Field of a JSON line that holds the text"),
    key("token_dtype", Kind::Choice { names: TokenDtype::NAMES, later: &[] }, "u16", "Type of the numbers in a token file"),
    key("shuffle", Kind::Bool, "true", "Draw samples in a random order that depends on the seed only"),
] };

#[rustfmt::skip]
pub(super) static TRAINING: Section = Section { switch: Switch::Keys, keys: &[
    key("max_steps", COUNT, "= 100, unless epochs is given", "Optimizer steps to train"),
    key("epochs", POSITIVE, "null", "Passes over the data to train, instead of max_steps"),
    key("device", Kind::Choice { names: Compute::NAMES, later: &[] }, "cpu", "What layers run on: the processor, or a GPU of NVIDIA's for each rank"),
    key("seed", SIZE, "1234", "Seed of initialisation, shuffling and dropout"),
    key("initial_weights", Kind::Paths, "null", "Safetensors files with the model's parameters by name: file, glob, or list of them; drawn from the seed when not given"),
    key("reproducible", Kind::Bool, "false", "Same bits at every number of ranks that is a power of two"),
    key("eval_every", COUNT_OR_0, "0", "Evaluate every so many steps; 0 never"),
    key("eval_batches", COUNT, "8", "Micro-batches per evaluation and rank; where a program gives its own evaluation data and this is not written, all of them"),
    key("save_every", COUNT_OR_0, "0", "Save a checkpoint every so many steps; 0 never on the way"),
    key("save_last", Kind::Bool, "true", "Save a checkpoint when training is over; a run that a signal stops saves one in any case"),
    key("save_async", Kind::Bool, "false", "Write the checkpoints on the way while training goes on, from a copy of the state, which takes memory"),
    key("keep_last", COUNT_OR_0, "2", "Checkpoints kept; 0 keeps all"),
    key("keep_every", COUNT_OR_0, "0", "Keep those of every so many steps in any case"),
    key("output_dir", Kind::Text, "= runs/<name of the file>", "Folder of the run"),
    key("nonfinite", Kind::Choice { names: Nonfinite::NAMES, later: &[] }, "skip", "What a gradient or loss that is not finite does: skip the update, or stop the run"),
    key("max_skipped_steps", COUNT, "20", "So many skipped steps in a row stop the run"),
    section("spikes", &SPIKES, "What to do about a gradient norm far above those before it"),
    key("compare_replicas_every", COUNT_OR_0, "100", "Compare checksums of what ranks hold alike every so many steps; 0 never"),
    section("early_stopping", &EARLY_STOPPING, "Stop when evaluations no longer improve"),
    key("weight_decay_on", Kind::Choice { names: WeightDecayOn::NAMES, later: &[] }, "matrices", "Which parameters are decayed: matrices leaves out biases and norms"),
    key("memory_limit", Kind::Bytes { min: 1 << 20 }, "= the cgroup's, or the machine's memory", "Bytes that a rank may hold, as a number or like `6GiB` or `800 MB`"),
    key("cost_table", Kind::Path, "null", "Table of `zero-train bench costs`, relative to the working directory: says how long a step takes, and decides overlap_comm"),
    section("sample", &SAMPLE, "Text to generate when training is over"),
    key("trace", Kind::Bool, "false", "Write the measured timeline of the run"),
] };

#[rustfmt::skip]
static SPIKES: Section = Section { switch: Switch::Keys, keys: &[
    key("window", COUNT, "32", "Steps whose median a norm is compared with; before there are so many, none is a spike"),
    key("factor", Kind::Float(Range { min: 1.0, max: f64::MAX, above: true, below: false }), "10.0", "What is more than so many times the median is a spike"),
    key("action", Kind::Choice { names: OnSpike::NAMES, later: &[] }, "skip", "Say so (warn), make no update (skip), or end the run (stop)"),
] };

#[rustfmt::skip]
static EARLY_STOPPING: Section = Section { switch: Switch::Keys, keys: &[
    key("patience", COUNT, REQUIRED, "Evaluations without improvement before training stops"),
    key("min_delta", NON_NEGATIVE, "0.0", "What counts as improvement: a value better than the best by more than this"),
    key("metric", Kind::Text, "loss", "What evaluations are compared by: the evaluation loss, or a metric of the program's own"),
    key("mode", Kind::Choice { names: StopMode::NAMES, later: &[] }, "min", "Which value of it is better: the lower (min) or the higher (max)"),
] };

#[rustfmt::skip]
static SAMPLE: Section = Section { switch: Switch::Keys, keys: &[
    key("prompt", Kind::Text, REQUIRED, "Text to continue"),
    key("tokens", COUNT, "200", "Tokens to generate"),
    key("temperature", NON_NEGATIVE, "0.8", "Divides the logits; 0 takes the likeliest token"),
    key("top_k", COUNT, "null", "Draw from the likeliest so many tokens only"),
] };

#[rustfmt::skip]
pub(super) static LAUNCHER: Section = Section { switch: Switch::Keys, keys: &[
    engine("num_processes", RANKS, "= pipeline.stages; with training.device: cuda one for each GPU", "Ranks to start on this machine"),
    key("transport", Kind::Choice { names: Transport::NAMES, later: &[] }, "auto", "What carries messages between ranks"),
    key("gpu_transport", Kind::Choice { names: GpuTransport::NAMES, later: &[] }, "auto", "What carries values between GPUs: NCCL where it is there and every rank has a GPU of its own, else the host"),
    key("interface", Kind::Text, "null", "Network interface or address to bind; loopback when not given"),
    key("timeout_seconds", Kind::Float(Range { min: 0.0, max: 86_400.0, above: true, below: false }), "30.0", "Seconds without a sign of a peer before it counts as lost"),
    engine("threads_per_rank", Kind::Int { min: 1, max: 4096 }, "auto", "Compute threads of each rank; auto: the cores divided by the ranks on this machine"),
    key("instruction_set", Kind::Choice { names: InstructionSet::NAMES, later: &[] }, "auto", "Instruction set of the kernels; auto: the widest that the processor has. The environment variable ZERO_TRAIN_ISA wins over it"),
    key("bind_cores_to_rank", Kind::Bool, "true", "Bind each rank to cores of its own; not done when there are more ranks, or threads, than cores, or when another launcher has bound them"),
    key("max_restarts", COUNT_OR_0, "0", "How often `zero-train -n` starts all ranks again, from the newest checkpoint, after one has died; 0 never"),
    key("min_ranks", RANKS, "null", "A restart does without the ranks that died, as long as so many are left, with the same train_batch_size; null: as many ranks as before"),
    key("bind_core_list", Kind::Text, "null", "Cores to use, as in `0-27,32-59`; those that the process may use when not given"),
] };
