//! Loads training micro-batches on separate threads while the engine computes.
//!
//! In steps with the same number of micro-batches, a rank requests the same micro-batches in the same order. The loader
//! learns this order in the first such step, and then loads ahead. A wrong prediction does not affect training: the
//! rank loads an unexpected micro-batch itself.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use zero_engine::{Batch, Error};

use super::corpus::Sampler;
use super::token_batches::MicroBatchSamples;

/// The result of loading a micro-batch, or the payload of a panic in the data set. The thread that requests the
/// micro-batch resumes the panic.
type Loaded = thread::Result<Result<Batch, Error>>;

/// The step of a micro-batch, the step's first position in the run, and the index of the micro-batch in the step.
type MicroBatchId = (u64, u64, usize);

/// A micro-batch to load, and the channel for the result.
type Job = (Arc<StepBatch>, usize, Sender<Loaded>);

/// The samples of a step.
struct StepBatch {
    step: u64,
    /// Position of the first sample in the run.
    start: u64,
    micro_batches: Vec<MicroBatchSamples>,
}

/// Training micro-batches that are loaded ahead of their use.
pub(super) struct Prefetcher {
    sampler: Sampler,
    /// Number of micro-batches that are loaded ahead.
    ahead: usize,
    /// Number of samples of the whole run.
    end: u64,
    /// For each number of micro-batches in a step, the order of this rank's requests in the last such step.
    orders: BTreeMap<usize, Vec<usize>>,
    /// The micro-batches that this rank has requested in the current step.
    asked: Vec<usize>,
    now: Arc<StepBatch>,
    /// The next step to load ahead, and how many of its micro-batches were started. `None` if no step can be loaded
    /// ahead.
    next: Option<(Arc<StepBatch>, usize)>,
    /// The micro-batches that are being loaded or were loaded ahead.
    queue: VecDeque<(MicroBatchId, Receiver<Loaded>)>,
    /// How long the current step has waited for its micro-batches.
    waited: Duration,
    workers: Workers,
}

impl Prefetcher {
    /// Creates a loader with `workers` threads that each load `factor` micro-batches ahead. Without threads, it loads
    /// nothing ahead. The run ends before sample `end`.
    pub(super) fn new(sampler: Sampler, (workers, factor): (usize, usize), end: u64) -> Self {
        let workers = Workers::new(workers, &sampler);
        Self {
            ahead: workers.threads.len() * factor,
            workers,
            sampler,
            end,
            orders: BTreeMap::new(),
            asked: vec![],
            now: Arc::new(StepBatch { step: 0, start: 0, micro_batches: vec![] }),
            next: None,
            queue: VecDeque::new(),
            waited: Duration::ZERO,
        }
    }

    /// Begins step `step`, counted from 1, whose first sample is `start`. Returns its micro-batches.
    ///
    /// # Errors
    /// Fails if the samples cannot be distributed to micro-batches.
    pub(super) fn begin(&mut self, step: u64, start: u64) -> Result<&[MicroBatchSamples], Error> {
        let (began, asked) = (Instant::now(), std::mem::take(&mut self.asked));
        if self.orders.get(&self.now.micro_batches.len()) != Some(&asked) {
            self.orders.insert(self.now.micro_batches.len(), asked);
            self.queue.clear();
        }
        self.now = match self.next.as_ref().filter(|(next, _)| (next.step, next.start) == (step, start)) {
            Some((next, _)) => next.clone(),
            None => Arc::new(StepBatch { step, start, micro_batches: self.sampler.distribute(step, start)? }),
        };
        if self.queue.is_empty() {
            self.next = Some((self.now.clone(), 0));
        }
        self.load_ahead();
        self.waited = began.elapsed();
        Ok(&self.now.micro_batches)
    }

    /// Returns micro-batch `index` of the global batch.
    ///
    /// # Errors
    /// Fails if the data set fails.
    pub(super) fn load(&mut self, index: usize) -> Result<Batch, Error> {
        let began = Instant::now();
        let batch = self.wait(index);
        self.waited += began.elapsed();
        self.load_ahead();
        batch
    }

