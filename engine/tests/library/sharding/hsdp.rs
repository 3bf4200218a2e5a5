//! Hybrid sharding: several shard groups train bit-identically to one group of all ranks and to one rank, and hold and
//! send the bytes of the formulas.

use zero_engine::{Engine, Layers, zoo};
use zero_partition::{StateBytes, expected_payload};

use crate::optimizers::whole_parameters::{LAMB, MUON};
use crate::python::{python, results, small_llama};
use crate::sharding::bytes::{all_reduced, assert_state, gathered_at_stage_3, options};
use crate::sharding::on_disk::offloaded;
use crate::weights::frozen;
use crate::world::{
    BF16, agreed, assert_same, batch, config, configured_engine, engine, gpt2, relative_difference, resume, run,
    run_of, save, train, trajectory, world,
};

/// Number of replicates, and number of shards.
const LAYOUTS: [(usize, usize); 4] = [(2, 2), (2, 1), (4, 2), (2, 4)];
const STEPS: u64 = 6;

/// Returns the keys of a reproducible run (its bits do not depend on the layout) on global batches of 8 samples.
/// `training` is added to the section of that name.
fn text(stage: u8, (replicates, shards): (usize, usize), training: &str, more: &str) -> String {
    let mesh = match replicates {
        1 => String::new(),
        _ => format!("mesh: {{data_parallel_replicate_degree: {replicates}}}"),
    };
    format!(
        "train_micro_batch_size_per_gpu: 1\ngradient_accumulation_steps: {}\n{mesh}\n{more}\n\
         training: {{reproducible: true{training}}}\n\
         zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 40}}",
        8 / (replicates * shards)
    )
}

/// Asserts that each layout trains bit-identically to one rank, and to a single shard group of the same number of
/// ranks.
fn assert_equal(layers: impl Fn() -> Layers + Sync, layouts: &[(usize, usize)], training: &str, more: &str) {
    let run = |ranks: usize, text: &str| run_of(&layers, ranks, STEPS, text);
    let expected = run(1, &text(0, (1, 1), training, more));
    assert!(expected.losses[0] != expected.losses[5], "{more}");
    for &(replicates, shards) in layouts {
        let ranks = replicates * shards;
        for stage in 1..=3 {
            let text = |layout| text(stage, layout, training, more);
            assert_same(
                &expected,
                &run(ranks, &text((1, ranks))),
                &format!("one group of {ranks}, stage {stage}, {more}"),
            );
            assert_same(&expected, &run(ranks, &text((replicates, shards))), &text((replicates, shards)));
        }
    }
}

#[test]
fn shard_groups_are_bit_identical_to_one_group_and_one_rank() {
    assert_equal(gpt2, &LAYOUTS, "", "");
}

#[test]
fn muon_and_lamb_are_bit_identical() {
    for optimizer in [MUON, LAMB] {
        assert_equal(gpt2, &[(2, 2), (2, 1)], "", optimizer);
    }
}

#[test]
fn partly_frozen_models_are_bit_identical() {
    for selection in frozen::SELECTIONS {
        assert_equal(|| frozen::model(true), &[(2, 2)], &format!(", {selection}"), "");
    }
}

#[test]
fn averages_and_per_group_clipping_are_bit_identical() {
    let clipped =
        ", param_groups: [{kinds: [norm, bias], gradient_clipping: 0.05}, {params: '*attn.*', lr_scale: 0.5}]";
    assert_equal(gpt2, &[(2, 2)], &format!(", ema: {{decay: 0.8, start_step: 1}}{clipped}"), "");
}

#[test]
fn options_of_communication_are_bit_identical() {
    let expected = run(1, STEPS, &text(0, (1, 1), "", ""));
    for stage in 1..=3 {
        for zero in [
            "overlap_comm: true",
            "overlap_comm: false",
            "reduce_scatter: false",
            "reduce_bucket_size: 0, allgather_bucket_size: 0",
            "reduce_bucket_size: 500000000",
        ] {
            let text =
                text(stage, (2, 2), "", "").replace("zero_optimization: {", &format!("zero_optimization: {{{zero}, "));
            assert_same(&expected, &run(4, STEPS, &text), &text);
        }
    }
}

