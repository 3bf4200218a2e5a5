//! The groups of a mesh, and degrees that do not divide the ranks.

use super::*;

fn mesh(world_size: usize, degrees: Degrees) -> Mesh {
    Mesh::new(world_size, degrees).unwrap()
}

#[test]
fn ranks_of_a_data_parallel_group_are_neighbours() {
    let mesh = mesh(12, Degrees::stages(3));
    assert_eq!((mesh.pipe(), mesh.data(), mesh.world_size()), (3, 4, 12));
    assert_eq!((mesh.replicates(), mesh.shards(), mesh.ranks(1)), (1, 4, 4..8));
    for rank in 0..12 {
        let at = mesh.coordinates(rank);
        assert_eq!((at.stage, mesh.replica(at), at.shard), (rank / 4, rank % 4, rank % 4));
        assert_eq!((mesh.rank(at), mesh.peer(rank, 2)), (rank, 8 + rank % 4));
        assert!(mesh.group(rank).eq(mesh.ranks(at.stage)));
    }
    for (world_size, pipe) in [(6, 4), (4, 0), (0, 1), (2, 3)] {
        assert_eq!(Mesh::new(world_size, Degrees::stages(pipe)), Err(MeshError::Stages { world_size, stages: pipe }));
    }
}

#[test]
fn ranks_of_a_shard_group_are_neighbours() {
    let of = |replicates| Degrees { replicates, ..Degrees::stages(2) };
    let mesh = mesh(24, of(3));
    assert_eq!((mesh.pipe(), mesh.data(), mesh.replicates(), mesh.shards()), (2, 12, 3, 4));
    assert_eq!(mesh.coordinates(21), Coordinates { stage: 1, replicate: 2, shard: 1 });
    for rank in 0..24 {
        let at = mesh.coordinates(rank);
        assert_eq!((mesh.rank(at), mesh.replica(at)), (rank, rank % 12));
        assert!(mesh.ranks(at.stage).contains(&rank));
    }
    for replicates in [0, 5, 24] {
        assert_eq!(Mesh::new(24, of(replicates)), Err(MeshError::Replicates { data: 12, replicates }));
    }
}

#[test]
fn ranks_of_a_secondary_group_are_neighbours() {
    let of = |near| Degrees { replicates: 2, near, ..Degrees::stages(1) };
    let whole = mesh(16, of(None));
    assert_eq!((whole.near(), whole.near_shards(whole.coordinates(13))), (8, 0..8));
    let near = mesh(16, of(Some(2)));
    assert_eq!((near.near(), near.shards(), near.replicates()), (2, 8, 2));
    for rank in 0..16 {
        let at = near.coordinates(rank);
        assert_eq!(at, whole.coordinates(rank));
        let first = rank % 8 / 2 * 2;
        assert_eq!(near.near_shards(at), first..first + 2);
    }
    for near in [0, 3, 16] {
        assert_eq!(Mesh::new(16, of(Some(near))), Err(MeshError::Near { shards: 8, near }));
    }
}

#[test]
fn ranks_of_a_tensor_group_are_neighbours() {
    let of = |tensor| Degrees { replicates: 2, tensor, ..Degrees::stages(2) };
    let mesh = mesh(24, of(3));
    assert_eq!((mesh.world_size(), mesh.tensor(), mesh.data(), mesh.shards()), (24, 3, 4, 2));
    assert_eq!((mesh.plane().world_size(), mesh.ranks(1)), (8, 12..24));
    for rank in 0..24 {
        let (at, index) = (mesh.coordinates(rank), mesh.tensor_index(rank));
        assert_eq!((mesh.rank(at) + index, mesh.plane().coordinates(rank / 3)), (rank, at));
        assert_eq!(mesh.peer(rank, 1 - at.stage), (rank + 12) % 24);
        let group: Vec<usize> = mesh.group(rank).collect();
        let planes: Vec<usize> = group.iter().map(|rank| rank % 3).collect();
        assert!(group.contains(&rank) && planes == [index; 4], "{group:?}");
    }
    for tensor in [0, 5, 24] {
        assert_eq!(Mesh::new(24, of(tensor)), Err(MeshError::Tensor { ranks: 12, tensor }));
    }
}

#[test]
fn context_groups_divide_shard_groups() {
    let of = |heads, queries| Degrees { replicates: 2, heads, queries, ..Degrees::stages(1) };
    let whole = mesh(16, of(1, 1));
    assert_eq!((whole.context(), whole.data_parallel()), (1, 16));
    for (heads, queries) in [(4, 1), (1, 4), (2, 2)] {
        let cut = mesh(16, of(heads, queries));
        assert_eq!((cut.context(), cut.data_parallel(), cut.data(), cut.shards()), (4, 4, 16, 8));
        for rank in 0..16 {
            let group = cut.context_ranks(rank);
            assert_eq!((group.len(), group.contains(&rank)), (4, true));
            let shards = group.iter().map(|&rank| cut.coordinates(rank)).map(|at| (at.replicate, at.shard / 4));
            assert!(shards.clone().all(|of| Some(of) == shards.clone().next()));
            let (of_heads, of_queries) = (cut.head_ranks(rank), cut.query_ranks(rank));
            assert_eq!((of_heads.len(), of_queries.len()), (heads, queries));
            let both: Vec<&usize> = of_heads.iter().filter(|rank| of_queries.contains(rank)).collect();
            assert_eq!(both, [&rank]);
        }
    }
    assert_eq!(mesh(16, of(2, 2)).query_ranks(13), [13, 15]);
    assert_eq!([12, 13, 14, 15].map(|rank| mesh(16, of(2, 2)).next_in_ring(rank)), [14, 15, 12, 13]);
    assert_eq!(mesh(16, of(2, 2)).head_ranks(13), [12, 13]);
    for (heads, queries) in [(0, 1), (3, 1), (1, 16), (4, 4), (usize::MAX, 2)] {
        let context = heads.saturating_mul(queries);
        assert_eq!(Mesh::new(16, of(heads, queries)), Err(MeshError::Context { shards: 8, context }));
    }
}

/// A degree that fits the ranks of a stage may not fit the shard groups that another degree leaves.
#[test]
fn all_degrees_together_divide_the_ranks() {
    let degrees = Degrees { heads: 8, tensor: 4, ..Degrees::stages(1) };
    assert_eq!(Mesh::new(8, degrees), Err(MeshError::Context { shards: 2, context: 8 }));
    let all = mesh(64, Degrees { pipe: 2, replicates: 2, near: Some(4), heads: 2, queries: 2, tensor: 2 });
    assert_eq!((all.shards(), all.near(), all.context(), all.world_size()), (8, 4, 4, 64));
    assert_eq!(all.query_ranks(11), [11, 15]);
    assert_eq!(all.head_ranks(11), [9, 11]);
}