    /// Returns how long this step has waited for its micro-batches.
    pub(super) fn waited(&self) -> Duration {
        self.waited
    }

    fn wait(&mut self, index: usize) -> Result<Batch, Error> {
        self.asked.push(index);
        let wanted = (self.now.step, self.now.start, index);
        let Some((_, loaded)) = self.queue.pop_front().filter(|(place, _)| *place == wanted) else {
            // Loading ahead begins again in the next step.
            self.queue.clear();
            self.orders.remove(&self.now.micro_batches.len());
            return self.sampler.load(self.now.start, &self.now.micro_batches[index]);
        };
        let loaded = loaded.recv().expect("a worker answers every job");
        loaded.unwrap_or_else(|panic| resume_unwind(panic))
    }

    fn load_ahead(&mut self) {
        while self.queue.len() < self.ahead
            && let Some((batch, started)) = self.next.take()
        {
            let order = self.orders.get(&batch.micro_batches.len());
            if let Some(&index) = order.and_then(|order| order.get(started)) {
                let place = (batch.step, batch.start, index);
                self.queue.push_back((place, self.workers.start(batch.clone(), index)));
                self.next = Some((batch, started + 1));
                continue;
            }
            let (step, start) = (batch.step + 1, batch.start + self.sampler.batch_sizes.at(batch.start) as u64);
            // A middle stage of a pipeline loads nothing.
            if order.is_none_or(Vec::is_empty) || start >= self.end {
                return;
            }
            // An error is ignored here: the step itself will report it.
            let micro_batches = self.sampler.distribute(step, start);
            self.next = micro_batches.ok().map(|micro_batches| (Arc::new(StepBatch { step, start, micro_batches }), 0));
        }
    }
}

