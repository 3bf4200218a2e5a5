//! `sequence_parallel_size`: batch sizes, meshes, and settings that cannot be combined with it.

use zero_config::{Config, RotateMethod, load};

use crate::texts::source;

const HEAD: &str = "train_micro_batch_size_per_gpu: 2\nsequence_parallel_size: 2\n";

fn with(text: &str, ranks: usize) -> Config {
    Config::with_world_size("ds.yaml", format!("{HEAD}{text}"), ranks).unwrap_or_else(|errors| panic!("{errors}"))
}

fn errors(text: &str, ranks: usize) -> String {
    Config::with_world_size("ds.yaml", format!("{HEAD}{text}"), ranks).unwrap_err().to_string()
}

#[test]
fn sequence_parallel_ranks_count_as_one_data_parallel_rank() {
    for (text, ranks, batch, data, shards) in [
        ("", 2, 2, 1, 2),
        ("gradient_accumulation_steps: 3", 8, 24, 4, 8),
        ("pipeline: {stages: 2}", 8, 4, 2, 4),
        ("zero_optimization: {stage: 2}\nmesh: {data_parallel_replicate_degree: 2}", 8, 8, 4, 4),
        ("zero_optimization: {stage: 2}\nmesh: {data_parallel_shard_degree: 1}", 8, 8, 4, 2),
    ] {
        let config = with(text, ranks);
        let found = (config.train_batch_size, config.data_parallel_size(), config.shard_group_size());
        assert_eq!(found, (batch, data, shards), "{text}");
        let again = Config::with_world_size("ds.yaml", config.to_yaml(), ranks).unwrap();
        assert_eq!(again.sequence_parallel_size, 2);
    }
    // Without a number of ranks, the configuration resolves for one group in each pipeline stage.
    let config = Config::parse("ds.yaml", format!("{HEAD}pipeline: {{stages: 2}}")).unwrap();
    assert_eq!((config.world_size, config.train_batch_size), (4, 2));
}

#[test]
fn shard_groups_contain_whole_sequence_groups() {
    let text = format!("{HEAD}zero_optimization: {{stage: 2}}\nmesh: {{data_parallel_shard_degree: auto}}");
    let config = load(source(text), &[]).unwrap().on_hosts(4).resolve(Some(16)).unwrap();
    assert_eq!((config.mesh.data_parallel_shard_degree, config.shard_group_size()), (Some(2), 4));
}

#[test]
fn help_suggests_a_length_that_the_model_supports() {
    for (longest, length, expected) in [
        (64, 17, "the next multiple of 2 is 18"),
        (17, 17, "the largest multiple of 2 up to the model's maximum sequence length of 17 is 16"),
        (1, 1, "increase the model's maximum sequence length of 1 to 2, the next multiple of 2"),
    ] {
        let message = errors(
            &format!(
                "model: {{type: gpt2, vocab_size: 256, n_positions: {longest}, n_embd: 8, n_head: 2, n_layer: 1}}\n\
                 data: {{train: a.txt, sequence_length: {length}}}"
            ),
            2,
        );
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn sequence_groups_must_divide_the_ranks() {
    let message = errors("", 3);
    assert!(message.contains("3 ranks are not a multiple of sequence_parallel_size 2"), "{message}");
    assert!(message.contains("the next multiple is 4"), "{message}");
    let message = errors("pipeline: {stages: 2}", 6);
    assert!(
        message.contains("6 ranks are not a multiple of pipeline.stages × sequence_parallel_size = 2 × 2 = 4"),
        "{message}"
    );
}

#[test]
fn context_parallel_ranks_count_as_one_data_parallel_rank() {
    let text = "train_micro_batch_size_per_gpu: 2\nmesh: {context_parallel_degree: 2}\n";
    let of = |more: &str, ranks: usize| Config::with_world_size("ds.yaml", format!("{text}{more}"), ranks);
    let config = of("gradient_accumulation_steps: 3", 8).unwrap();
    assert_eq!((config.train_batch_size, config.data_parallel_size(), config.shard_group_size()), (24, 4, 8));
    assert_eq!((config.context_size(), config.context_key()), (2, "mesh.context_parallel_degree"));
    for (more, ranks, message) in [
        ("", 1, "1 rank is not a multiple of mesh.context_parallel_degree 2"),
        ("", 3, "3 ranks are not a multiple of mesh.context_parallel_degree 2"),
        ("data: {train: a.txt, sequence_length: 6}", 2, "samples of 6 tokens cannot be split into 2 × 2 chunks"),
        (
            "sequence_parallel_size: 3",
            8,
            "8 ranks are not a multiple of sequence_parallel_size × mesh.context_parallel_degree = 3 × 2 = 6",
        ),
    ] {
        let told = of(more, ranks).unwrap_err().to_string();
        assert!(told.contains(message), "{told}");
    }
}

#[test]
fn ring_attention_needs_context_parallel_ranks() {
    let of = |mesh: &str| {
        let text = format!("train_micro_batch_size_per_gpu: 2\nmesh: {{{mesh}}}\n");
        Config::with_world_size("ds.yaml", text, 4).unwrap()
    };
    let ring = of("context_parallel_degree: 2, context_parallel_rotate_method: alltoall");
    assert!(ring.mesh.context_parallel_rotate_method == RotateMethod::AllToAll && ring.warnings.is_empty());
    let alone = of("context_parallel_rotate_method: alltoall");
    let warnings: Vec<&str> = alone.warnings.iter().map(|warning| &*warning.message).collect();
    assert!(
        warnings.len() == 1 && warnings[0].contains("`mesh.context_parallel_degree` is not above 1"),
        "{warnings:?}"
    );
}

#[test]
fn sequence_and_context_degrees_multiply() {
    let text = "train_micro_batch_size_per_gpu: 2\nsequence_parallel_size: 2\nmesh: {context_parallel_degree: 2}\n";
    let config = Config::with_world_size("ds.yaml", text, 8).unwrap();
    assert_eq!((config.context_size(), config.data_parallel_size(), config.train_batch_size), (4, 2, 4));
}

#[test]
fn contradictions_name_both_keys() {
    for (text, key, message) in [
        ("data: {train: a.txt, sequence_length: 9}", "data.sequence_length", "cannot be split into 2 slices"),
        ("model: {type: gpt2, n_head: 1, n_embd: 8}", "model.n_head", "1 heads cannot be divided among 2 ranks"),
        (
            "data_efficiency: {enabled: true, data_sampling: {enabled: true, curriculum_learning: {enabled: true, curriculum_metrics: \
             {seqlen: {min_difficulty: 8, max_difficulty: 64, schedule_type: fixed_linear, schedule_config: \
             {total_curriculum_step: 10, difficulty_step: 1}}}}}}",
            "difficulty_step",
            "sequences of 1 tokens cannot be split into 2 slices",
        ),
        ("model: {type: mlp, input_size: 4}", "model.type", "an mlp has no sequences"),
        (
            "gradient_accumulation_steps: 2\ntraining: {gradient_noise_scale: {}}",
            "gradient_noise_scale",
            "slices of samples",
        ),
        (
            "gradient_accumulation_steps: 2\ntraining: {reproducible: true}\nzero_optimization: {stage: 1}",
            "zero_optimization.stage",
            "stage 1 reduces only their sum",
        ),
    ] {
        let found = errors(text, 4);
        assert!(found.contains(message) && found.contains(key) && found.contains("sequence_parallel_size"), "{found}");
    }
}
