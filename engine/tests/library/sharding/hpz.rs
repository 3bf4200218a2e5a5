//! Secondary shards (hpZ): the first gather of a layer in a step reads the shards of all ranks, and later gathers read
//! the secondary shards of the near group. Training is bit-identical to plain stage 3, and the bytes held and sent
//! match the formulas.

use candle_core::DType;
use zero_engine::comm::Operation;
use zero_engine::pipeline::Instruction;
use zero_engine::{Engine, Layers, zoo};
use zero_partition::{Payload, expected_payload};

use crate::sharding::bytes::{all_reduced, assert_state, options};
use crate::world::{
    BF16, Trajectory, agreed, assert_same, batch, engine, engine_of, gpt2, gpt2_config, llama_config, resume, run_of,
    save, trajectory, world,
};

const STEPS: u64 = 4;
/// Number of ranks, and number of ranks of a near group.
const GROUPS: [(usize, usize); 3] = [(4, 2), (8, 2), (8, 4)];
const REPRODUCIBLE: &str = "training: {reproducible: true}";

/// Returns the keys of a run at stage 3 with near groups of `near` ranks, which gathers each layer for each use.
fn text(near: usize, micro_batches: usize, more: &str, zero: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: 1\ngradient_accumulation_steps: {micro_batches}\n{more}\n\
         zero_optimization: {{stage: 3, zero_hpz_partition_size: {near}, stage3_param_persistence_threshold: 40, \
         stage3_max_reuse_distance: 0{zero}}}"
    )
}

/// Trains and evaluates in turn. Checks that the program gathers from secondary shards if and only if the run has
/// secondary shards.
fn run(layers: impl Fn() -> Layers + Sync, ranks: usize, text: &str) -> (Trajectory, Vec<u32>) {
    let all = world(ranks, |comm| {
        let mut engine = engine_of(layers(), comm, text);
        let from_secondary = |i: &Instruction| matches!(i, Instruction::GatherSecondary { .. });
        let has_secondary = engine.zero().layout().secondary().is_some();
        assert_eq!(engine.program().instructions.iter().any(from_secondary), has_secondary, "{text}");
        let mut evaluations = vec![];
        let mut whole: Option<Trajectory> = None;
        for _ in 0..2 {
            let part = trajectory(&mut engine, STEPS / 2);
            let loss = engine.eval_batch(&batch(9, 2)).unwrap();
            evaluations.push(loss.to_bits());
            whole = Some(match whole {
                None => part,
                Some(before) => Trajectory {
                    losses: [before.losses, part.losses].concat(),
                    norms: [before.norms, part.norms].concat(),
                    parameters: part.parameters,
                },
            });
        }
        (whole.unwrap(), evaluations)
    });
    agreed(all, text)
}

/// Asserts that training with secondary shards in groups of `near` ranks is bit-identical to plain stage 3.
fn assert_equal(layers: impl Fn() -> Layers + Sync, (ranks, near): (usize, usize), of: impl Fn(usize) -> String) {
    let (plain, secondary) = (of(1), of(near));
    let (expected, evaluations) = run(&layers, ranks, &plain);
    assert!(expected.losses[0] != expected.losses[3], "{plain}");
    let (found, found_evaluations) = run(&layers, ranks, &secondary);
    assert_same(&expected, &found, &format!("{ranks} ranks, {secondary}"));
    assert_eq!(evaluations, found_evaluations, "{ranks} ranks, {secondary}");
}

#[test]
fn secondary_shards_are_bit_identical_to_plain_stage_3() {
    for groups in GROUPS {
        for dtype in ["", BF16] {
            for micro_batches in [1, 3] {
                assert_equal(gpt2, groups, |near| text(near, micro_batches, dtype, ""));
            }
            assert_equal(gpt2, groups, |near| text(near, 2, &format!("{dtype}\n{REPRODUCIBLE}"), ""));
        }
    }
}

#[test]
fn gather_options_and_recomputation_are_bit_identical() {
    for zero in [
        ", overlap_comm: false",
        ", stage3_prefetch_bucket_size: 0",
        ", stage3_prefetch_bucket_size: 3000",
        ", stage3_max_live_parameters: 0",
        ", reduce_scatter: false",
        ", offload_param: {device: cpu}, offload_optimizer: {device: cpu}",
    ] {
        assert_equal(gpt2, (4, 2), |near| text(near, 2, "", zero));
    }
    for more in ["activation_checkpointing: {enabled: true}", "activation_checkpointing: {interval: 2}"] {
        assert_equal(gpt2, (4, 2), |near| text(near, 1, more, ""));
        assert_equal(gpt2, (4, 2), |near| text(near, 3, &format!("{more}\n{BF16}"), ""));
    }
}

