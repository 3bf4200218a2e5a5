//! Stops in the middle of a training run and resumes from a checkpoint, which it writes under ZeRO-3 and reads under
//! ZeRO-1. The losses and the parameters are bit-identical to those of an uninterrupted run.
//!
//! ```sh
//! cargo run --release -p zero-examples --bin resume
//! ```

#[path = "../largest.rs"]
mod largest;

use zero_train::{Config, Engine, process};

const CHECKPOINTS: &str = "runs/resume-example/checkpoints";

/// The configuration is part of the program. It could also be read from a file.
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

/// Trains until step `steps` and returns the bits of each loss.
fn train(engine: &mut Engine, steps: u64) -> anyhow::Result<Vec<u32>> {
    (engine.steps()..steps).map(|step| Ok(engine.train_batch(&largest::batch(step)?)?.loss.to_bits())).collect()
}

fn main() -> anyhow::Result<()> {
    process::set_up(&config(3)?)?; // before anything computes
    let mut through = Engine::new(config(3)?, largest::model())?;
    let expected = train(&mut through, 40)?;

    // The engines of this process share its communicator. In separate programs, `Engine::new` would create each engine.
    let comm = through.communicator().clone();
    let mut stopped = Engine::with_communicator(config(3)?, largest::model(), comm.clone())?;
    let mut losses = train(&mut stopped, 15)?;
    let saved = stopped.save_checkpoint(CHECKPOINTS)?;
    drop(stopped);
    let mut resumed = Engine::with_communicator(config(1)?, largest::model(), comm.clone())?;
    let found = resumed.resume(CHECKPOINTS)?;
    assert_eq!((found, resumed.steps()), (Some(saved), 15), "the newest checkpoint is the one that was saved");
    losses.extend(train(&mut resumed, 40)?);
    assert_eq!(losses, expected, "every loss has the same bits");
    let names: Vec<String> = through.model().parameters().iter().map(|it| it.name().to_string()).collect();
    for name in names {
        assert_eq!(through.full_parameter(&name)?, resumed.full_parameter(&name)?, "{name}");
    }
    if comm.rank() == 0 {
        let [first, last] = [expected[0], expected[39]].map(f32::from_bits);
        println!("loss {first:.4} -> {last:.4}; stopped after step 15, every bit the same as without the stop");
    }
    Ok(())
}