#[test]
fn pipelines_of_shard_groups_are_bit_identical() {
    let expected = run(1, STEPS, &text(0, (1, 1), "", ""));
    for schedule in ["1f1b", "zb_h1"] {
        let pipeline = format!("pipeline: {{stages: 2, schedule: {schedule}}}");
        for (layout, stage) in [((2, 2), 1), ((2, 2), 2), ((2, 2), 3), ((2, 1), 2)] {
            let text = text(stage, layout, "", &pipeline);
            assert_same(&expected, &run(2 * layout.0 * layout.1, STEPS, &text), &text);
        }
    }
}

#[test]
fn offloaded_state_is_bit_identical() {
    let folder = tempfile::tempdir().unwrap();
    let layers = || zoo::gpt2(&zoo::Gpt2Config { n_embd: 48, n_layer: 3, ..crate::world::gpt2_config() });
    let expected = run_of(layers, 1, STEPS, &text(0, (1, 1), "", ""));
    for layout in [(2, 2), (2, 1)] {
        for stage in 1..=3 {
            let plain = text(stage, layout, "", "");
            let parameters = if stage == 3 { "offload_param: {device: cpu}, " } else { "" };
            let cpu = format!("zero_optimization: {{offload_optimizer: {{device: cpu}}, {parameters}");
            let cpu = plain.replace("zero_optimization: {", &cpu);
            assert_same(&expected, &run_of(layers, layout.0 * layout.1, STEPS, &cpu), &cpu);
            let text = offloaded(&plain, folder.path());
            let all = world(layout.0 * layout.1, |comm| {
                let config = config(comm.size(), &text);
                let mut engine = Engine::with_communicator(config, layers(), comm).unwrap();
                let trajectory = trajectory(&mut engine, STEPS);
                assert!(engine.zero().disk_use().is_some_and(|used| used.read.min(used.written) > 0), "{text}");
                trajectory
            });
            assert_same(&expected, &agreed(all, &text), &text);
        }
    }
}

/// Without `training.reproducible`, gradients are summed first over micro-batches and then over replicates.
#[test]
fn sums_over_micro_batches_and_then_replicates_differ_by_rounding_only() {
    let text = |mesh: &str, stage: u8, more: &str| {
        format!(
            "train_micro_batch_size_per_gpu: 1\ngradient_accumulation_steps: 3\n{mesh}\n{more}\n\
             zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 40}}"
        )
    };
    for more in ["", "pipeline: {stages: 2}", "training: {compare_replicas_every: 1}"] {
        let ranks = if more.contains("pipeline") { 8 } else { 4 };
        for stage in [2, 3] {
            let groups = text("mesh: {data_parallel_replicate_degree: 2}", stage, more);
            let (flat, found) = (run(ranks, STEPS, &text("", stage, more)), run(ranks, STEPS, &groups));
            let difference = relative_difference(&found.loss_values(), &flat.loss_values());
            assert!(difference < 1e-6, "{groups}: {difference}");
            assert!(flat.parameters != found.parameters, "{groups}: the order of the sums is the same");
            assert_same(&found, &run(ranks, STEPS, &groups), &groups);
        }
    }
}

/// In bf16, sums are rounded after each of the two reductions (within shard groups, then over replicates). All ranks
/// must nevertheless have the same parameters.
#[test]
fn replicates_agree_in_16_bits() {
    for stage in 1..=3 {
        let more = format!("mesh: {{data_parallel_shard_degree: 2}}\n{BF16}\ngradient_accumulation_steps: 2");
        let text = format!("train_micro_batch_size_per_gpu: 1\n{more}\nzero_optimization: {{stage: {stage}}}");
        let all = world(4, |comm| {
            let mut engine = engine(comm, &text);
            let trajectory = trajectory(&mut engine, STEPS);
            engine.compare_replicas().unwrap();
            trajectory
        });
        agreed(all, &text);
    }
}

