//! A configuration that the program builds or changes trains like the same configuration from a file, on any number of
//! ranks.

use zero_config::{Config, ZeroStage};
use zero_engine::Engine;

use crate::world::{Trajectory, assert_same, gpt2, trajectory, world};

const WRITTEN: &str = "\
train_batch_size: 4
train_micro_batch_size_per_gpu: 2
gradient_clipping: 0.5
optimizer: {type: AdamW, params: {lr: 0.02, weight_decay: 0.1}}
zero_optimization: {stage: 3}
training: {reproducible: true}
";

fn run(ranks: usize, config: &Config) -> Trajectory {
    let of_rank = |comm| {
        let mut engine = Engine::with_communicator(config.clone(), gpt2(), comm).unwrap_or_else(|e| panic!("{e}"));
        trajectory(&mut engine, 3)
    };
    let mut all = world(ranks, of_rank);
    all.iter().for_each(|other| assert_same(&all[0], other, "ranks"));
    all.remove(0)
}

/// Returns the same configuration, but sets its fields in the program.
fn changed() -> Config {
    let text = "train_batch_size: 4\noptimizer: {type: AdamW, params: {lr: 0.02, weight_decay: 0.1}}\n";
    let mut config = Config::parse("ds.yaml", text).unwrap();
    config.train_micro_batch_size_per_gpu = 2;
    config.gradient_clipping = 0.5;
    config.zero.stage = ZeroStage::Three;
    config.training.reproducible = true;
    config
}

#[test]
fn a_changed_configuration_trains_like_a_file_on_one_rank_and_on_two() {
    let built = Config::builder()
        .train_batch(4)
        .micro_batch(2)
        .gradient_clipping(0.5)
        .adamw(0.02)
        .set("optimizer.params.weight_decay", 0.1)
        .zero_stage(3)
        .set("training.reproducible", true);
    let (built, written) = (built.build().unwrap(), Config::parse("ds.yaml", WRITTEN).unwrap());
    let expected = run(1, &written);
    for ranks in [1, 2] {
        assert_same(&expected, &run(ranks, &written), "file");
        assert_same(&expected, &run(ranks, &changed()), "changed");
        assert_same(&expected, &run(ranks, &built), "built");
    }
}

#[test]
fn a_change_on_one_rank_only_is_an_error_that_names_the_key() {
    let ended = world(2, |comm| {
        let mut config = changed();
        config.training.seed = 1 + comm.rank() as u64;
        Engine::with_communicator(config, gpt2(), comm).err().map(|error| error.to_string())
    });
    let expected = "the ranks were started with different settings: training.seed is 1 on rank 0 and 2 on rank 1";
    for error in ended {
        assert!(error.as_ref().is_some_and(|error| error.contains(expected)), "{error:?}");
    }
}

#[test]
fn a_change_that_does_not_fit_the_ranks_is_an_error_on_all_of_them() {
    let ended = world(2, |comm| {
        let mut config = changed();
        config.train_batch_size = 5;
        Engine::with_communicator(config, gpt2(), comm).err().map(|error| error.to_string())
    });
    for error in ended {
        let error = error.expect("5 samples do not divide by 2 ranks");
        assert!(
            error
                .contains("train_batch_size 5 is not a multiple of train_micro_batch_size_per_gpu × ranks = 2 × 2 = 4"),
            "{error}"
        );
    }
}
