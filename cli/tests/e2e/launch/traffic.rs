//! The bytes that two hosts with two ranks each write to sockets must match the prediction of `plan --hosts`.

use crate::case;
use crate::launch::namespaces;

use case::{Alone, Case, sets};
use namespaces::Hosts;

const MODEL: [&str; 4] = ["model.n_embd=64", "model.n_head=4", "gradient_accumulation_steps=2", "data.eval_fraction=0"];

/// Trains on both hosts. Returns the bytes of all ranks' sockets.
fn measured(case: &Case, hosts: &Hosts, steps: u32, layout: &[&str]) -> [f64; 2] {
    let steps = steps.to_string();
    let both = ["0", "1"].map(|host| {
        let launch = [
            "launch",
            "--nnodes",
            "2",
            "--node-rank",
            host,
            "--nproc-per-node",
            "2",
            "--master-addr",
            namespaces::ADDRESSES[0],
        ];
        let usual = ["--config", "ds.yaml", "--quiet", "--out", "run", "--max-steps", &steps];
        let fixed = sets(&["launcher.interface=eth0", "training.save_last=false"]);
        let args = [&launch[..], &usual, &fixed, &sets(&MODEL), &sets(layout)].concat();
        let mut command = hosts.command(case, host.parse().unwrap(), &args);
        command.env("ZERO_TRAIN_TOKEN", "what the job's ranks know");
        Alone::start(command)
    });
    for launcher in both {
        assert_eq!(launcher.end(), (Some(0), String::new()), "{layout:?}");
    }
    let report = case.report("run");
    std::fs::remove_dir_all(case.path("run")).unwrap();
    let operations = report["collectives"].as_object().unwrap();
    let sum = |key| operations.values().map(|operation| operation[key].as_f64().unwrap()).sum();
    ["network_bytes", "bytes_within_hosts"].map(sum)
}

#[test]
fn hosts_send_the_bytes_that_the_plan_predicts() {
    let Some(hosts) = Hosts::new() else { return };
    let case = Case::new();
    let groups = "mesh={data_parallel_replicate_degree: 2}";
    for layout in [
        &["zero_optimization.stage=1"][..],
        &["zero_optimization.stage=2", "bf16.enabled=true"],
        &["zero_optimization.stage=3"],
        &["zero_optimization.zero_hpz_partition_size=2"],
        &["zero_optimization.stage=2", "zero_optimization.zero_quantized_gradients=true"],
        &["zero_optimization={stage: 3, stage3_param_persistence_threshold: 0, stage3_max_reuse_distance: 0, \
             zero_hpz_partition_size: 2, zero_quantized_weights: true, zero_quantized_gradients: true}"],
        &["zero_optimization.stage=2", groups],
        &["zero_optimization.stage=3", "mesh.data_parallel_shard_degree=auto", "bf16.enabled=true"],
        &["zero_optimization.stage=1", "pipeline.stages=2"],
        &["zero_optimization.stage=2", "sequence_parallel_size=4"],
        &["zero_optimization.stage=2", "mesh={context_parallel_degree: 4}"],
        &["zero_optimization.stage=2", "mesh={context_parallel_degree: 4, context_parallel_rotate_method: alltoall}"],
        &["zero_optimization.stage=2", "sequence_parallel_size=2", "mesh={context_parallel_degree: 2}"],
        &["zero_optimization.stage=2", "tensor_parallel={autotp_size: 4}"],
        // The four steps that are measured below contain two outer steps here, and one with `steps: 4`.
        &["zero_optimization.stage=2", groups, "training.local_steps={steps: 2}"],
        &["zero_optimization.stage=0", groups, "training.local_steps={steps: 4}"],
    ] {
        let args =
            [&["plan", "--config", "ds.yaml", "--json", "-n", "4", "--hosts", "2"], &sets(&MODEL)[..], &sets(layout)]
                .concat();
        let plan = &case.json(&args)["hosts"]["layouts"][0];
        // The difference between two runs contains no bytes of their start and end.
        let [few, many] = [2, 6].map(|steps| measured(&case, &hosts, steps, layout));
        for (index, key) in ["network_bytes_per_step", "bytes_within_hosts_per_step"].into_iter().enumerate() {
            let (planned, sent) = (plan[key].as_f64().unwrap(), (many[index] - few[index]) / 4.0);
            println!("{layout:?}: {key}: planned {planned}, sent {sent}");
            assert!((sent - planned).abs() <= 0.01 * planned, "{layout:?}: {key}: planned {planned}, sent {sent}");
        }
    }
}