#[test]
fn a_run_continues_in_any_layout() {
    // Layout, ZeRO stage and pipeline stages.
    let layouts = [((1, 1), 0, 1), ((1, 2), 3, 1), ((2, 2), 1, 1), ((2, 2), 3, 1), ((2, 1), 2, 1), ((2, 2), 2, 2)];
    for optimizer in ["", MUON] {
        let keys = |(layout, stage, stages): ((usize, usize), u8, usize)| {
            let pipeline =
                if stages > 1 { format!("{optimizer}\npipeline: {{stages: {stages}}}") } else { optimizer.into() };
            (layout.0 * layout.1 * stages, text(stage, layout, ", ema: {decay: 0.8, start_step: 1}", &pipeline))
        };
        let whole = run(1, STEPS, &keys(layouts[0]).1);
        for from in &layouts[1..] {
            let root = tempfile::tempdir().unwrap();
            let (ranks, text) = keys(*from);
            save((ranks, 3), root.path(), |comm| engine(comm, &text));
            for to in layouts.iter().filter(|to| from.0.0 > 1 || to.0.0 > 1) {
                let (ranks, text) = keys(*to);
                let rest = resume((ranks, 3), root.path(), |comm| engine(comm, &text));
                assert_same(&whole.after(3), &rest, &format!("{from:?} to {to:?}, {optimizer}"));
            }
        }
    }
}

/// Ranks 1 and 3 both hold the second shard, so a parameter that is changed on rank 3 differs from that of rank 1.
#[test]
fn shards_are_compared_with_their_replicates() {
    for (layout, wrong, named) in [((2, 2), 3, "ranks 1, 3 differ"), ((2, 1), 1, "ranks 0, 1 differ")] {
        let text = text(3, layout, "", "")
            .replace("stage3_param_persistence_threshold: 40", "stage3_param_persistence_threshold: 0");
        let said = world(layout.0 * layout.1, |comm| {
            let rank = comm.rank();
            let mut engine = engine(comm, &text);
            trajectory(&mut engine, 1);
            engine.compare_replicas().unwrap();
            let name = "transformer.h.1.mlp.c_fc.weight";
            let mut values = engine.full_parameter(name).unwrap();
            if rank == wrong {
                values.iter_mut().for_each(|value| *value = f32::from_bits(value.to_bits() ^ 1));
            }
            engine.set_parameter(name, &values).unwrap();
            engine.compare_replicas().err().map(|error| error.to_string())
        });
        let of_rank = |rank: usize| said[rank].as_deref().unwrap_or_default();
        assert!(of_rank(wrong).contains(named) && of_rank(wrong).contains("shard"), "{said:?}");
        assert_eq!(said.iter().flatten().count(), 2, "{said:?}");
    }
}

/// The ranks of a shard group share one copy of the state, 16Ψ bytes with f32 and AdamW. The ZeRO stage decides which
/// parts each rank holds. The sent bytes follow from the collectives: over all ranks, a gather or reduce-scatter of n
/// elements among S ranks sends n (S − 1) elements, and an all-reduce among R ranks sends 2 n (R − 1).
#[test]
fn bytes_held_and_sent_match_the_formulas() {
    const MICRO_BATCHES: usize = 2;
    for (replicates, shards) in LAYOUTS {
        for stage in 1..=3u8 {
            let ranks = replicates * shards;
            let text = format!(
                "train_micro_batch_size_per_gpu: 1\ngradient_accumulation_steps: {MICRO_BATCHES}\n\
                 mesh: {{data_parallel_replicate_degree: {replicates}, data_parallel_shard_degree: {shards}}}\n\
                 zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 0, \
                 stage3_max_reuse_distance: 0}}"
            );
            let measured = world(ranks, |comm| {
                let rank = comm.rank();
                let mut engine = engine(comm, &text);
                let sent = engine.train_batch(&batch(0, ranks * MICRO_BATCHES)).unwrap().sent_bytes;
                let (zero, groups) = (engine.zero(), engine.zero().groups());
                let state = assert_state(&engine, &format!("{text}, rank {rank}"));
                let place = (groups.mesh(), groups.at());
                let options = options(&engine, candle_core::DType::F32);
                let payload = expected_payload(engine.program(), zero.layout(), place, 4, &options, |_| 0).total();
                let losses = if stage >= 2 { MICRO_BATCHES } else { 1 };
                let [norm, losses] =
                    [zero_optim::exact_sum::LIMBS, losses].map(|elements| all_reduced(elements, ranks, rank));
                let others = (8 * norm + 4 * losses) as u64;
                assert_eq!(sent, payload + others, "{text}, rank {rank}");
                let elements = zero.layout().elements();
                // Stages 1 and 2 gather the updated parameters.
                let gathered = if stage == 3 { gathered_at_stage_3(zero.layout(), MICRO_BATCHES) } else { elements };
                ([elements, gathered].map(|count| count as u64), state, payload)
            });
            let [elements, gathered] = measured[0].0;
            for group in measured.chunks(shards) {
                let sum = |of: fn(&StateBytes) -> u64| group.iter().map(|(_, state, _)| of(state)).sum::<u64>();
                let copies = |is_sharded: bool| if is_sharded { 1 } else { shards as u64 };
                assert_eq!(sum(|state| state.parameters), 4 * elements * copies(stage == 3), "{text}");
                assert_eq!(sum(|state| state.gradients), 4 * elements * copies(stage >= 2), "{text}");
                assert_eq!(sum(|state| state.optimizer), 8 * elements, "{text}");
            }
            let (r, s) = (replicates as u64, shards as u64);
            let times = if stage >= 2 { MICRO_BATCHES as u64 } else { 1 };
            let reduced = match shards {
                1 => times * 2 * (r - 1),
                // Replicates add up the sums of all micro-batches in one all-reduce.
                _ => times * r * (s - 1) + 2 * (r - 1),
            };
            let sent: u64 = measured.iter().map(|(.., payload)| payload).sum();
            assert_eq!(sent, 4 * (elements * reduced + gathered * r * (s - 1)), "{text}");
        }
    }
}

