//! Embedding tables and heads that are split among the ranks of a tensor group: on every rank, results are within
//! rounding of the CPU's.

use super::{gpu, on_host};
use crate::check::{close, normal};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Module, VarBuilder};
use std::collections::HashMap;
use zero_comm::{Options, threads};
use zero_ops::device::check;
use zero_ops::{Embedding, IGNORE_INDEX, SequenceGroup, Sharing, VocabParallel, with_cuts};

const RANKS: usize = 4;
const WIDTH: usize = 6;
/// Number of positions of a sample. Each rank has a slice of them.
const TIME: usize = 8;

/// Runs `rank` on every rank of a group of threads. `rank` gets its index and its part of a weight, which has shape
/// `[entries, WIDTH]`.
fn on_ranks<T: Send>(entries: usize, rank: impl Fn(usize, Tensor) -> Result<T> + Sync) -> Vec<T> {
    let (whole, share) = (normal("whole weight", &[entries, WIDTH]), entries.div_ceil(RANKS));
    let part = |index: usize| {
        let (start, end) = ((index * share).min(entries), ((index + 1) * share).min(entries));
        let padding = Tensor::zeros((share + start - end, WIDTH), DType::F32, &Device::Cpu)?;
        match start == end {
            true => Ok(padding),
            false => Tensor::cat(&[whole.narrow(0, start, end - start)?, padding], 0),
        }
    };
    std::thread::scope(|scope| {
        let run = |(index, comm)| {
            let (rank, part) = (&rank, part(index).unwrap());
            let run = move || {
                let group = SequenceGroup::new(comm, Sharing::Layers);
                with_cuts((index, RANKS), || group.within(|| rank(index, part))).unwrap()
            };
            scope.spawn(run)
        };
        let started: Vec<_> = threads(RANKS, &Options::default()).into_iter().enumerate().map(run).collect();
        started.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn trained(x: &Tensor, on: &Device, dtype: DType) -> Result<Var> {
    Var::from_tensor(&x.to_dtype(dtype)?.to_device(on)?)
}

/// Builds a layer whose only parameter is `weight`.
fn with_weight(weight: &Var, on: &Device) -> VarBuilder<'static> {
    let all = HashMap::from([("weight".to_string(), weight.as_tensor().clone())]);
    VarBuilder::from_tensors(all, weight.dtype(), on)
}

/// Checks a loss over all classes with a z-loss and some ignored rows. With five classes, the last rank has none of
/// them.
#[test]
fn losses_of_a_vocab_parallel_head() {
    if gpu().is_none() {
        return;
    }
    for (dtype, tolerance) in [(DType::F32, 5e-6), (DType::BF16, 2e-2)] {
        for classes in [5, 61] {
            let all: Vec<i64> =
                (0..TIME as i64).map(|at| if at % 3 == 1 { IGNORE_INDEX } else { at * 7 % classes as i64 }).collect();
            let results = |on: &(dyn Fn() -> Device + Sync)| {
                on_ranks(classes, |index, weight| {
                    let device = on();
                    let slice = normal("x", &[1, TIME, WIDTH]).narrow(1, index * TIME / RANKS, TIME / RANKS)?;
                    let (x, weight) = (trained(&slice, &device, dtype)?, trained(&weight, &device, dtype)?);
                    let targets = Tensor::from_vec(all.clone(), (1, TIME), &device)?;
                    let head = VocabParallel::new(WIDTH, classes, 1.0, &with_weight(&weight, &device))?;
                    let (loss, z) = head.cross_entropy(x.as_tensor(), &targets, (1.0, 0.05))?;
                    let gradients = loss.backward()?;
                    check(&device)?;
                    let of = |of: &Var| on_host(gradients.get(of).expect("a gradient"));
                    Ok([on_host(&loss), on_host(&z.expect("its part")), of(&x), of(&weight)])
                })
            };
            let (found, expected) = (results(&|| gpu().expect("a GPU")), results(&|| Device::Cpu));
            for (rank, (found, expected)) in found.iter().zip(&expected).enumerate() {
                for (which, (found, expected)) in ["loss", "z", "dx", "dW"].iter().zip(found.iter().zip(expected)) {
                    close(&format!("{which} of rank {rank}, {classes} classes"), found, expected, tolerance);
                }
            }
        }
    }
}

/// Checks the rows of a table that is split among the ranks, and the gradients of each rank's entries.
#[test]
fn rows_of_a_vocab_parallel_embedding() {
    if gpu().is_none() {
        return;
    }
    for entries in [5, 61] {
        let ids: Vec<u32> = (0..TIME as u32).map(|at| at * at % entries as u32).collect();
        let results = |on: &(dyn Fn() -> Device + Sync)| {
            on_ranks(entries, |_, weight| {
                let device = on();
                let weight = trained(&weight, &device, DType::F32)?;
                let ids = Tensor::from_vec(ids.clone(), (1, TIME), &device)?;
                let table = Embedding::vocab_parallel(entries, WIDTH, 1.0, with_weight(&weight, &device))?;
                let rows = table.forward(&ids)?;
                let gradients = rows.sqr()?.flatten_all()?.sum_all()?.backward()?;
                check(&device)?;
                Ok([on_host(&rows), on_host(gradients.get(&weight).expect("a gradient"))])
            })
        };
        for (found, expected) in results(&|| gpu().expect("a GPU")).iter().zip(&results(&|| Device::Cpu)) {
            close("rows", &found[0], &expected[0], 1e-6);
            close("dW", &found[1], &expected[1], 1e-6);
        }
    }
}
