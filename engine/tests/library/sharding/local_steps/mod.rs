//! Local steps: replicates train independently, and outer steps average them, as in DiLoCo. Losses match a PyTorch
//! script, and replicates hold and send the bytes of the formulas.

mod checkpoints;
mod combined;

use std::sync::Arc;
use std::time::Duration;

use zero_engine::Engine;
use zero_engine::comm::{Communicator, Options, threads};
use zero_partition::expected_payload;

use crate::python::{TOKENS, python, results};
use crate::sharding::bytes::{all_reduced, assert_state};
use crate::world::{
    BF16, Trajectory, agreed, batch, configured_engine, engine, relative_difference, train, trajectory, world,
};

/// Returns the keys of a run on global batches of 8 samples, with two replicates and three local steps. Each replicate
/// has `shards` ranks per pipeline stage.
fn text(zero_stage: u8, shards: usize, micro_batches: usize, more: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: {}\ngradient_accumulation_steps: {micro_batches}\n{more}\n\
         mesh: {{data_parallel_replicate_degree: 2}}\ntraining: {{local_steps: {{steps: 3}}}}\n\
         zero_optimization: {{stage: {zero_stage}, stage3_param_persistence_threshold: 40}}",
        8 / (2 * shards * micro_batches)
    )
}

/// Calls [`text`] for a ZeRO stage, a number of ranks per shard group and a number of pipeline stages. The gradient of
/// a replicate is the sum of two halves: two micro-batches of one rank, or one micro-batch of each of its two ranks.
fn staged((zero_stage, shards, stages): (u8, usize, usize), more: &str) -> String {
    text(zero_stage, shards, 2 / shards, &format!("{more}\npipeline: {{stages: {stages}}}"))
}

/// Runs two replicates. The ranks of a replicate must agree. Returns the trajectory of each replicate.
fn run(ranks: usize, steps: u64, text: &str) -> [Trajectory; 2] {
    let of_rank = |comm| {
        let mut engine = engine(comm, text);
        let trajectory = trajectory(&mut engine, steps);
        (engine.zero().outer().unwrap().share.replicate, trajectory)
    };
    of_replicates(world(ranks, of_rank), text)
}

pub(crate) fn of_replicates<T: PartialEq>(all: Vec<(usize, T)>, text: &str) -> [T; 2] {
    let (first, second): (Vec<_>, Vec<_>) = all.into_iter().partition(|(replicate, _)| *replicate == 0);
    [first, second].map(|of| agreed(of.into_iter().map(|(_, found)| found).collect(), text))
}

/// In PyTorch, the same GPT-2 is trained as two copies of the model, each with its own AdamW, and torch's SGD as the
/// outer optimizer.
#[test]
fn fifty_steps_agree_with_torch() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("base");
    let script = TOKENS.to_string()
        + &format!(
            "
import copy, json, transformers
torch.set_num_threads(1)
torch.manual_seed(3)
transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=61, n_positions=16, n_embd=32, n_layer=2, n_head=2, n_inner=64,
    initializer_range=0.1, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)).save_pretrained({folder:?})
