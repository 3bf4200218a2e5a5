//! A rank that leaves or stalls during training on GPUs, with secondary shards, codes, shard groups and local steps: the
//! errors of the other ranks name the rank, the operation and its sequence number.
//!
//! Collectives run ahead of the host from the second step on.

use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use zero_engine::comm::{Operation, Options, threads};

use super::world::{batch, engine, train};
use super::{has_gpu, mock, resident};

const RANKS: usize = 4;

/// Trains three steps. Then the last rank leaves, or stalls until the other ranks have failed. Returns their errors.
fn errors_of_others(text: &str, stalls: bool) -> Vec<String> {
    let options = Options { timeout: Duration::from_secs(6), ..Options::default() };
    let (sender, receiver) = channel::<()>();
    let mut receiver = Some(receiver).filter(|_| stalls);
    thread::scope(|scope| {
        let ranks = threads(RANKS, &options).into_iter().map(|comm| {
            let is_last = comm.rank() + 1 == RANKS;
            let sender = (!is_last).then(|| sender.clone());
            let stall: Option<Receiver<()>> = if is_last { receiver.take() } else { None };
            scope.spawn(move || {
                let mut engine = engine(comm, text);
                train(&mut engine, 3);
                if is_last {
                    // The senders send nothing, so `recv` returns when the last sender is dropped.
                    stall.map(|others| others.recv().unwrap_err());
                    return None;
                }
                // With local steps, the replicate without the last rank notices the fault in an outer step.
                let samples = engine.config().train_batch_size;
                let error = (3..6).find_map(|step| engine.train_batch(&batch(step, samples)).err());
                drop(sender);
                Some(error.expect("a rank is missing").to_string())
            })
        });
        let ranks: Vec<_> = ranks.collect();
        drop(sender);
        ranks.into_iter().filter_map(|rank| rank.join().expect("no panic")).collect()
    })
}

/// Returns whether an error names an operation and its sequence number.
fn names_an_operation(error: &str) -> bool {
    let number = |operation: &Operation| error.split_once(&format!("in {operation} #")).map(|(_, number)| number);
    Operation::ALL.iter().filter_map(number).any(|number| number.starts_with(|first: char| first.is_ascii_digit()))
}

#[test]
fn a_rank_that_leaves_or_stalls_is_named_with_its_operation() {
    if !mock::has_gpus(RANKS) || !has_gpu() {
        return;
    }
    let zero = |keys: &str| format!("zero_optimization: {{stage: 3, {keys}");
    let secondary = "zero_hpz_partition_size: 2,";
    let codes = "zero_hpz_partition_size: 2, zero_quantized_weights: true, zero_quantized_gradients: true,";
    let local = "training: {local_steps: {steps: 2},";
    let plain = resident("cuda", 3, 2, "launcher: {gpu_transport: nccl}");
    let [near, coded] = [secondary, codes].map(|keys| plain.replace(&zero(""), &zero(keys)));
    let groups = format!("{plain}\nmesh: {{data_parallel_replicate_degree: 2}}");
    let alone = groups.replace("training: {", local);
    assert!(near.contains(secondary) && coded.contains(codes) && alone.contains(local));
    let texts = [&near, &coded, &groups, &alone];
    thread::scope(|scope| {
        for (text, stalls) in texts.into_iter().flat_map(|text| [(text, false), (text, true)]) {
            scope.spawn(move || {
                let errors = errors_of_others(text, stalls);
                assert_eq!(errors.len(), RANKS - 1);
                for error in errors {
                    assert!(error.contains("rank 3") && names_an_operation(&error), "{text}\n{stalls}: {error}");
                }
            });
        }
    });
}