/// FSDP2 shards over one axis of its mesh and reduces over both. Its ranks are processes that rendezvous through a
/// file.
#[test]
fn fifty_steps_agree_with_fsdp2() {
    let root = tempfile::tempdir().unwrap();
    let (folder, meeting) = (root.path().join("base"), root.path().join("meeting"));
    let ranks = small_llama()
        + &format!(
            "
import json, sys, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
rank = int(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained({folder:?}).float().train()
dist.init_process_group('gloo', init_method='file://' + {meeting:?}, rank=rank, world_size=4)
mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('replicate', 'shard'))
for layer in model.model.layers: fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.1)
losses = []
for step in range(50):
    inputs, targets = tokens(step, 8)
    mean = torch.zeros(())
    for row in (2 * rank, 2 * rank + 1):
        model.set_requires_all_reduce(row % 2 == 1)
        logits = model(inputs[row : row + 1]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, targets[row]) / 2
        loss.backward()
        mean += loss.detach() / 4
    dist.all_reduce(mean)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step(); optimizer.zero_grad()
    losses.append(mean.item())
if rank == 0: print('result', json.dumps(losses))
dist.destroy_process_group()
"
        );
    let script = small_llama()
        + &format!(
            "
import subprocess, sys
llama({folder:?})
ranks = [subprocess.Popen([sys.executable, '-W', 'ignore', '-c', {ranks:?}, str(rank)]) for rank in range(4)]
assert all([rank.wait() == 0 for rank in ranks])
"
        );
    let Some(theirs) = python(&["torch", "transformers"], &script) else { return };
    let theirs: Vec<f32> = serde_json::from_str(results(&theirs).next().unwrap()).unwrap();
    for stage in 1..=3 {
        let text = format!(
            "train_micro_batch_size_per_gpu: 1\ngradient_accumulation_steps: 2\ngradient_clipping: 0.5\n\
             model: {{pretrained: {folder:?}}}\nmesh: {{data_parallel_replicate_degree: 2}}\n\
             optimizer: {{type: AdamW, params: {{lr: 1.0e-3, eps: 1.0e-6, weight_decay: 0.1}}}}\n\
             training: {{weight_decay_on: all}}\n\
             zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 0}}"
        );
        let losses = world(4, |comm| {
            let mut engine = configured_engine(comm, &text);
            train(&mut engine, 50).into_iter().map(|step| step.loss).collect::<Vec<f32>>()
        });
        let losses = agreed(losses, &text);
        let relative = relative_difference(&losses, &theirs);
        println!("stage {stage}: losses differ from FSDP2's by {relative:.1e} at most");
        assert!(relative < 1e-4, "{relative}\n{losses:?}\n{theirs:?}");
    }
}
