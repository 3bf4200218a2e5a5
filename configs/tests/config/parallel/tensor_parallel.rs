//! `tensor_parallel.autotp_size`: its effect on ranks and batch sizes, and messages for invalid combinations.

use zero_config::Config;

fn parsed(ranks: usize, text: &str) -> Result<Config, String> {
    let text = format!("train_micro_batch_size_per_gpu: 2\n{text}");
    Config::parse("ds.yaml", &text).and_then(|config| config.for_world_size(ranks)).map_err(|errors| errors.to_string())
}

const FOUR: &str = "tensor_parallel: {autotp_size: 4}\n";

#[test]
fn tensor_parallel_ranks_count_as_one_data_parallel_rank() {
    let config = parsed(16, &format!("{FOUR}pipeline: {{stages: 2}}")).unwrap();
    assert_eq!((config.tensor_size(), config.data_parallel_size(), config.train_batch_size), (4, 2, 4));
    assert_eq!((config.ranks_of_stage(), config.shard_group_size()), (2, 2));
    for off in ["", "tensor_parallel: {autotp_size: 0}", "tensor_parallel: {autotp_size: 1}"] {
        assert_eq!(parsed(4, off).unwrap().tensor_size(), 1);
    }
    // Without a number of ranks, the configuration resolves for the lowest number that the keys allow.
    let text = format!("{FOUR}train_micro_batch_size_per_gpu: 2\nsequence_parallel_size: 2");
    assert_eq!(Config::parse("ds.yaml", &text).unwrap().world_size, 8);
}

#[test]
fn indivisible_ranks_heads_and_tokens_are_rejected() {
    let gpt2 = "model: {type: gpt2, vocab_size: 61, n_positions: 64, n_layer: 2";
    let llama = "model: {type: llama, vocab_size: 61, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2";
    for (ranks, text, expected) in [
        (6, FOUR.to_string(), "6 ranks are not a multiple of tensor_parallel.autotp_size 4"),
        (
            12,
            format!("{FOUR}pipeline: {{stages: 2}}"),
            "12 ranks are not a multiple of pipeline.stages × tensor_parallel.autotp_size = 2 × 4 = 8",
        ),
        (4, format!("{FOUR}{gpt2}, n_embd: 48, n_head: 6}}"), "heads cannot be divided evenly among 4 ranks"),
        (
            4,
            format!("{FOUR}{gpt2}, n_embd: 48, n_head: 4, n_inner: 90}}"),
            "the feed-forward networks cannot be divided evenly among 4 ranks",
        ),
        (
            4,
            format!("{FOUR}{llama}, num_attention_heads: 8, num_key_value_heads: 2}}"),
            "heads of keys and values cannot be divided evenly among 4 ranks",
        ),
        (
            8,
            format!("tensor_parallel: {{autotp_size: 2}}\nsequence_parallel_size: 4\n{gpt2}, n_embd: 48, n_head: 4}}"),
            "2 heads cannot be divided among 4 ranks",
        ),
        (
            4,
            format!("{FOUR}data: {{train: a.txt, format: text, tokenizer: byte, sequence_length: 30}}"),
            "the tokens of a sample cannot be divided evenly among 4 ranks",
        ),
        (
            8,
            "tensor_parallel: {autotp_size: 2}\nsequence_parallel_size: 4\n\
             data: {train: a.txt, format: text, tokenizer: byte, sequence_length: 36}"
                .to_string(),
            "slices of 9 tokens cannot be divided evenly among 2 ranks: `data.sequence_length` is 36, and 4 ranks",
        ),
    ] {
        let error = parsed(ranks, &text).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn settings_that_exclude_tensor_parallelism_are_rejected() {
    for (text, expected) in [
        ("optimizer: {type: Muon, params: {lr: 0.01}}", "the optimizer updates whole matrices"),
        ("optimizer: {type: Adafactor, params: {lr: 0.01}}", "the optimizer updates whole matrices"),
        (
            "adapter: {r: 4}\nquantization_config: {load_in_4bit: true, bnb_4bit_use_double_quant: true}",
            "double quantization quantizes the scales of several rows together",
        ),
        ("pipeline: {stages: 2, partition_method: time}", "`time` measures whole layers"),
        (
            "data: {train: a.txt, tokenizer: byte, sequence_length: 64}\ntraining: {max_steps: 4}\n\
             data_efficiency: {enabled: true, data_sampling: {enabled: true, curriculum_learning: {enabled: true, \
             curriculum_metrics: {seqlen: {min_difficulty: 10, max_difficulty: 64, schedule_type: fixed_linear, \
             schedule_config: {total_curriculum_step: 4, difficulty_step: 8}}}}}}",
            "sequences of 10 tokens cannot be split into 4 slices",
        ),
        (
            "model: {type: mlp, input_size: 4, hidden_sizes: [8], num_labels: 3}",
            "tensor parallelism does not support an mlp",
        ),
    ] {
        let ranks = if text.contains("stages: 2") { 8 } else { 4 };
        let error = parsed(ranks, &format!("{FOUR}{text}")).unwrap_err();
        assert!(error.contains(expected), "{text}: {error}");
    }
}
