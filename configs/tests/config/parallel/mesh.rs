//! `mesh`: the degrees of hybrid sharding, and messages for ranks that they do not divide.

use zero_config::{Config, Error, ErrorKind, load};

use crate::texts::{only_error, source};

const HEAD: &str = "train_micro_batch_size_per_gpu: 2\nzero_optimization: {stage: 2}\n";

fn with(text: &str, ranks: usize) -> Config {
    Config::with_world_size("ds.yaml", format!("{HEAD}{text}"), ranks).unwrap_or_else(|errors| panic!("{errors}"))
}

/// Returns the only error of a text.
fn only(text: &str, ranks: usize) -> Error {
    only_error(Config::with_world_size("ds.yaml", text, ranks))
}

#[test]
fn one_degree_determines_the_other() {
    for (text, ranks, degrees) in [
        ("", 8, (1, 8)),
        ("mesh: {data_parallel_replicate_degree: auto}", 8, (1, 8)),
        ("mesh: {data_parallel_replicate_degree: 2}", 8, (2, 4)),
        ("mesh: {data_parallel_shard_degree: 2}", 8, (4, 2)),
        ("mesh: {data_parallel_replicate_degree: 8, data_parallel_shard_degree: 1}", 8, (8, 1)),
        ("mesh: {data_parallel_replicate_degree: 2}\npipeline: {stages: 2}", 8, (2, 2)),
    ] {
        let config = with(text, ranks);
        assert_eq!((config.mesh.data_parallel_replicate_degree, config.shard_group_size()), degrees, "{text}");
        let again = Config::with_world_size("ds.yaml", config.to_yaml(), ranks).unwrap();
        assert_eq!(again.mesh, config.mesh);
    }
}

#[test]
fn auto_shards_inside_a_host_and_replicates_across_hosts() {
    let of = |mesh: &str, ranks: usize, per_host: usize| {
        let source = source(format!("{HEAD}mesh: {{{mesh}}}"));
        load(source, &[]).unwrap().on_hosts(per_host).resolve(Some(ranks)).unwrap_or_else(|errors| panic!("{errors}"))
    };
    for (mesh, ranks, per_host, degrees) in [
        ("data_parallel_shard_degree: auto", 16, 4, (4, 4)),
        ("data_parallel_replicate_degree: auto", 16, 4, (4, 4)),
        ("data_parallel_replicate_degree: auto, data_parallel_shard_degree: auto", 16, 8, (2, 8)),
        ("data_parallel_shard_degree: auto", 8, 8, (1, 8)),
        ("data_parallel_shard_degree: auto", 4, 1, (4, 1)),
        // The degree that is given determines the other one.
        ("data_parallel_replicate_degree: 2, data_parallel_shard_degree: auto", 16, 4, (2, 8)),
        ("data_parallel_replicate_degree: auto, data_parallel_shard_degree: 2", 16, 4, (8, 2)),
        // Each pipeline stage begins with a new group, and no group spans hosts.
        ("data_parallel_shard_degree: auto}\npipeline: {stages: 2", 8, 8, (1, 4)),
        ("data_parallel_shard_degree: auto}\npipeline: {stages: 2", 16, 4, (2, 4)),
        ("data_parallel_shard_degree: auto}\npipeline: {stages: 3", 12, 6, (2, 2)),
        ("", 16, 4, (1, 16)),
    ] {
        let config = of(mesh, ranks, per_host);
        assert_eq!((config.mesh.data_parallel_replicate_degree, config.shard_group_size()), degrees, "{mesh}");
        let is_auto = mesh.contains("shard_degree: auto");
        assert!(!is_auto || config.mesh.data_parallel_shard_degree == Some(degrees.1), "{mesh}");
    }
}

#[test]
fn degrees_divide_the_ranks() {
    for (mesh, ranks, message, help) in [
        (
            "data_parallel_replicate_degree: 4",
            6,
            "6 ranks are not a multiple of mesh.data_parallel_replicate_degree 4",
            "the next number of ranks that fits is 8",
        ),
        (
            "data_parallel_shard_degree: 8",
            4,
            "4 ranks are not a multiple of mesh.data_parallel_shard_degree 8",
            "the next number of ranks that fits is 8",
        ),
        (
            "data_parallel_replicate_degree: 2, data_parallel_shard_degree: 2",
            8,
            "8 ranks are not mesh.data_parallel_replicate_degree × mesh.data_parallel_shard_degree = 4",
            "remove one of the two: it is computed from the other",
        ),
    ] {
        let error = only(&format!("{HEAD}mesh: {{{mesh}}}"), ranks);
        assert_eq!(error.kind, ErrorKind::Contradiction);
        assert_eq!((error.message.as_str(), error.help.as_deref()), (message, Some(help)));
        assert!(error.places.iter().any(|place| place.path.starts_with("mesh.")), "{error}");
    }
    let error = only(&format!("{HEAD}mesh: {{data_parallel_replicate_degree: 4}}\npipeline: {{stages: 2}}"), 12);
    assert_eq!(error.message, "6 data-parallel ranks are not a multiple of mesh.data_parallel_replicate_degree 4");
    assert_eq!(error.help.as_deref(), Some("the next number of ranks that fits is 16"));
}

/// The keys have torchtitan's names, so torchtitan's other degrees must not be mistaken for misspellings of these keys.
#[test]
fn degrees_of_other_sections_name_the_keys_that_set_them() {
    for (key, instead) in [
        ("tensor_parallel_degree", "`tensor_parallel.autotp_size` sets the number of ranks"),
        ("pipeline_parallel_degree", "`pipeline.stages` sets the number of stages"),
    ] {
        let error = only(&format!("{HEAD}mesh: {{{key}: 2}}"), 4);
        assert_eq!(error.kind, ErrorKind::Rejected);
        assert!(error.message.starts_with(&format!("`mesh.{key}: 2` is not supported")), "{error}");
        assert_eq!(error.help.as_deref(), Some(&*format!("remove it, or set it to `1`; {instead}")));
    }
}

#[test]
fn stage_0_has_no_shards_to_replicate() {
    for key in ["data_parallel_replicate_degree", "data_parallel_shard_degree"] {
        let text = format!("train_micro_batch_size_per_gpu: 2\nmesh: {{{key}: 2}}");
        let error = only(&text, 4);
        let message = format!(
            "`mesh.{key}` divides ranks into groups that hold the same ZeRO shards, but stage 0 shards nothing"
        );
        assert_eq!(error.message, message);
        assert_eq!(error.help.as_deref(), Some("set `zero_optimization.stage: 1`, 2 or 3, or remove `mesh`"));
    }
    // One group of all ranks is plain data parallelism.
    let text = "train_micro_batch_size_per_gpu: 2\nmesh: {data_parallel_shard_degree: 4}";
    assert_eq!(Config::with_world_size("ds.yaml", text, 4).unwrap().mesh.data_parallel_replicate_degree, 1);
}