start = transformers.AutoModelForCausalLM.from_pretrained({folder:?}).float().train()
replicates = [copy.deepcopy(start) for _ in range(2)]
inner = [torch.optim.AdamW(of.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.1) for of in replicates]
outer = torch.optim.SGD(start.parameters(), lr=0.7, momentum=0.9, nesterov=True)
losses = []
for step in range(50):
    inputs, targets = tokens(step, 8)
    for replicate, (model, optimizer) in enumerate(zip(replicates, inner)):
        own = slice(4 * replicate, 4 * replicate + 4)
        logits = model(inputs[own]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, targets[own].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step(); optimizer.zero_grad()
        losses.append(loss.item())
    if step % 5 == 4:
        with torch.no_grad():
            for mine, *others in zip(start.parameters(), *[of.parameters() for of in replicates]):
                mine.grad = mine - sum(others) / len(others)
        outer.step()
        with torch.no_grad():
            for mine, *others in zip(start.parameters(), *[of.parameters() for of in replicates]):
                for other in others: other.copy_(mine)
print('result', json.dumps(losses))
"
        );
    let Some(theirs) = python(&["torch", "transformers"], &script) else { return };
    let theirs: Vec<f32> = serde_json::from_str(results(&theirs).next().unwrap()).unwrap();
    for (stage, shards, stages) in [(0, 1, 1), (1, 2, 1), (2, 2, 1), (3, 2, 1), (2, 2, 2)] {
        let text = format!(
            "train_micro_batch_size_per_gpu: {}\ngradient_accumulation_steps: 2\ngradient_clipping: 0.5\n\
             model: {{pretrained: {folder:?}}}\nmesh: {{data_parallel_replicate_degree: 2}}\n\
             optimizer: {{type: AdamW, params: {{lr: 1.0e-3, eps: 1.0e-6, weight_decay: 0.1}}}}\n\
             training: {{weight_decay_on: all, local_steps: {{steps: 5}}}}\npipeline: {{stages: {stages}}}\n\
             zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 0}}",
            4 / (2 * shards)
        );
        let found = world(2 * shards * stages, |comm| {
            let mut engine = configured_engine(comm, &text);
            let losses: Vec<f32> = train(&mut engine, 50).into_iter().map(|step| step.loss).collect();
            (engine.zero().outer().unwrap().share.replicate, losses)
        });
        for (replicate, losses) in of_replicates(found, &text).into_iter().enumerate() {
            let theirs: Vec<f32> = theirs.iter().skip(replicate).step_by(2).copied().collect();
            let relative = relative_difference(&losses, &theirs);
            println!(
                "stage {stage}, {shards} × {stages}, replicate {replicate}: losses differ by {relative:.1e} at most"
            );
            // PyTorch adds in a different order, as in the comparison with FSDP2.
            assert!(relative < 1e-4, "{relative}\n{losses:?}\n{theirs:?}");
        }
    }
}

/// With one local step of plain SGD, the average of the replicates' parameters equals one update by the average of
/// their gradients.
#[test]
fn one_local_step_of_plain_sgd_is_data_parallelism() {
    let text = |training: &str, mesh: &str| {
        format!(
            "train_micro_batch_size_per_gpu: 2\noptimizer: {{type: SGD, params: {{lr: 0.5}}}}\n{mesh}\n{training}\n\
             zero_optimization: {{stage: 1}}"
        )
    };
    let local = text(
        "training: {local_steps: {steps: 1, outer_lr: 1.0, outer_momentum: 0}}",
        "mesh: {data_parallel_replicate_degree: 2}",
    );
    let averages = |text: &str| {
        let ranks = world(2, |comm| {
            let text = format!("gradient_clipping: 0\n{text}");
            let config = zero_engine::Config::with_world_size("test.yaml", text, 2).unwrap();
            let mut engine = Engine::with_communicator(config, crate::world::gpt2(), comm).unwrap();
            train(&mut engine, 10).into_iter().map(|step| step.loss).collect::<Vec<f32>>()
        });
        ranks[0].iter().zip(&ranks[1]).map(|(a, b)| (a + b) / 2.0).collect::<Vec<f32>>()
    };
    let plain = averages(&text("", ""));
    let relative = relative_difference(&averages(&local), &plain);
    // Averages of parameters and of gradients are rounded differently. Without outer steps, the replicates drift apart.
    assert!(relative < 1e-6, "{relative}: {plain:?}");
    let apart = relative_difference(&averages(&local.replace("steps: 1,", "steps: 100,")), &plain);
    assert!(apart > 1e-4, "{apart}");
}

#[test]
fn layouts_train_bit_identically() {
    let expected = run(2, 7, &text(0, 1, 1, ""));
    assert!(expected[0].losses != expected[1].losses, "the replicates have the same data");
    assert!(expected[0].losses[3] != run(2, 7, &text(0, 1, 1, "").replace("steps: 3", "steps: 4"))[0].losses[3]);
    for stage in 0..=3 {
        for schedule in ["1f1b", "zb_h1"] {
            let text = text(stage, 1, 1, &format!("pipeline: {{stages: 2, schedule: {schedule}}}"));
            assert!(run(4, 7, &text) == expected, "{text}");
        }
        let text = text(stage, 1, 1, "");
        assert!(run(2, 7, &text) == expected, "{text}");
    }
    // Now the gradient of a replicate is the sum of two halves, from one rank or from two.
    let expected = run(2, 7, &text(0, 1, 2, ""));
    for stage in 0..=3 {
        for (shards, stages) in [(1, 1), (2, 1), (2, 2)] {
            let text = staged((stage, shards, stages), "");
            assert!(run(2 * shards * stages, 7, &text) == expected, "{text}");
        }
    }
}

