//! Draws how the ranks form the groups of the mesh.

use zero_pipeline::{Coordinates, Mesh, StageId};

/// Returns a legend, and a line for each pipeline stage (with many stages, only for the first two and the last). Empty
/// if each stage is one shard group without further groups.
pub(super) fn drawing(mesh: Mesh) -> Vec<String> {
    if mesh.tensor() == 1 && mesh.context() == 1 && mesh.replicates() == 1 {
        return vec![];
    }
    let marks = [
        ("[ ] hold all ZeRO shards", true),
        ("{ } share sequences", mesh.context() > 1),
        ("( ) split layers", mesh.tensor() > 1),
    ];
    let marks: Vec<&str> = marks.into_iter().filter(|(_, is_there)| *is_there).map(|(mark, _)| mark).collect();
    let of_stage = |stage: StageId| {
        let groups = (0..mesh.replicates()).map(|replicate| format!("[{}]", shard_group(mesh, stage, replicate)));
        format!("  stage {stage}: {}", some(groups.collect()))
    };
    let mut stages: Vec<String> = (0..mesh.pipe()).map(of_stage).collect();
    if stages.len() > 4 {
        stages.splice(2..stages.len() - 1, ["  …".to_string()]);
    }
    std::iter::once(format!("ranks: {}", marks.join(", "))).chain(stages).collect()
}

fn shard_group(mesh: Mesh, stage: StageId, replicate: usize) -> String {
    let ranks = |shard: usize| {
        let first = mesh.rank(Coordinates { stage, replicate, shard });
        match mesh.tensor() {
            1 => first.to_string(),
            size => format!("({})", some((first..first + size).map(|rank| rank.to_string()).collect())),
        }
    };
    let shards: Vec<String> = (0..mesh.shards()).map(ranks).collect();
    some(match mesh.context() {
        1 => shards,
        size => shards.chunks(size).map(|group| format!("{{{}}}", some(group.to_vec()))).collect(),
    })
}

/// Joins a list. Abbreviates a long list to its first two elements and its last.
fn some(mut list: Vec<String>) -> String {
    if list.len() > 4 {
        list.splice(2..list.len() - 1, ["…".to_string()]);
    }
    list.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use zero_pipeline::Degrees;

    #[test]
    fn the_drawing_nests_the_groups_of_a_mesh() {
        let plain = Mesh::new(8, Degrees::stages(2)).unwrap();
        assert!(drawing(plain).is_empty());
        let all = Mesh::new(32, Degrees { tensor: 2, replicates: 2, heads: 2, ..Degrees::stages(2) }).unwrap();
        assert_eq!(
            drawing(all),
            [
                "ranks: [ ] hold all ZeRO shards, { } share sequences, ( ) split layers",
                "  stage 0: [{(0 1) (2 3)} {(4 5) (6 7)}] [{(8 9) (10 11)} {(12 13) (14 15)}]",
                "  stage 1: [{(16 17) (18 19)} {(20 21) (22 23)}] [{(24 25) (26 27)} {(28 29) (30 31)}]",
            ]
        );
        let long = Mesh::new(64, Degrees { tensor: 8, ..Degrees::stages(1) }).unwrap();
        let groups = "(0 1 … 7) (8 9 … 15) … (56 57 … 63)";
        assert_eq!(drawing(long)[1], format!("  stage 0: [{groups}]"));
    }
}