/// Threads that load micro-batches. They end when `Workers` is dropped.
struct Workers {
    jobs: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    fn new(count: usize, sampler: &Sampler) -> Self {
        let (jobs, waiting) = channel::<Job>();
        let waiting = Arc::new(Mutex::new(waiting));
        let worker = |_| {
            let (waiting, sampler) = (waiting.clone(), sampler.clone());
            let work = move || {
                let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).recv();
                while let Ok((batch, index, done)) = next() {
                    let load = || sampler.load(batch.start, &batch.micro_batches[index]);
                    // If the micro-batch is no longer needed, nobody receives it.
                    let _ = done.send(catch_unwind(AssertUnwindSafe(load)));
                }
            };
            // If a thread cannot be started, the rank loads more micro-batches itself.
            thread::Builder::new().name("data loader".into()).spawn(work).ok()
        };
        Self { jobs: Some(jobs), threads: (0..count).filter_map(worker).collect() }
    }

    fn start(&self, batch: Arc<StepBatch>, index: usize) -> Receiver<Loaded> {
        let (done, loaded) = channel();
        let jobs = self.jobs.as_ref().expect("there are jobs until this is dropped");
        jobs.send((batch, index, done)).expect("workers wait for jobs until this is dropped");
        loaded
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // A worker catches the panics of the data set.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{BoxError, Dataset};
    use crate::train::corpus::Order;
    use candle_core::{Device, Tensor};
    use std::thread::ThreadId;
    use zero_config::BatchSizes;

    /// A data set in which sample `i` is the number `i`. It records the threads that loaded the samples.
    #[derive(Default)]
    struct Watched(Mutex<Vec<(Vec<usize>, ThreadId)>>);

    impl Dataset for Watched {
        fn len(&self) -> usize {
            1000
        }

        fn batch(&self, indices: &[usize]) -> Result<Batch, BoxError> {
            self.0.lock().unwrap().push((indices.to_vec(), thread::current().id()));
            match indices[0] {
                70 => return Err("sample 70 is broken".into()),
                80 => panic!("sample 80 panics"),
                _ => {}
            }
            let values: Vec<u32> = indices.iter().map(|&index| index as u32).collect();
            let x = Tensor::from_vec(values, indices.len(), &Device::Cpu)?;
            Ok(Batch::new(x.clone(), x))
        }
    }

    /// Returns a loader of micro-batches of 2 samples, in global batches of 8.
    fn prefetcher(workers: usize, factor: usize, end: u64) -> (Arc<Watched>, Prefetcher) {
        let data = Arc::new(Watched::default());
        let order = Order { seed: 1, shuffle: false };
        let sampler = Sampler {
            data: data.clone(),
            order,
            per_epoch: 1000,
            mixing: None,
            lengths: None,
            token_batches: None,
            rows: 2,
            batch_sizes: BatchSizes { full: 8, rampup: None },
        };
        (data, Prefetcher::new(sampler, (workers, factor), end))
    }

    fn first(batch: Result<Batch, Error>) -> u32 {
        batch.unwrap().only_target().unwrap().to_vec1::<u32>().unwrap()[0]
    }

    #[test]
    fn any_number_of_workers_loads_the_same_micro_batches() {
        for (workers, factor) in [(0, 2), (1, 1), (1, 2), (3, 2), (2, 9)] {
            let (data, mut loader) = prefetcher(workers, factor, 48);
            for step in 0..6 {
                loader.begin(step + 1, 8 * step).unwrap();
                // This rank, one of two, requests the second and the fourth micro-batch.
                for index in [1, 3] {
                    assert_eq!(first(loader.load(index)), 8 * step as u32 + 2 * index as u32, "{workers} × {factor}");
                }
            }
            drop(loader);
            let loads = data.0.lock().unwrap();
            assert_eq!(loads.len(), 12, "{workers} × {factor}: each once, and none after the end");
            let own = loads.iter().filter(|(_, thread)| *thread == thread::current().id()).count();
            assert_eq!(own, if workers == 0 { 12 } else { 2 }, "{workers} × {factor}: the first step is not expected");
        }
    }

    /// If such a rank looked for a step to load ahead, each step would distribute the samples of all later steps.
    #[test]
    fn a_rank_that_loads_nothing_deals_no_steps_ahead() {
        let (done, finished) = channel();
        thread::spawn(move || {
            let (_, mut loader) = prefetcher(1, 2, u64::MAX / 2);
            for step in 0..3 {
                loader.begin(step + 1, 8 * step).unwrap();
            }
            done.send(()).unwrap();
        });
        finished.recv_timeout(Duration::from_secs(60)).expect("three steps are distributed at once");
    }

    #[test]
    fn unexpected_batches_are_loaded_on_demand() {
        let (_, mut loader) = prefetcher(1, 3, 1000);
        loader.begin(1, 0).unwrap();
        assert_eq!((first(loader.load(0)), first(loader.load(1))), (0, 2));
        loader.begin(2, 8).unwrap();
        assert_eq!((first(loader.load(0)), first(loader.load(1))), (8, 10));
        // Step 3 skips some samples, and from step 4 on the order of the requests changes.
        loader.begin(3, 40).unwrap();
        assert_eq!((first(loader.load(0)), first(loader.load(1))), (40, 42));
        loader.begin(4, 48).unwrap();
        assert_eq!((first(loader.load(1)), first(loader.load(0))), (50, 48));
        loader.begin(5, 56).unwrap();
        assert_eq!((first(loader.load(1)), first(loader.load(0)), first(loader.load(3))), (58, 56, 62));
    }

    #[test]
    fn prefetch_errors_surface_when_the_sample_is_used() {
        let (_, mut loader) = prefetcher(1, 8, 1000);
        loader.sampler.batch_sizes.full = 2;
        for start in [60, 62, 64, 66, 68] {
            loader.begin(start / 2, start).unwrap();
            assert_eq!(first(loader.load(0)), start as u32);
        }
        loader.begin(35, 70).unwrap();
        assert_eq!(loader.load(0).unwrap_err().to_string(), "the data set failed: sample 70 is broken");
        for start in [72, 74, 76, 78] {
            loader.begin(start / 2, start).unwrap();
            assert_eq!(first(loader.load(0)), start as u32);
        }
        loader.begin(40, 80).unwrap();
        let panic = catch_unwind(AssertUnwindSafe(|| loader.load(0))).unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"sample 80 panics"));
    }
}
