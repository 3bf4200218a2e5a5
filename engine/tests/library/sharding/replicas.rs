//! `compare_replicas` names a rank whose replica differs by one bit.

use crate::world;

use world::{engine_of, gpt2, train, world};

/// Returns each rank's error after the ranks in `wrong` flipped the last bit of one element of a parameter.
fn said(ranks: usize, wrong: &[usize], parameter: &str, text: &str) -> Vec<Option<String>> {
    world(ranks, |comm| {
        let rank = comm.rank();
        let mut engine = engine_of(gpt2(), comm, text);
        train(&mut engine, 2);
        engine.compare_replicas().unwrap();
        let mut values = engine.full_parameter(parameter).unwrap();
        if wrong.contains(&rank) {
            values[3] = f32::from_bits(values[3].to_bits() ^ 1);
        }
        engine.set_parameter(parameter, &values).unwrap();
        engine.compare_replicas().err().map(|error| {
            assert_eq!(error.exit_status(), 1, "{error}");
            error.to_string()
        })
    })
}

fn settings(stage: u8, more: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: 1\n{more}\n\
         zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 64}}"
    )
}

#[test]
fn the_rank_that_differs_is_named() {
    let (matrix, norm) = ("transformer.h.1.mlp.c_fc.weight", "transformer.ln_f.weight");
    for stage in 0..=3 {
        for parameter in [matrix, norm] {
            let said = said(3, &[1], parameter, &settings(stage, ""));
            // Stage 3 shards the matrix: each element is on one rank, so there are no replicas to compare.
            let is_alone = stage == 3 && parameter == matrix;
            for said in said {
                match (is_alone, said) {
                    (true, said) => assert_eq!(said, None),
                    (false, Some(said)) => {
                        let expected =
                            format!("`{parameter}` must be the same on all 3 ranks, but rank 1 differs\n  help: ");
                        assert!(said.starts_with(&expected), "stage {stage}: {said}");
                    }
                    (false, None) => panic!("stage {stage}: nothing was found"),
                }
            }
        }
    }
    let said = said(2, &[0], norm, &settings(1, ""));
    assert!(said[1].as_ref().unwrap().contains("ranks 0, 1 differ, and no majority"), "{said:?}");
}

/// Errors name ranks of the world, not of the data-parallel group. The other pipeline stage reports no error.
#[test]
fn differing_ranks_of_a_pipeline_are_named() {
    let said = said(6, &[4], "transformer.h.1.mlp.c_fc.weight", &settings(2, "pipeline: {stages: 2}"));
    let found: Vec<&String> = said.iter().flatten().collect();
    assert_eq!(found.len(), 3, "{said:?}");
    assert!(found.iter().all(|said| said.contains("on all 3 ranks, but rank 4 differs")), "{said:?}");
}

/// Between outer steps of replicates that train independently, only ranks of the same replicate are compared.
#[test]
fn differing_ranks_are_named_with_local_steps() {
    let alone = "mesh: {data_parallel_replicate_degree: 2}\ntraining: {local_steps: {steps: 3}}";
    let said = said(6, &[4], "transformer.h.1.mlp.c_fc.weight", &settings(2, alone));
    assert!(said[..3].iter().all(Option::is_none), "{said:?}");
    let differs =
        |said: &Option<String>| said.as_ref().is_some_and(|said| said.contains("3 ranks, but rank 4 differs"));
    assert!(said[3..].iter().all(differs), "{said:?}");
}

/// After an outer step, replicates that train independently hold the same parameters.
#[test]
fn a_replicate_that_differs_after_an_outer_step_is_named() {
    let parameter = "transformer.h.1.mlp.c_fc.weight";
    for stage in 0..=3 {
        let alone = |steps: usize| {
            let keys =
                format!("mesh: {{data_parallel_replicate_degree: 3}}\ntraining: {{local_steps: {{steps: {steps}}}}}");
            said(6, &[2, 3], parameter, &settings(stage, &keys))
        };
        let found: Vec<String> = alone(2).into_iter().flatten().collect();
        // At stage 3, one rank of each replicate holds the shard with the element.
        let (count, is_sharded) = if stage == 3 { (3, true) } else { (6, false) };
        assert_eq!(found.len(), count, "stage {stage}: {found:?}");
        for said in &found {
            assert!(
                said.contains("on all 3 ranks, but rank 2 differs") || said.contains("but rank 3 differs"),
                "{said}"
            );
            assert!(said.starts_with(if is_sharded { "the shard of the segment of `" } else { "`" }), "{said}");
        }
        assert!(alone(3).iter().all(Option::is_none), "stage {stage}: replicates differ between outer steps");
    }
}
