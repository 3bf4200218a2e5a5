//! If a rank is lost or stalls while ranks that share sequences or split layers exchange values inside a layer, the
//! errors of the other ranks name the rank, the operation and its sequence number.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use zero_engine::comm::{
    Buffer, CommError, Communicator, DeviceFabric, Exchanged, Gathered, Operation, Options, Pending, ReduceOp,
    Scattered, ToGather, ToScatter, threads,
};
use zero_engine::{Error, Layers, zoo};

use crate::delegate::delegate;
use crate::world::{batch, engine_of, gpt2_config};

/// An operation of a group, with its sequence number.
type Call = (Operation, u64);

/// What a rank does in its step.
struct Watch {
    /// The operation in which the rank stops, and the index of the call: the rank's calls of this operation in the step
    /// are counted from 0.
    stop: Option<(Operation, usize)>,
    /// Present if the rank stalls instead of leaving. The operation then waits until all other ranks have dropped their
    /// senders.
    stall: Option<Mutex<Receiver<()>>>,
    is_training: AtomicBool,
    /// The operations that the rank has called in the step.
    calls: Mutex<Vec<Call>>,
    stopped: OnceLock<Call>,
}

/// A communicator of a rank that may stop. Splits share the rank's [`Watch`].
struct Watched {
    inner: Arc<dyn Communicator>,
    /// Number of collectives of this group so far.
    sequence: AtomicU64,
    watch: Arc<Watch>,
}

impl Watched {
    fn of(inner: Arc<dyn Communicator>, watch: &Arc<Watch>) -> Arc<dyn Communicator> {
        Arc::new(Self { inner, sequence: AtomicU64::new(0), watch: Arc::clone(watch) })
    }

    /// Records a call. Returns whether the rank stops here or has stopped.
    fn stops_at(&self, operation: Operation) -> bool {
        let (watch, sequence) = (&self.watch, self.sequence.fetch_add(1, Ordering::SeqCst));
        if !watch.is_training.load(Ordering::SeqCst) {
            return false;
        }
        let mut calls = watch.calls.lock().unwrap();
        let index = calls.iter().filter(|(called, _)| *called == operation).count();
        calls.push((operation, sequence));
        if watch.stopped.get().is_some() {
            return true;
        }
        if watch.stop != Some((operation, index)) {
            return false;
        }
        watch.stopped.set((operation, sequence)).unwrap();
        if let Some(stall) = &watch.stall {
            // The senders send nothing. This returns when the last one is dropped.
            stall.lock().unwrap().recv().unwrap_err();
        }
        true
    }
}

/// At the call where the rank stops, it passes invalid counts to the inner communicator, which then returns an error
/// without sending anything.
impl Communicator for Watched {
    delegate!(rank, size, send, recv, stats, sizes, transport);

    fn all_reduce_coalesced(&self, buffers: Vec<Buffer>, op: ReduceOp) -> Pending<Vec<Buffer>> {
        assert!(!self.stops_at(Operation::AllReduce));
        self.inner.all_reduce_coalesced(buffers, op)
    }

    fn all_gather_coalesced(&self, mut vectors: Vec<ToGather>) -> Pending<Vec<Gathered>> {
        if self.stops_at(Operation::AllGather) {
            vectors.iter_mut().for_each(|vector| vector.counts.clear());
        }
        self.inner.all_gather_coalesced(vectors)
    }

    fn reduce_scatter_coalesced(&self, mut vectors: Vec<ToScatter>, op: ReduceOp) -> Pending<Vec<Scattered>> {
        if self.stops_at(Operation::ReduceScatter) {
            vectors.iter_mut().for_each(|vector| vector.counts.clear());
        }
        self.inner.reduce_scatter_coalesced(vectors, op)
    }

    fn all_to_all(&self, input: Buffer, output: Buffer, send: &[usize], receive: &[usize]) -> Pending<Exchanged> {
        match self.stops_at(Operation::AllToAll) {
            true => self.inner.all_to_all(input, output, &[], &[]),
            false => self.inner.all_to_all(input, output, send, receive),
        }
    }

    fn broadcast(&self, buffer: Buffer, root: usize) -> Pending<Buffer> {
        assert!(!self.stops_at(Operation::Broadcast));
        self.inner.broadcast(buffer, root)
    }

