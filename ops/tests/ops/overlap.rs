//! Checks what a rank computes while the ranks of its tensor group exchange slices, and while the ranks of a ring pass
//! keys and values on.

use crate::check::{bits, normal};
use crate::delegate::delegate;
use candle_core::{DType, Device, Result as Computed, Tensor, Var};
use candle_nn::{Module, VarBuilder};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::thread::spawn;
use zero_comm::{
    Buffer, Communicator, Dtype, Exchanged, Gathered, Options, Pending, ReduceOp, Scattered, ToGather, ToScatter,
    threads,
};
use zero_ops::graph::{backward_from, fused_block};
use zero_ops::sink::{Gradients, promise};
use zero_ops::{Linear, SequenceGroup, Sharing, causal_attention, measure::macs, whole_rows, with_cuts};

/// The exchanges of a rank, each with the number of multiply-accumulates that the rank computes between its start and
/// the wait for it.
type Log = Arc<Mutex<Vec<(&'static str, u64)>>>;

/// A communicator that logs the exchanges of tensor groups and of rings. A ring exchanges blocks of keys and values in
/// bf16, and their gradients in f32.
struct Logged {
    inner: Arc<dyn Communicator>,
    log: Log,
}

impl Logged {
    fn log<T: Send + 'static>(&self, name: &'static str, pending: Pending<T>) -> Pending<T> {
        let (log, start) = (Arc::clone(&self.log), macs());
        pending.map(move |result| {
            log.lock().unwrap().push((name, macs() - start));
            Ok(result)
        })
    }
}

impl Communicator for Logged {
    delegate!(
        rank,
        size,
        all_reduce_coalesced,
        broadcast,
        send,
        recv,
        barrier,
        split,
        with_devices,
        abort,
        stats,
        sizes,
        transport
    );

    fn all_gather_coalesced(&self, vectors: Vec<ToGather>) -> Pending<Vec<Gathered>> {
        self.log("gather", self.inner.all_gather_coalesced(vectors))
    }

    fn reduce_scatter_coalesced(&self, vectors: Vec<ToScatter>, op: ReduceOp) -> Pending<Vec<Scattered>> {
        self.log("sum", self.inner.reduce_scatter_coalesced(vectors, op))
    }

    fn all_to_all(&self, input: Buffer, output: Buffer, send: &[usize], receive: &[usize]) -> Pending<Exchanged> {
        let name = if input.dtype() == Dtype::F32 { "gradients" } else { "block" };
        self.log(name, self.inner.all_to_all(input, output, send, receive))
    }
}