#[test]
fn shard_groups_and_pipelines_are_bit_identical() {
    const HSDP: &str = "mesh: {data_parallel_replicate_degree: 2}";
    for dtype in ["", BF16] {
        assert_equal(gpt2, (8, 2), |near| text(near, 2, &format!("{HSDP}\n{dtype}"), ""));
        for schedule in ["1f1b", "zb_h1"] {
            let pipeline = format!("pipeline: {{stages: 2, schedule: {schedule}, keep_gathered: false}}\n{dtype}");
            assert_equal(gpt2, (8, 2), |near| text(near, 2, &pipeline, ""));
        }
    }
}

#[test]
fn frozen_and_quantized_weights_are_bit_identical() {
    let gpt2 = || zoo::gpt2(&zoo::Gpt2Config { n_layer: 3, resid_pdrop: 0.1, ..gpt2_config() });
    let llama = || {
        let config = llama_config();
        zoo::llama(&zoo::LlamaConfig { hidden_size: 64, intermediate_size: 384, initializer_range: 0.05, ..config })
    };
    let adapter =
        "adapter: {r: 4, lora_dropout: 0.1, init_lora_weights: false, bias: lora_only, modules_to_save: [ln_f]}";
    let quantized = "adapter: {r: 4, init_lora_weights: false}\nquantization_config: {load_in_4bit: true}";
    for micro_batches in [1, 3] {
        assert_equal(gpt2, (4, 2), |near| text(near, micro_batches, adapter, ""));
        assert_equal(llama, (4, 2), |near| text(near, micro_batches, quantized, ""));
        let frozen = "training: {trainable: ['*.h.1.*']}";
        assert_equal(gpt2, (4, 2), |near| text(near, micro_batches, frozen, ""));
    }
    // Muon's matrices are not sharded: one rank of each near group has the whole matrix.
    let muon = "optimizer: {type: Muon, params: {lr: 0.02}}";
    assert_equal(gpt2, (4, 2), |near| text(near, 2, muon, ""));
}

#[test]
fn a_run_continues_in_any_layout() {
    // Number of ranks, ranks of a near group, and other keys.
    const HSDP: &str = "mesh: {data_parallel_replicate_degree: 2}";
    let layouts =
        [(4, 2, ""), (4, 1, ""), (2, 1, ""), (8, 2, HSDP), (8, 2, "pipeline: {stages: 2, keep_gathered: false}")];
    let keys = |(ranks, near, more): (usize, usize, &str)| {
        let stages = if more.contains("pipeline") { 2 } else { 1 };
        text(near, 8 * stages / ranks, &format!("{more}\n{REPRODUCIBLE}"), "")
    };
    let whole = run_of(gpt2, 4, 6, &keys(layouts[0]));
    for from in layouts {
        let root = tempfile::tempdir().unwrap();
        save((from.0, 3), root.path(), |comm| engine(comm, &keys(from)));
        for to in layouts.into_iter().filter(|to| from == layouts[0] || *to == layouts[0]) {
            let rest = resume((to.0, 3), root.path(), |comm| engine(comm, &keys(to)));
            assert_same(&whole.after(3), &rest, &format!("{from:?} to {to:?}"));
        }
    }
}

/// Elements that one rank holds, and bytes that it sends in a step.
struct Rank {
    elements: u64,
    parameters: u64,
    payload: Payload,
    /// Number of elements of all gathers from secondary shards in the program.
    again: u64,
    /// Payload bytes that the communicators counted: all-gathers of all ranks (`gathered`), reduce-scatters of all
    /// ranks (`scattered`), and all-gathers of the near group (`near`).
    gathered: u64,
    scattered: u64,
    near: u64,
}