    fn barrier(&self) -> Pending<()> {
        assert!(!self.stops_at(Operation::Barrier));
        self.inner.barrier()
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, CommError> {
        self.sequence.fetch_add(1, Ordering::SeqCst);
        Ok(Self::of(self.inner.split(color, key)?, &self.watch))
    }

    fn with_devices(&self, devices: Arc<dyn DeviceFabric>) -> Result<Arc<dyn Communicator>, CommError> {
        self.sequence.fetch_add(1, Ordering::SeqCst);
        Ok(Self::of(self.inner.with_devices(devices)?, &self.watch))
    }

    /// A rank that has stopped does not tell the other ranks.
    fn abort(&self, reason: &str) {
        if self.watch.stopped.get().is_none() {
            self.inner.abort(reason);
        }
    }
}

/// A layout, and where its last rank stops.
#[derive(Clone, Copy, Debug)]
struct Case {
    keys: &'static str,
    ranks: usize,
    stop: (Operation, usize),
    /// The other ranks of the group whose operation the last rank does not complete.
    peers: &'static [usize],
}

const HEADS: &str = "sequence_parallel_size: 2";
const RING: &str = "mesh: {context_parallel_degree: 4, context_parallel_rotate_method: alltoall}";
const BOTH: &str = "sequence_parallel_size: 2\nmesh: {context_parallel_degree: 2}";
const BOTH_WITH_RING: &str =
    "sequence_parallel_size: 2\nmesh: {context_parallel_degree: 2, context_parallel_rotate_method: alltoall}";
const TENSOR: &str = "tensor_parallel: {autotp_size: 2}";
const TENSOR_AND_RING: &str = "tensor_parallel: {autotp_size: 2}\n\
     mesh: {context_parallel_degree: 2, context_parallel_rotate_method: alltoall}";

/// A step of the model with two layers, in the order of its calls:
/// - by heads: two `all_to_all` per layer in the forward and in the backward,
/// - with a ring of 4 ranks: three `all_to_all` per layer in the forward, and six in the backward,
/// - with both keys: an `all_to_all` of a pair, the exchange with the other pair, and an `all_to_all` of the pair,
/// - in split layers: a `reduce_scatter` in the embedding and two per layer; an `all_gather` twice per layer, before
///   the head and for the loss. Then the backward begins.
const CASES: [Case; 12] = [
    // The backward of the last layer.
    Case { keys: HEADS, ranks: 2, stop: (Operation::AllToAll, 5), peers: &[0] },
    // The third step of the ring in the first layer.
    Case { keys: RING, ranks: 4, stop: (Operation::AllToAll, 2), peers: &[0, 1, 2] },
    // The second step of the ring in the backward of the last layer.
    Case { keys: RING, ranks: 4, stop: (Operation::AllToAll, 8), peers: &[0, 1, 2] },
    // The last layer's exchange of heads, and its gather of keys and values.
    Case { keys: BOTH, ranks: 4, stop: (Operation::AllToAll, 2), peers: &[2] },
    Case { keys: BOTH, ranks: 4, stop: (Operation::AllGather, 1), peers: &[1] },
    // The sum of the gradients of keys and values of the last layer, in the backward.
    Case { keys: BOTH, ranks: 4, stop: (Operation::ReduceScatter, 0), peers: &[1] },
    // The ring in the forward of the first layer, and in the backward of the last one.
    Case { keys: BOTH_WITH_RING, ranks: 4, stop: (Operation::AllToAll, 1), peers: &[1] },
    Case { keys: BOTH_WITH_RING, ranks: 4, stop: (Operation::AllToAll, 7), peers: &[1] },
    // The backward of the last layer.
    Case { keys: TENSOR, ranks: 2, stop: (Operation::AllGather, 7), peers: &[0] },
    Case { keys: TENSOR, ranks: 2, stop: (Operation::ReduceScatter, 7), peers: &[0] },
    // The ring of the last layer, in the forward and in the backward, while another rank waits in a collective of its
    // tensor group.
    Case { keys: TENSOR_AND_RING, ranks: 4, stop: (Operation::AllToAll, 1), peers: &[1] },
    Case { keys: TENSOR_AND_RING, ranks: 4, stop: (Operation::AllToAll, 3), peers: &[1] },
];

fn layers() -> Layers {
    zoo::gpt2(&zoo::Gpt2Config { n_head: 4, ..gpt2_config() })
}

/// What a survivor reports: its error, and the operations that it called in the step.
type Report = (CommError, Vec<Call>);

/// Trains one step. Returns the operation in which the last rank stopped, and the reports of the others.
fn run(case: Case, stalls: bool, options: &Options) -> (Call, Vec<Report>) {
    let Case { keys, ranks, stop, .. } = case;
    let text = format!("{keys}\ntrain_micro_batch_size_per_gpu: 2");
    let (sender, receiver) = channel::<()>();
    let mut receiver = Some(Mutex::new(receiver)).filter(|_| stalls);
    let (mut last, mut reports) = (None, vec![]);
    std::thread::scope(|scope| {
        let start = |comm: Arc<dyn Communicator>| {
            let is_last = comm.rank() + 1 == ranks;
            let watch = Arc::new(Watch {
                stop: is_last.then_some(stop),
                stall: if is_last { receiver.take() } else { None },
                is_training: AtomicBool::new(false),
                calls: Mutex::default(),
                stopped: OnceLock::new(),
            });
            let (text, sender) = (&text, (!is_last).then(|| sender.clone()));
            scope.spawn(move || {
                let mut engine = engine_of(layers(), Watched::of(comm, &watch), text);
                watch.is_training.store(true, Ordering::SeqCst);
                let error = engine.train_batch(&batch(0, 2)).expect_err("a rank stopped");
                drop(sender);
                let Error::Comm(error) = error else { panic!("{error}") };
                let calls = watch.calls.lock().unwrap().clone();
                (error, calls, watch.stopped.get().copied())
            })
        };
        let started: Vec<_> = threads(ranks, options).into_iter().map(start).collect();
        drop(sender);
        for rank in started {
            match rank.join().unwrap() {
                (error, calls, None) => reports.push((error, calls)),
                (_, _, stopped) => last = stopped,
            }
        }
    });
    (last.expect("the last rank stopped"), reports)
}

/// All survivors name the lost rank and the operation in which they noticed the loss. In the group of the lost rank,
/// that is the operation in which the rank was lost.
#[test]
fn a_rank_that_is_lost_in_a_layer_is_named_with_its_operation() {
    for case in CASES {
        let (last, reports) = run(case, false, &Options::default());
        assert_eq!(last.0, case.stop.0);
        assert_eq!(reports.len(), case.ranks - 1);
        for (survivor, (error, calls)) in reports.into_iter().enumerate() {
            let CommError::LostPeer { rank, peer, operation, sequence, .. } = error else {
                panic!("{error}: {case:?}")
            };
            assert_eq!((rank, peer), (survivor, case.ranks - 1), "{case:?}");
            match case.peers.contains(&survivor) {
                true => assert_eq!((operation, sequence), last, "rank {survivor}: {case:?}"),
                false => assert!(calls.contains(&(operation, sequence)), "{operation} #{sequence}: {case:?}"),
            }
        }
    }
}

/// The first survivor whose deadline passes aborts the job. Its message names the stalled rank, its operation and the
/// sequence number, and reaches all other survivors.
#[test]
fn a_rank_that_stalls_in_a_layer_is_named_with_its_operation() {
    let options = Options { timeout: Duration::from_secs(5), ..Options::default() };
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let options = &options;
        let started = CASES.map(|case| scope.spawn(move || (case, run(case, true, options))));
        started.into_iter().map(|case| case.join().unwrap()).collect()
    });
    for (case, (last, reports)) in outcomes {
        let deadlines: Vec<String> = reports
            .iter()
            .filter(|(error, _)| matches!(error, CommError::Deadline { .. }))
            .map(|(error, _)| error.to_string())
            .collect();
        assert!(!deadlines.is_empty(), "{case:?}");
        for (survivor, (error, calls)) in reports.into_iter().enumerate() {
            match error {
                CommError::Deadline { rank, peer, operation, sequence, .. } => {
                    assert_eq!((rank, peer), (survivor, case.ranks - 1), "{case:?}");
                    match case.peers.contains(&survivor) {
                        true => assert_eq!((operation, sequence), last, "rank {survivor}: {case:?}"),
                        false => assert!(calls.contains(&(operation, sequence)), "{operation} #{sequence}: {case:?}"),
                    }
                }
                CommError::Aborted { rank, by, reason, .. } => {
                    assert_eq!(rank, survivor, "{case:?}");
                    assert!(deadlines.contains(&format!("rank {by} {reason}")), "{by}: {reason}: {case:?}");
                }
                _ => panic!("{error}: {case:?}"),
            }
        }
    }
}
