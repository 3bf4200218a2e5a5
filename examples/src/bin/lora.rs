//! Trains a model, then adapts it to another task with LoRA: the model's weights are frozen, and only small matrices
//! beside the linear layers are trained.
//!
//! ```sh
//! cargo run --release -p zero-examples --bin lora
//! ```
//!
//! Linear maps get an adapter if they are built with `ops::Linear::new`. The rest is configuration.

use candle_core::{Device, Result, Tensor};
use candle_nn::VarBuilder;
use zero_train::checkpoint::{ExportDtype, Weights, export};
use zero_train::ops::{Linear, cross_entropy};
use zero_train::{Batch, Config, Engine, Layers, process};

/// Returns the layers of a network with one hidden layer.
fn model() -> Layers {
    Layers::new()
        .layer("up", |vb: VarBuilder| Linear::new(4, 32, 0.5, vb))
        .layer("relu", |_: VarBuilder| Ok(candle_nn::Activation::Relu))
        .layer("down", |vb: VarBuilder| Linear::new(32, 4, 0.2, vb))
        .loss(cross_entropy)
}

/// Returns features, and the index of the largest or the smallest feature of each row.
fn batch(largest: bool) -> Result<Batch> {
    let features: Vec<f32> = (0..256u32).map(|i| (i * i * 37 % 1009 + i * 11 % 97) as f32 / 500.0 - 1.0).collect();
    let features = Tensor::from_vec(features, (64, 4), &Device::Cpu)?;
    let target = if largest { features.argmax(1)? } else { features.argmin(1)? };
    Ok(Batch::new(features, target))
}

fn main() -> anyhow::Result<()> {
    let config = || Config::builder().zero_stage(3).train_batch(64).adamw(0.02);
    process::set_up(&config().build()?)?; // before anything computes
    let mut base = Engine::new(config().build()?, model())?;
    for _ in 0..100 {
        base.train_batch(&batch(true)?)?;
    }
    let comm = base.communicator().clone();
    let saved = base.save_checkpoint("runs/lora-example/checkpoints")?;
    let out = std::path::PathBuf::from("runs/lora-example/base");
    if comm.rank() == 0 {
        let _ = std::fs::remove_dir_all(&out); // of an earlier run
        export(&saved, &out, Weights { dtype: ExportDtype::F32, max_shard_bytes: 1 << 30, averaged: false })?;
    }
    comm.barrier().wait()?;

    let weights = out.join("*.safetensors").display().to_string();
    let lora = config().set("adapter.r", 4).set("adapter.lora_alpha", 8).set("training.initial_weights", weights);
    let mut tuned = Engine::with_communicator(lora.build()?, model(), comm.clone())?;
    let losses = (0..100).map(|_| Ok(tuned.train_batch(&batch(false)?)?.loss)).collect::<anyhow::Result<Vec<_>>>()?;
    assert_eq!(base.full_parameter("down.weight")?, tuned.full_parameter("down.weight")?, "the weights are frozen");
    assert!(losses[99] < 0.5 * losses[0], "it did not learn: {losses:?}");
    if comm.rank() == 0 {
        println!("loss {:.4} -> {:.4}, only adapters were trained", losses[0], losses[99]);
    }
    Ok(())
}
