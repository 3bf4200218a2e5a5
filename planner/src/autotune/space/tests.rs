//! The values of the keys that decide how ranks share sequences and layers.

use std::collections::BTreeSet;

use zero_config::Config;

use super::{CONTEXT, ROTATE, SLICES, TENSOR, candidates};

/// Returns how the candidates for four ranks share sequences and layers: the values of `sequence_parallel_size`,
/// `context_parallel_degree`, `context_parallel_rotate_method` and `autotp_size`.
fn sharings(text: &str) -> BTreeSet<[String; 4]> {
    let text = format!("train_batch_size: 8\nlauncher: {{num_processes: 4}}\n{text}");
    let base = Config::parse("ds.yaml", &text).unwrap().for_world_size(4).unwrap();
    let leaves = base.leaves();
    let found = candidates(&base, &base.autotuning).unwrap().into_iter().filter(|candidate| candidate.ranks == 4);
    let of = |settings: Vec<(String, String)>| {
        [SLICES, CONTEXT, ROTATE, TENSOR].map(|key| {
            let own = leaves.iter().find(|(path, _)| path == key).map(|(_, value)| value.clone());
            let set = settings.iter().find(|(path, _)| path == key).map(|(_, value)| value.clone());
            set.or(own).unwrap()
        })
    };
    found.map(|candidate| of(candidate.settings)).collect()
}

fn expected(all: &[[&str; 4]]) -> BTreeSet<[String; 4]> {
    all.iter().map(|values| values.map(String::from)).collect()
}

/// Only the keys that the file sets vary. Ring attention needs at least two ranks per sequence.
#[test]
fn keys_of_the_file_decide_how_ranks_share_sequences_and_layers() {
    let gathered = |slices, context, tensor| [slices, context, "allgather", tensor];
    let ring = |slices, context, tensor| [slices, context, "alltoall", tensor];
    assert_eq!(sharings(""), expected(&[gathered("1", "1", "0")]));
    assert_eq!(
        sharings("sequence_parallel_size: 1"),
        expected(&[gathered("1", "1", "0"), gathered("2", "1", "0"), gathered("4", "1", "0")])
    );
    assert_eq!(
        sharings("mesh: {context_parallel_degree: 2}"),
        expected(&[gathered("1", "1", "0"), gathered("1", "2", "0"), gathered("1", "4", "0")])
    );
    let methods = "mesh: {context_parallel_degree: 2, context_parallel_rotate_method: alltoall}";
    assert_eq!(
        sharings(methods),
        expected(&[
            // The method has no effect on one rank per sequence.
            ring("1", "1", "0"),
            gathered("1", "2", "0"),
            ring("1", "2", "0"),
            gathered("1", "4", "0"),
            ring("1", "4", "0"),
        ])
    );
    assert_eq!(
        sharings("tensor_parallel: {autotp_size: 2}\nsequence_parallel_size: 2"),
        expected(&[
            gathered("1", "1", "1"),
            gathered("1", "1", "2"),
            gathered("1", "1", "4"),
            gathered("2", "1", "1"),
            gathered("2", "1", "2"),
            gathered("4", "1", "1"),
        ])
    );
    let space = "autotuning: {space: {mesh.context_parallel_degree: [2], \
                 mesh.context_parallel_rotate_method: [alltoall]}}";
    assert_eq!(
        sharings(space),
        expected(&[ring("1", "2", "0")]).union(&sharings("autotuning: {fast: true}")).cloned().collect()
    );
}