/// Between outer steps the replicates differ, so the model can neither be saved nor evaluated.
#[test]
fn unequal_replicates_are_neither_saved_nor_evaluated() {
    let root = tempfile::tempdir().unwrap();
    let text = text(2, 1, 1, "");
    world(2, |comm| {
        let mut engine = engine(comm, &text);
        train(&mut engine, 4);
        let saved = engine.save_checkpoint(root.path()).unwrap_err().to_string();
        assert!(
            saved.contains(
                "a checkpoint needs identical replicates, but the replicates have trained separately since step 3"
            ),
            "{saved}"
        );
        let evaluated = engine.eval_batch(&batch(0, 4)).unwrap_err().to_string();
        assert!(evaluated.contains("an evaluation needs identical replicates"), "{evaluated}");
        engine.outer_step().unwrap();
        let sent = engine.stats().sent_bytes();
        engine.outer_step().unwrap();
        assert_eq!(engine.stats().sent_bytes(), sent, "equal replicates are not averaged again");
        engine.eval_batch(&batch(0, 4)).unwrap();
        engine.save_checkpoint(root.path()).unwrap();
        // The regular outer steps still run, after each step whose number is a multiple of the number of local steps.
        let averaged: Vec<bool> = train(&mut engine, 5).iter().map(|step| step.averaged).collect();
        assert_eq!(averaged, [false, true, false, false, true]);
    });
}

