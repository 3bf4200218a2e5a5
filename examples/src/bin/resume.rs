//! Stops in the middle of a training run and resumes from a checkpoint. The losses are bit-identical to the losses of
//! an uninterrupted run.
//!
//! ```sh
//! cargo run --release -p zero-examples --bin resume
//! ```
//!
//! A checkpoint loads into any layout: this program writes it under ZeRO-3 and reads it under ZeRO-1.

use candle_core::{Device, Tensor};
use zero_train::{Batch, Config, Engine, Layers, process, zoo};

const CHECKPOINTS: &str = "runs/resume-example/checkpoints";

/// The configuration is written in the program; a file would do as well.
fn config(zero_stage: u8) -> anyhow::Result<Config> {
    let config = Config::builder()
        .zero_stage(zero_stage)
        .train_batch(8)
        .gradient_clipping(1.0)
        .adamw(0.003)
        .set("scheduler.type", "WarmupCosineLR")
        .set("scheduler.params.total_num_steps", 40)
        .set("scheduler.params.warmup_num_steps", 5)
        .build()?;
    Ok(config)
}

/// Returns a model that classifies which of four features is the largest.
fn model() -> Layers {
    zoo::mlp(&zoo::MlpConfig {
        input_size: 4,
        hidden_sizes: vec![32, 32],
        num_labels: 4,
        hidden_act: zoo::Activation::Silu,
        base: None,
    })
}

/// Returns the batch of a step. It depends only on the step, so a resumed run sees the same batches.
fn batch(step: u64) -> candle_core::Result<Batch> {
    let feature = |i: u64| ((step * 37 + i * i * 11 + i * 5) % 101) as f32 / 101.0;
    let features: Vec<f32> = (0..32).map(feature).collect();
    let features = Tensor::from_vec(features, (8, 4), &Device::Cpu)?;
    let largest = features.argmax(1)?;
    Ok(Batch::new(features, largest))
}

/// Trains until step `steps` and returns the bits of each loss.
fn train(engine: &mut Engine, steps: u64) -> anyhow::Result<Vec<u32>> {
    let mut losses = vec![];
    while engine.steps() < steps {
        losses.push(engine.train_batch(&batch(engine.steps())?)?.loss.to_bits());
    }
    Ok(losses)
}

fn main() -> anyhow::Result<()> {
    process::set_up(&config(3)?)?; // before anything computes
    let mut through = Engine::new(config(3)?, model())?;
    let expected = train(&mut through, 40)?;

    // A program would call `Engine::new` here too. Within one process, the ranks reuse the process group that they have
    // already formed.
    let comm = through.communicator().clone();
    let mut stopped = Engine::with_communicator(config(3)?, model(), comm.clone())?;
    let mut losses = train(&mut stopped, 15)?;
    let saved = stopped.save_checkpoint(CHECKPOINTS)?;
    drop(stopped);

    let mut resumed = Engine::with_communicator(config(1)?, model(), comm.clone())?;
    let found = resumed.resume(CHECKPOINTS)?;
    assert_eq!(found, Some(saved), "the newest checkpoint is the one that was saved");
    assert_eq!(resumed.steps(), 15);
    losses.extend(train(&mut resumed, 40)?);

    assert_eq!(losses, expected, "every loss has the same bits");
    for index in 0..through.model().parameters().len() {
        let name = through.model().parameters()[index].name().to_string();
        assert_eq!(through.full_parameter(&name)?, resumed.full_parameter(&name)?, "{name}");
    }
    if comm.rank() == 0 {
        let [first, last] = [expected[0], expected[39]].map(f32::from_bits);
        println!("loss {first:.4} -> {last:.4}; stopped after step 15, every bit the same as without the stop");
    }
    Ok(())
}