fn measured(ranks: usize, near: usize, micro_batches: usize, dtype: DType) -> Vec<Rank> {
    let (section, width) = if dtype == DType::BF16 { (BF16, 2) } else { ("", 4) };
    let text = text(near, micro_batches, section, "").replace("threshold: 40", "threshold: 0");
    world(ranks, |comm| {
        let rank = comm.rank();
        let mut engine = engine(comm, &text);
        let stats = |engine: &Engine| {
            let groups = engine.zero().groups();
            let near = groups.near().map_or(0, |near| near.stats().sent_bytes());
            let world = groups.world().stats();
            [Operation::AllGather, Operation::ReduceScatter].map(|of| world[of].sent_bytes).into_iter().chain([near])
        };
        let before: Vec<u64> = stats(&engine).collect();
        let sent = engine.train_batch(&batch(0, ranks * micro_batches)).unwrap().sent_bytes;
        let counted: Vec<u64> = stats(&engine).zip(before).map(|(after, before)| after - before).collect();
        let (zero, groups) = (engine.zero(), engine.zero().groups());
        let state = assert_state(&engine, &format!("{text}, rank {rank}"));
        let (place, options) = ((groups.mesh(), groups.at()), options(&engine, dtype));
        let payload = expected_payload(engine.program(), zero.layout(), place, width, &options, |_| 0);
        let [norm, losses] =
            [zero_optim::exact_sum::LIMBS, micro_batches].map(|elements| all_reduced(elements, ranks, rank));
        assert_eq!(sent, payload.total() + (8 * norm + 4 * losses) as u64, "{text}, rank {rank}");
        let again = engine.program().instructions.iter().map(|instruction| match instruction {
            Instruction::GatherSecondary { segments } => {
                segments.iter().map(|&id| zero.layout().segments()[id].elements() as u64).sum()
            }
            _ => 0,
        });
        Rank {
            elements: zero.layout().elements() as u64,
            parameters: state.parameters,
            payload,
            again: again.sum(),
            gathered: counted[0],
            scattered: counted[1],
            near: counted[2],
        }
    })
}

/// With N ranks in near groups of k and Ψ elements of w bytes, all ranks together hold wΨ(1 + N/k) bytes of working
/// parameters. In a step of M micro-batches, they send (N − k)Ψw bytes to other groups for the single gather from the
/// shards of all ranks, and the same number of bytes for the gradients of each micro-batch. For M = 1, each rank sends
/// 2Ψ(N − k)/N elements to other groups. Gathers from secondary shards send nothing to other groups.
#[test]
fn bytes_held_and_sent_match_the_formulas() {
    for (ranks, near) in GROUPS {
        for micro_batches in [1, 3] {
            for dtype in [DType::F32, DType::BF16] {
                let what = format!("{ranks} ranks, groups of {near}, {micro_batches} micro-batches, {dtype:?}");
                let all = measured(ranks, near, micro_batches, dtype);
                let sum = |of: fn(&Rank) -> u64| all.iter().map(of).sum::<u64>();
                let (n, k, m, w) = (ranks as u64, near as u64, micro_batches as u64, dtype.size_in_bytes() as u64);
                let (elements, again) = (all[0].elements, all[0].again);
                // In bf16, the owner of an element also has its f32 value.
                let master = if w == 4 { 0 } else { 4 * elements };
                assert_eq!(sum(|rank| rank.parameters), w * elements * (1 + n / k) + master, "{what}");
                assert!(again > 0, "{what}");
                assert_eq!(sum(|rank| rank.near), n / k * (k - 1) * again * w, "{what}");
                let across = (n - k) * (1 + m) * elements * w;
                assert_eq!(sum(|rank| rank.payload.across), across, "{what}");
                let within = (k - 1) * w * ((1 + m) * elements + n / k * again);
                assert_eq!(sum(|rank| rank.payload.within), within, "{what}");
                // The world's communicators send each share to n − 1 ranks, of which n − k are in other groups.
                let counted = sum(|rank| rank.gathered) + sum(|rank| rank.scattered);
                assert_eq!(counted * (n - k) / (n - 1), across, "{what}");
                assert_eq!(counted + sum(|rank| rank.near), across + within, "{what}");
            }
        }
    }
}

/// In plain stage 3, all ranks form one near group.
#[test]
fn plain_stage_3_sends_nothing_to_other_groups() {
    for rank in measured(4, 1, 2, DType::F32) {
        assert_eq!((rank.payload.across, rank.near, rank.again), (0, 0, 0));
    }
}
