//! `zero_hpz_partition_size`: the size of groups with secondary shards, and messages for invalid sizes.

use zero_config::{Config, ErrorKind, load};

use crate::texts::{only_error, source};

fn text(stage: u8, size: usize, zero: &str, more: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: 2\n{more}\n\
         zero_optimization: {{stage: {stage}, zero_hpz_partition_size: {size}{zero}}}"
    )
}

#[test]
fn secondary_groups_divide_shard_groups() {
    const HSDP: &str = "mesh: {data_parallel_replicate_degree: 2}";
    for (size, ranks, more, expected) in [
        (0, 8, "", None),
        (1, 8, "", None),
        (2, 8, "", Some(2)),
        (4, 8, "", Some(4)),
        // If the group is as large as the shard group, the secondary shards would equal the shards.
        (8, 8, "", None),
        (4, 8, HSDP, None),
        (2, 8, HSDP, Some(2)),
        (2, 8, "pipeline: {stages: 2}", Some(2)),
    ] {
        let config = Config::with_world_size("ds.yaml", text(3, size, "", more), ranks)
            .unwrap_or_else(|errors| panic!("{errors}"));
        assert_eq!(config.secondary_group_size(), expected, "{size} of {ranks}, {more}");
        let again = Config::with_world_size("ds.yaml", config.to_yaml(), ranks).unwrap();
        assert_eq!(again.zero, config.zero);
    }
    // Gradients that are reduced as codes are first summed in groups of ranks on each host.
    let on_hosts = |size: usize, more: &str, per_host: usize| {
        let zero = ", zero_quantized_gradients: true";
        load(source(text(3, size, zero, more)), &[])
            .unwrap()
            .on_hosts(per_host)
            .resolve(Some(8))
            .unwrap()
            .near_group_size()
    };
    for (size, more, per_host, expected) in [
        (1, "", 4, Some(4)),
        (1, "", 8, None),
        (1, "", 1, None),
        (2, "", 4, Some(2)),
        (1, HSDP, 4, None),
        (1, HSDP, 2, Some(2)),
        (1, "pipeline: {stages: 2}", 6, Some(2)),
    ] {
        assert_eq!(on_hosts(size, more, per_host), expected, "{size}, {more}, hosts of {per_host}");
    }
    // A size of 1 turns secondary shards off, and is accepted at every stage.
    for stage in 0..=3 {
        assert!(Config::with_world_size("ds.yaml", text(stage, 1, "", ""), 6).is_ok());
    }
}

#[test]
fn invalid_secondary_group_sizes_are_errors() {
    const KEY: &str = "zero_optimization.zero_hpz_partition_size";
    let nvme = ", offload_param: {device: nvme, nvme_path: /tmp}";
    for (text, ranks, message, help) in [
        (
            text(3, 4, "", ""),
            6,
            format!("{KEY} 4 does not divide the 6 ranks across which ZeRO shards"),
            "use a divisor of 6, such as the number of ranks per host",
        ),
        (
            text(3, 4, "", "mesh: {data_parallel_replicate_degree: 4}"),
            8,
            format!("{KEY} 4 does not divide the 2 ranks across which ZeRO shards"),
            "use a divisor of 2, such as the number of ranks per host",
        ),
        (
            text(2, 2, "", ""),
            8,
            format!("`{KEY}: 2` copies sharded parameters, but stage 2 shards none"),
            "set `zero_optimization.stage: 3`, or remove `zero_hpz_partition_size`",
        ),
        (
            text(3, 2, nvme, ""),
            8,
            format!(
                "`{KEY}: 2` keeps a copy of the parameters in memory, but `zero_optimization.offload_param.device` is \
                 nvme"
            ),
            "set `zero_optimization.offload_param.device: cpu`, or remove `zero_hpz_partition_size`",
        ),
    ] {
        let error = only_error(Config::with_world_size("ds.yaml", text, ranks));
        assert_eq!(error.kind, ErrorKind::Contradiction);
        assert_eq!((error.message.as_str(), error.help.as_deref()), (message.as_str(), Some(help)));
        assert!(error.places.iter().any(|place| place.path == KEY), "{error}");
    }
}