/// Replicates do not communicate for several steps, so one may be later than the timeout of other operations allows.
#[test]
fn an_early_replicate_waits_for_a_late_one() {
    let text = text(1, 2, 1, "launcher: {timeout_seconds: 1}").replace("steps: 3", "steps: 100");
    let options = Options { timeout: Duration::from_secs(1), ..Options::default() };
    let rank = |comm: Arc<dyn Communicator>| {
        let mut engine = engine(comm, &text);
        train(&mut engine, 8);
        if engine.zero().outer().unwrap().share.replicate == 1 {
            std::thread::sleep(Duration::from_secs(3));
        }
        engine.outer_step().unwrap();
        engine.full_parameter("transformer.ln_f.weight").unwrap()
    };
    let found: Vec<Vec<f32>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = threads(4, &options).into_iter().map(|comm| scope.spawn(|| rank(comm))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(found.iter().all(|values| *values == found[0]));
}

/// A lost rank ends the wait of the others.
#[test]
fn an_early_replicate_does_not_wait_for_a_lost_one() {
    let text = text(1, 1, 1, "").replace("steps: 3", "steps: 100");
    let errors = world(2, |comm| {
        let is_lost = comm.rank() == 1;
        let mut engine = engine(comm, &text);
        train(&mut engine, 2);
        if is_lost { None } else { Some(engine.outer_step().unwrap_err().to_string()) }
    });
    let error = errors[0].as_ref().unwrap();
    assert!(error.contains("lost rank 1"), "{error}");
}

/// Each replicate evaluates its own samples, and the loss is the mean over all replicates.
#[test]
fn an_evaluation_is_over_all_replicates() {
    let text = text(1, 1, 1, "");
    let means = world(2, |comm| {
        let rank = comm.rank() as u64;
        let mut engine = engine(comm, &text);
        train(&mut engine, 3);
        let own = |engine: &mut Engine, step| engine.eval_batch(&batch(step, 4)).unwrap();
        let (both, first, second) = (own(&mut engine, rank), own(&mut engine, 0), own(&mut engine, 1));
        assert!(first != second && (both - (first + second) / 2.0).abs() < 1e-6, "{both} {first} {second}");
        both
    });
    assert_eq!(means[0], means[1]);
}

/// The outer optimizer updates the f32 copies. The working copies are then rounded from them.
#[test]
fn working_copies_in_16_bits_are_equal_after_an_outer_step() {
    for stage in 0..=3 {
        for shards in [1, 2] {
            let text = text(stage, shards, 1, BF16);
            let logits = world(2 * shards, |comm| {
                let mut engine = engine(comm, &text);
                let mut logits = |steps| {
                    train(&mut engine, steps);
                    let outputs = engine.forward(batch(0, 4).inputs).unwrap();
                    outputs.tensors()[0].to_dtype(candle_core::DType::F32).unwrap().flatten_all().unwrap()
                };
                [2, 1].map(|steps| logits(steps).to_vec1::<f32>().unwrap())
            });
            assert_ne!(logits[0][0], logits[shards][0], "{text}");
            assert!(logits.iter().all(|found| found[1] == logits[0][1]), "{text}");
        }
    }
}

/// Each replicate holds as much optimizer state as a run on the ranks of one replicate. All replicates together hold
/// one copy of the outer optimizer's state, 8Ψ bytes. ZeRO stage 0 shards nothing, so the S ranks of a shard group hold
/// S copies and send S times as much as at other stages. In an outer step, R replicates send 2 (R − 1) values for each
/// element of a copy. Between outer steps they send nothing to each other.
#[test]
fn bytes_held_and_sent_match_the_formulas() {
    for (replicates, shards, stages) in [(2, 1, 1), (2, 2, 1), (3, 1, 1), (3, 2, 1), (2, 1, 2)] {
        for stage in 0..=3u8 {
            let ranks = replicates * shards * stages;
            let text = format!(
                "train_micro_batch_size_per_gpu: 1\nmesh: {{data_parallel_replicate_degree: {replicates}}}\n\
                 training: {{local_steps: {{steps: 2}}}}\npipeline: {{stages: {stages}}}\n\
                 zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 40}}"
            );
            let measured = world(ranks, |comm| {
                let rank = comm.rank();
                let mut engine = engine(comm, &text);
                let between = |engine: &Engine| engine.zero().groups().apart().unwrap().stats().sent_bytes();
                let (options, mut outer) = (engine.settings().zero.clone(), 0);
                for step in 0..4 {
                    let before = between(&engine);
                    let taken = engine.train_batch(&batch(step, replicates * shards)).unwrap();
                    outer = between(&engine) - before;
                    assert_eq!((taken.averaged, outer > 0), (step % 2 == 1, step % 2 == 1), "{text}, rank {rank}");
                    if stages > 1 {
                        continue;
                    }
                    let (zero, groups) = (engine.zero(), engine.zero().groups());
                    let place = (groups.mesh(), groups.at());
                    let averaging = engine.stage_plan().averaging(zero.layout().shape()).remove(groups.at().stage);
                    let programs = [Some(engine.program()), taken.averaged.then_some(&averaging)];
                    let payload = programs
                        .into_iter()
                        .flatten()
                        .map(|program| expected_payload(program, zero.layout(), place, 4, &options, |_| 0).total());
                    let own = groups.shard().rank();
                    let [norm, loss] =
                        [zero_optim::exact_sum::LIMBS, 1].map(|elements| all_reduced(elements, shards, own));
                    assert_eq!(
                        taken.sent_bytes,
                        payload.sum::<u64>() + (8 * norm + 4 * loss) as u64,
                        "{text}, rank {rank}"
                    );
                }
                let (zero, state) = (engine.zero(), assert_state(&engine, &format!("{text}, rank {rank}")));
                let owned = zero.layout().segments().iter().enumerate().filter(|(id, _)| zero.owns(*id));
                (owned.map(|(_, segment)| segment.elements() as u64).sum::<u64>(), state.optimizer, outer)
            });
            // Each pipeline stage has its own parameters.
            let elements = measured.iter().map(|(elements, ..)| elements).sum::<u64>() / (replicates * shards) as u64;
            let copies = if stage == 0 { shards as u64 } else { 1 };
            let (held, sent) = measured.iter().fold((0, 0), |sum, (_, held, sent)| (sum.0 + held, sum.1 + sent));
            assert_eq!(held, 8 * elements * copies * (replicates as u64 + 1), "{text}");
            assert_eq!(sent, 4 * elements * copies * 2 * (replicates as u64 - 1), "{text}");
        }
    }
}
