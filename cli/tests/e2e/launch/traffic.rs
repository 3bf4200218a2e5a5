//! The bytes that two hosts with two ranks each write to sockets must match the prediction of `plan --hosts`, and the
//! bytes that their network interfaces count must match the closed forms in docs/stages.md.

use crate::case::{Case, sets};
use crate::launch::hosts::{CODED, GROUPS, SECONDARY, start_both};
use crate::launch::namespaces::Hosts;

const MODEL: [&str; 4] = ["model.n_embd=64", "model.n_head=4", "gradient_accumulation_steps=2", "data.eval_fraction=0"];

/// Returns the bytes that all ranks of a run wrote to sockets, and those that they exchanged within hosts.
fn reported(case: &Case, out: &str) -> [f64; 2] {
    let report = case.report(out);
    let operations = report["collectives"].as_object().unwrap();
    let sum = |key| operations.values().map(|operation| operation[key].as_f64().unwrap()).sum();
    ["network_bytes", "bytes_within_hosts"].map(sum)
}

/// Trains on both hosts. Returns the reported bytes.
fn measured(case: &Case, hosts: &Hosts, steps: u32, layout: &[&str]) -> [f64; 2] {
    let steps = steps.to_string();
    let usual = ["--out", "run", "--max-steps", &steps, "--set", "training.save_last=false"];
    for launcher in start_both(case, hosts, &[&usual[..], &sets(&MODEL), &sets(layout)].concat()) {
        assert_eq!(launcher.end(), (Some(0), String::new()), "{layout:?}");
    }
    let sums = reported(case, "run");
    std::fs::remove_dir_all(case.path("run")).unwrap();
    sums
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
        // The four steps that are measured below contain two outer steps with `steps: 2`, and one with `steps: 4`.
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

/// A gather from all shards or a reduction makes a host send Ψ/2 elements: its half of the parameters, or its sums for
/// the other half. In each of M micro-batches, stage 3 gathers every layer twice and reduces it once. The backward of
/// the embedding reads no parameters, and the head stays gathered for its backward, so these two are gathered only
/// once. With secondary shards, only one gather per step crosses hosts: (1 + M)Ψ/2. A shard group on each host gathers
/// nothing from the other, and all-reduces the sums of all micro-batches: 2Ψ/2. Sums of bf16 gradients are sent in f32,
/// except in this all-reduce, in whose groups each host has one rank. Codes take 1 byte in the gather and half a byte
/// in the reduction, and have scales of 2 bytes for each 512 or 256 elements.
#[test]
fn interfaces_count_the_bytes_of_the_closed_forms() {
    const STEPS: u64 = 3;
    const WIDTH: f64 = 512.0;
    let Some(hosts) = Hosts::new() else { return };
    let case = Case::new();
    let model = "model={type: gpt2, vocab_size: 256, n_positions: 16, n_embd: 512, n_layer: 1, n_head: 4, tie_word_embeddings: false}";
    let (embedding, head, block) = ((256.0 + 16.0) * WIDTH, 256.0 * WIDTH, (12.0 * WIDTH + 13.0) * WIDTH);
    let parameters = embedding + block + 2.0 * WIDTH + head;
    let once = (embedding + head) / parameters;
    let in_bf16 = |layout: &[&'static str]| [layout, &["--set", "bf16.enabled=true"]].concat();
    // Bytes that both hosts together send per parameter in m micro-batches. An element has `width` bytes.
    let plain = |width: f64, m: f64| m * (width * (2.0 - once) + 4.0);
    let secondary = |width: f64, m: f64| width + m * 4.0;
    let codes = 1.0 + 2.0 / 512.0 + 0.5 + 2.0 / 256.0;
    for (name, layout, m, bytes) in [
        ("plain", vec![], 1.0, plain(4.0, 1.0)),
        ("plain", vec![], 3.0, plain(4.0, 3.0)),
        ("plain in bf16", in_bf16(&[]), 1.0, plain(2.0, 1.0)),
        ("secondary", SECONDARY.to_vec(), 1.0, secondary(4.0, 1.0)),
        ("secondary", SECONDARY.to_vec(), 3.0, secondary(4.0, 3.0)),
        ("secondary in bf16", in_bf16(&SECONDARY), 1.0, secondary(2.0, 1.0)),
        ("groups", GROUPS.to_vec(), 1.0, 2.0 * 4.0),
        ("groups", GROUPS.to_vec(), 3.0, 2.0 * 4.0),
        ("groups in bf16", in_bf16(&GROUPS), 1.0, 2.0 * 2.0),
        ("codes in bf16", in_bf16(&CODED), 1.0, codes),
    ] {
        let out = |steps: u64| format!("{name}-{m}-{steps}");
        let batch = format!("train_batch_size={}", 8.0 * m);
        // The difference between a long and a short run contains only the bytes of the steps.
        let [short, long] = [2, 2 + STEPS].map(|steps| {
            let before = [0, 1].map(|host| hosts.sent(host));
            let args = ["--out", &out(steps), "--max-steps", &steps.to_string()];
            let fixed = sets(&["training.save_last=false", model, &batch]);
            for launcher in start_both(&case, &hosts, &[&args[..], &fixed, &layout].concat()) {
                assert_eq!(launcher.end(), (Some(0), String::new()));
            }
            [0, 1].map(|host| hosts.sent(host) - before[host])
        });
        assert_eq!(case.report(&out(2))["parameters"], parameters as u64);
        for host in [0, 1] {
            let sent = (long[host] - short[host]) as f64 / STEPS as f64 / (bytes * parameters / 2.0);
            println!("{name}, {m} micro-batches: host {host} sends {sent:.4} of the closed form");
            assert!(
                (1.0..1.01).contains(&sent),
                "{name}, {m} micro-batches: host {host} sends {sent} of the closed form"
            );
        }
        if name == "codes in bf16" {
            // 0.75Ψ values of 16 bits from both hosts. Scales add less than 1 %.
            let [few, many] = [2, 2 + STEPS].map(|steps| reported(&case, &out(steps))[0]);
            let sent = (many - few) / STEPS as f64 / (0.75 * 2.0 * parameters);
            assert!((1.0..1.01).contains(&sent), "sockets get {sent} of 0.75Ψ");
        }
    }
    for run in ["-1", "-3", " in bf16-1"] {
        let losses = |name: &str| case.losses(&format!("{name}{run}-{}", 2 + STEPS));
        assert_eq!(losses("plain"), losses("secondary"));
    }
}
