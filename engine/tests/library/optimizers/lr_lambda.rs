//! Learning-rate schedules that are defined in code: [`Layers::lr_lambda`](zero_engine::Layers::lr_lambda).

use zero_engine::{Config, Engine};

use crate::world::{assert_same, batch, engine_of, gpt2, reproducible, resume, run_of, save, world};

const ADAMW: &str = "optimizer: {type: AdamW, params: {lr: 0.002}}";
const LINEAR: &str = "scheduler: {type: linear, params: {num_warmup_steps: 2, num_training_steps: 6}}";

/// The factor of `get_linear_schedule_with_warmup` in transformers, for 2 steps of warm-up and 6 in total.
fn linear(steps: u64) -> f64 {
    if steps < 2 { steps as f64 / 2.0 } else { 6_u64.saturating_sub(steps) as f64 / 4.0 }
}

#[test]
fn the_factors_of_a_ready_schedule_give_its_run() {
    let expected = run_of(gpt2, 1, 5, &reproducible(0, 1, &format!("{ADAMW}\n{LINEAR}")));
    for (ranks, zero_stage) in [(1, 0), (2, 3)] {
        let text = reproducible(zero_stage, ranks, ADAMW);
        let got = run_of(|| gpt2().lr_lambda(linear), ranks, 5, &text);
        assert_same(&expected, &got, &text);
    }
    let (folder, text) = (tempfile::tempdir().unwrap(), reproducible(2, 2, ADAMW));
    save((2, 3), folder.path(), |comm| engine_of(gpt2().lr_lambda(linear), comm, &text));
    let rest = resume((2, 2), folder.path(), |comm| engine_of(gpt2().lr_lambda(linear), comm, &text));
    assert_same(&expected.after(3), &rest, "resumed");
}

/// If ranks used different factors, the shards of a parameter would be updated with different rates.
#[test]
fn all_ranks_use_the_factor_of_rank_0() {
    let text = reproducible(3, 2, ADAMW);
    let expected = run_of(|| gpt2().lr_lambda(|_| 0.5), 2, 2, &text);
    let of_ranks = world(2, |comm| {
        let own = if comm.rank() == 0 { 0.5 } else { 0.25 };
        let mut engine = engine_of(gpt2().lr_lambda(move |_| own), comm, &text);
        (0..2).map(|step| engine.train_batch(&batch(step, 4)).unwrap().loss.to_bits()).collect::<Vec<_>>()
    });
    assert_eq!(of_ranks, [expected.losses.clone(), expected.losses]);
}

#[test]
fn faults_are_reported() {
    let text = reproducible(0, 1, ADAMW);
    let said = world(1, |comm| {
        let mut engine = engine_of(gpt2().lr_lambda(|steps| if steps == 1 { f64::NAN } else { 1.0 }), comm, &text);
        engine.train_batch(&batch(0, 4)).unwrap();
        engine.train_batch(&batch(1, 4)).unwrap_err().to_string()
    });
    assert!(said[0].contains("`lr_lambda` returned NaN after 1 optimizer step\n"), "{}", said[0]);

    let both = format!("train_batch_size: 1\n{ADAMW}\n{LINEAR}");
    let said = world(1, |comm| {
        let config = Config::with_world_size("both.yaml", both.clone(), 1).unwrap();
        Engine::with_communicator(config, gpt2().lr_lambda(linear), comm).err().expect("two schedules").to_string()
    });
    assert!(said[0].contains("remove the section or the call of `lr_lambda`"), "{}", said[0]);
}