/// The exchanges of a backward, and the bits of the gradients of x and of the parameters.
type Outcome = (Vec<(&'static str, u64)>, [Vec<u32>; 2]);

/// Runs the backward of two linear layers on one of two ranks. Each rank has 3 of the 6 hidden units.
fn backward(comm: Arc<dyn Communicator>, overlaps: bool) -> Computed<Outcome> {
    let (log, rank) = (Log::default(), comm.rank());
    let comm = Arc::new(Logged { inner: comm, log: Arc::clone(&log) });
    let group = SequenceGroup::new(comm, Sharing::Layers).overlapping(overlaps);
    let leaf = |name: &str, shape: &[usize]| Var::from_tensor(&normal(&format!("{name} of rank {rank}"), shape));
    let (mut parameters, mut places, mut end) = (HashMap::new(), vec![], 0);
    for (name, shape) in [("up.weight", &[3, 8][..]), ("up.bias", &[3]), ("down.weight", &[8, 3]), ("down.bias", &[8])]
    {
        let parameter = leaf(name, shape)?.as_tensor().clone();
        places.push((parameter.id(), end..end + parameter.elem_count(), false));
        end += parameter.elem_count();
        parameters.insert(name.to_string(), parameter);
    }
    let vb = VarBuilder::from_tensors(parameters, DType::F32, &Device::Cpu);
    let (up, down) = with_cuts((rank, 2), || -> Computed<_> {
        let up = Linear::column_parallel(8, &[6], true, 0.1, vb.pp("up"))?;
        Ok((up, Linear::row_parallel(6, 8, true, 0.1, vb.pp("down"))?))
    })?;
    // One sample of 8 positions, of which each rank has 4.
    let x = leaf("x", &[1, 4, 8])?;
    let run = |x: &Tensor| whole_rows(x, |x| down.forward(&up.forward(x)?));
    let y = group.within(|| promise(|| fused_block(&x, run)))?;
    log.lock().unwrap().clear();
    let mut sink = Gradients::default();
    sink.add_buffer(vec![f32::NAN; end], places);
    let dy = normal("dy", y.dims());
    let (sink, store) = sink.capture(|| backward_from(&[(y, dy)]));
    let dx = bits(store?.get(&x).unwrap());
    let sums = sink.into_buffers().remove(0).iter().map(|value| value.to_bits()).collect();
    let log = log.lock().unwrap().clone();
    Ok((log, [dx, sums]))
}

/// The gradient of x is computed while x is gathered again. The gradient of the weight is computed while the gradient
/// of x is summed. Both take 8 rows × 8 inputs × 3 outputs multiply-accumulates.
#[test]
fn gradients_are_computed_during_exchanges() {
    let run = |overlaps: bool| {
        let ranks = threads(2, &Options::default()).into_iter();
        let ranks: Vec<_> = ranks.map(|comm| spawn(move || backward(comm, overlaps).unwrap())).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    };
    let macs = 8 * 8 * 3;
    for ((alone, expected), (overlapping, gradients)) in run(false).into_iter().zip(run(true)) {
        assert_eq!(alone, [("gather", 0), ("gather", 0), ("sum", 0)]);
        assert_eq!(overlapping, [("gather", 0), ("gather", macs), ("sum", macs)]);
        assert!(gradients == expected, "the gradients differ");
    }
}

/// Positions of a chunk in the test of ring attention, heads and their size.
const RING: [usize; 3] = [5, 2, 4];

/// Returns the exchanges of the forward and of the backward of ring attention.
fn attention(comm: Arc<dyn Communicator>) -> Computed<[Vec<(&'static str, u64)>; 2]> {
    let ([chunk, heads, size], log) = (RING, Log::default());
    let time = 2 * comm.size() * chunk;
    let group = SequenceGroup::new(Arc::new(Logged { inner: comm, log: Arc::clone(&log) }), Sharing::Ring);
    let slice =
        |name: &str| Var::from_tensor(&group.slice(&normal(name, &[1, time, heads, size]).to_dtype(DType::BF16)?)?);
    let [q, k, v] = [slice("q")?, slice("k")?, slice("v")?];
    let y = group.within(|| causal_attention(&q, &k, &v))?;
    let forward = std::mem::take(&mut *log.lock().unwrap());
    let d_out = group.slice(&normal("dy", &[1, time, heads, size]))?.to_dtype(DType::BF16)?;
    backward_from(&[(y, d_out)])?;
    let backward = std::mem::take(&mut *log.lock().unwrap());
    Ok([forward, backward])
}

/// Returns the multiply-accumulates of one product of attention between the queries of rank `rank` and the block of
/// rank `owner`. Each rank has a chunk from each end of the sequence, and a query sees the keys up to its own position.
fn macs_of_a_product(rank: usize, owner: usize, ranks: usize) -> u64 {
    let ([chunk, heads, size], chunks) = (RING, |rank: usize| [rank, 2 * ranks - 1 - rank]);
    let seen = |queries: usize, keys: usize| match queries.cmp(&keys) {
        std::cmp::Ordering::Less => 0,
        std::cmp::Ordering::Equal => chunk * (chunk + 1) / 2,
        std::cmp::Ordering::Greater => chunk * chunk,
    };
    let pairs: usize = chunks(rank).into_iter().flat_map(|q| chunks(owner).map(|k| seen(q, k))).sum();
    (pairs * heads * size) as u64
}

/// A rank starts to send its block before it computes with it, and waits for the next block afterwards. In the
/// backward, the gradients of a block travel during the computation with the next block; those of the last block travel
/// alone.
#[test]
fn blocks_of_a_ring_travel_during_the_computation() {
    for ranks in [2, 3, 4] {
        let started: Vec<_> = threads(ranks, &Options::default())
            .into_iter()
            .map(|comm| spawn(move || attention(comm).unwrap()))
            .collect();
        for (rank, log) in started.into_iter().map(|rank| rank.join().unwrap()).enumerate() {
            let of_step = |step: usize| macs_of_a_product(rank, (rank + ranks - step) % ranks, ranks);
            // Two products in the forward and five in the backward.
            let forward: Vec<_> = (0..ranks - 1).map(|step| ("block", 2 * of_step(step))).collect();
            let mut backward = vec![("block", 5 * of_step(0))];
            for step in 1..ranks {
                // The gradients of the previous step arrive before the block of the next.
                if step > 1 {
                    backward.push(("gradients", 5 * of_step(step)));
                }
                if step + 1 < ranks {
                    backward.push(("block", 5 * of_step(step)));
                }
            }
            backward.push(("gradients", 0));
            assert!(forward.iter().all(|(_, macs)| *macs > 0));
            assert_eq!(log, [forward, backward], "rank {rank} of {ranks}");
        }
    }
}
