//! Keys that contradict each other: one error names all of them.

use zero_config::ErrorKind;

use crate::errors::{HEAD, errors};

#[test]
fn an_error_names_all_keys_of_a_contradiction() {
    const SUMS: &str = "data_types.grad_accum_dtype";
    let cases: [(&str, &[&str]); 20] = [
        ("bf16: {enabled: true}\nfp16: {enabled: true}", &["bf16.enabled", "fp16.enabled"]),
        (
            "fp16: {enabled: true, initial_scale_power: 3, min_loss_scale: 9}",
            &["fp16.initial_scale_power", "fp16.min_loss_scale"],
        ),
        (
            "bf16: {enabled: true}\ntraining: {reproducible: true}\ndata_types: {grad_accum_dtype: bf16}",
            &["training.reproducible", SUMS],
        ),
        ("data_types: {grad_accum_dtype: fp16}", &[SUMS]),
        (
            "bf16: {enabled: true}\ndata_types: {grad_accum_dtype: bf16}\ncommunication_data_type: fp16",
            &["communication_data_type", SUMS],
        ),
        ("data_types: {grad_accum_dtype: bf16}", &[SUMS, "bf16.enabled"]),
        (
            "bf16: {enabled: true}\noptimizer: {type: Lamb}\ndata_types: {grad_accum_dtype: bf16}",
            &[SUMS, "optimizer.type"],
        ),
        ("training: {max_steps: 1, epochs: 1}", &["training.max_steps", "training.epochs"]),
        ("data: {train: a, eval: b, eval_fraction: 0.1}", &["data.eval", "data.eval_fraction"]),
        ("data: {train: a}\ntraining: {eval_every: 5}", &["training.eval_every", "data"]),
        ("training: {early_stopping: {patience: 3}}", &["training.early_stopping", "training.eval_every"]),
        ("training: {keep_best: {}}", &["training.keep_best", "training.eval_every"]),
        (
            "model: {type: gpt2, n_positions: 64}\ndata: {train: a, sequence_length: 65}",
            &["data.sequence_length", "model"],
        ),
        ("optimizer: {type: AdamW, params: {adam_w_mode: false}}", &["optimizer.params.adam_w_mode", "optimizer.type"]),
        (
            "optimizer: {type: SGD, params: {nesterov: true}}",
            &["optimizer.params.nesterov", "optimizer.params.momentum", "optimizer.params.dampening"],
        ),
        (
            "training: {reproducible: true}\ncommunication_data_type: bf16",
            &["training.reproducible", "communication_data_type"],
        ),
        (
            "training: {reproducible: true}\ngradient_accumulation_steps: 3",
            &["training.reproducible", "gradient_accumulation_steps", "launcher.num_processes"],
        ),
        ("launcher: {max_restarts: 1, transport: threads}", &["launcher.max_restarts", "launcher.transport"]),
        ("launcher: {min_ranks: 1}", &["launcher.min_ranks", "launcher.max_restarts"]),
        (
            "launcher: {max_restarts: 1, num_processes: 2, min_ranks: 3}",
            &["launcher.min_ranks", "launcher.num_processes"],
        ),
    ];
    for (text, paths) in cases {
        let errors = errors(&format!("{HEAD}{text}"));
        assert_eq!(errors.count(), 1, "{errors}");
        let error = errors.iter().next().expect("at least one error");
        assert_eq!(error.kind, ErrorKind::Contradiction);
        assert_eq!(error.places.iter().map(|place| place.path.as_str()).collect::<Vec<_>>(), paths, "{text}");
    }
}
