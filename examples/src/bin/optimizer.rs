//! `Trainer` with an optimizer that the program defines: Adamax, which updates elements, or Shampoo, which updates
//! matrices. Its states are sharded, saved and planned like the states of zero-train's optimizers.
//!
//! ```sh
//! cargo run --release -p zero-examples --bin optimizer -- adamax
//! zero-train launch --nproc-per-node 2 target/release/optimizer shampoo
//! ```

#[path = "../adamax.rs"]
mod adamax;
#[path = "../shampoo.rs"]
mod shampoo;

use adamax::Adamax;
use shampoo::Shampoo;
use zero_train::Trainer;

const CONFIG: &str = concat!(
    "data: {train: [",
    env!("CARGO_MANIFEST_DIR"),
    "/../LICENSE-APACHE], eval_fraction: 0.1, sequence_length: 32}
model: {type: gpt2, n_layer: 1, n_head: 2, n_embd: 16, n_positions: 32, vocab_size: 256}
optimizer: {type: Custom, params: {lr: 0.02, weight_decay: 0.01}}
scheduler: {type: WarmupCosineLR, params: {warmup_num_steps: 5, total_num_steps: 60}}
train_batch_size: 8
zero_optimization: {stage: 3}
training: {max_steps: 60, eval_every: 30, reproducible: true}
"
);

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    let name = arguments.next().unwrap_or_default();
    let trainer = Trainer::from_arguments(arguments, "optimizer.yaml", CONFIG)?;
    let betas = (0.9, 0.999);
    let summary = match name.to_str() {
        Some("adamax") => trainer.optimizer(Adamax { betas, eps: 1e-8 }).fit()?,
        Some("shampoo") => trainer.optimizer(Shampoo { betas, epsilon: 1e-8 }).fit()?,
        _ => anyhow::bail!("the first argument is not adamax or shampoo, but {name:?}"),
    };
    assert!(summary.loss.is_none_or(|loss| loss < 3.4), "it did not learn: {summary:?}");
    Ok(())
}
