//! Tests specific to groups with devices: faults of NCCL, buffers on host and device, and release of all resources.
//!
//! The tests run one at a time, because the mock's faults are global to the process.

#[path = "../../../cuda/emulator/mock/mod.rs"]
mod mock;

use std::ffi::{CStr, c_long};
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use zero_comm::{
    Buffer, CommError, Communicator, DeviceBuffer, Dtype, Operation, Options, ReduceOp, ToGather, ToScatter, threads,
};
use zero_cuda::{Device, inventory};
use zero_nccl::DeviceVector;

use mock::device_of;

/// Waits for other tests and returns a lock that excludes them; `None` if neither the mock nor a device is available.
fn alone() -> Option<MutexGuard<'static, ()>> {
    static ONE: Mutex<()> = Mutex::new(());
    let alone = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    mock::ready().then_some(alone)
}

/// Like `alone`, for tests with two ranks.
fn alone_in_pairs() -> Option<MutexGuard<'static, ()>> {
    mock::connects(2).then(alone).flatten()
}

/// Like `alone`, for faults that only the mock can produce.
fn alone_with_the_mock() -> Option<MutexGuard<'static, ()>> {
    mock::only_the_mock().then(alone).flatten()
}

/// A fault of the mock, active until it is dropped.
struct Fault(&'static CStr);

impl Fault {
    fn of_rank(name: &'static CStr, rank: i32) -> Fault {
        mock::set(name, rank);
        Fault(name)
    }
}

impl Drop for Fault {
    fn drop(&mut self) {
        mock::set(self.0, -1);
    }
}

/// Runs `rank` on `size` threads, each with its own rank of a group over NCCL. Returns the results in rank order.
fn run<T: Send>(size: usize, timeout: Duration, rank: impl Fn(&dyn Communicator, &Arc<Device>) -> T + Sync) -> Vec<T> {
    let options = Options { timeout, ..Options::default() };
    let rank = &rank;
    std::thread::scope(|scope| {
        let start = |host: Arc<dyn Communicator>| {
            scope.spawn(move || {
                let device = device_of(host.rank());
                let comm = zero_nccl::attach(&*host, &device).expect("a group with devices");
                rank(&*comm, &device)
            })
        };
        let running: Vec<_> = threads(size, &options).into_iter().map(start).collect();
        running.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

const PATIENT: Duration = Duration::from_secs(120);
const IMPATIENT: Duration = Duration::from_secs(2);

fn up(values: Vec<f32>, device: &Arc<Device>) -> Buffer {
    DeviceVector::upload(&values.into(), device).expect("device memory").into()
}

fn down(buffer: Buffer) -> Vec<f32> {
    let Buffer::Device(buffer) = buffer else { panic!("not on a device") };
    buffer.memory().to_host().expect("the device answers").into_f32().expect("f32")
}

fn reduce(comm: &dyn Communicator, device: &Arc<Device>) -> Result<Vec<f32>, CommError> {
    comm.all_reduce(up(vec![1.0; 1000], device), ReduceOp::Sum).wait().map(down)
}

/// Returns the number of NCCL communicators that were not released.
fn live() -> c_long {
    mock::read(c"mock_live")
}

#[test]
fn an_error_of_nccl_reaches_every_rank() {
    let Some(_alone) = alone_with_the_mock() else { return };
    let started = Instant::now();
    let errors = run(3, PATIENT, |comm, device| {
        assert_eq!(reduce(comm, device).expect("nothing is wrong yet"), vec![3.0; 1000]);
        let _fault = comm.barrier().wait().map(|()| Fault::of_rank(c"mock_fails_rank", 1));
        comm.barrier().wait().expect("all know of the fault");
        let error = reduce(comm, device).expect_err("rank 1 fails");
        let later = reduce(comm, device).expect_err("the failure is final");
        assert!(matches!(later, CommError::Aborted { by: 1, .. }), "{later}");
        error
    });
    for (rank, error) in errors.into_iter().enumerate() {
        let CommError::Aborted { rank: own, by: 1, reason, operation, sequence } = error else { panic!("{error}") };
        assert_eq!((own, operation, sequence), (rank, Operation::AllReduce, 3));
        assert_eq!(reason, "nccl: asynchronous error: remote process exited");
    }
    assert!(started.elapsed() < PATIENT);
    assert_eq!(live(), 0);
}

#[test]
fn a_hanging_device_ends_with_the_deadline() {
    let Some(_alone) = alone_with_the_mock() else { return };
    let _fault = Fault::of_rank(c"mock_hangs_rank", 1);
    for size in [2, 4] {
        let errors = run(size, IMPATIENT, |comm, device| reduce(comm, device).expect_err("one hangs"));
        let late = errors.iter().filter(|error| matches!(error, CommError::Deadline { sequence: 0, .. })).count();
        let told = errors
            .iter()
            .filter(|error| matches!(error, CommError::Aborted { reason, .. } if reason.contains("in all_reduce #0")));
        assert!(late >= 1 && late + told.count() == size, "{errors:?}");
        assert_eq!(live(), 0);
    }
}

/// Loading a kernel while a collective waits for other ranks may deadlock with that collective; the mock can refuse
/// such loads.
#[test]
fn kernel_loads_during_a_collective_are_detected() {
    let Some(_alone) = alone_with_the_mock() else { return };
    let _fault = Fault::of_rank(c"mock_hangs_rank", 1);
    mock::set(c"mock_refuse_lazy_loading", 1);
    run(2, IMPATIENT, |comm, device| {
        let before = mock::load_nothing(device);
        assert!(before.contains("INVALID_IMAGE"), "{before}");
        let pending = comm.all_reduce(up(vec![1.0; 1000], device), ReduceOp::Sum);
        let started = Instant::now();
        let mut refused = mock::load_nothing(device);
        while !refused.contains("NOT_PERMITTED") && started.elapsed() < IMPATIENT {
            refused = mock::load_nothing(device);
        }
        assert!(refused.contains("NOT_PERMITTED"), "{refused}");
        pending.wait().map(drop).expect_err("one hangs");
    });
    mock::set(c"mock_refuse_lazy_loading", 0);
    assert_eq!(live(), 0);
}

#[test]
fn a_rank_that_does_not_connect_ends_with_the_deadline() {
    let Some(_alone) = alone_with_the_mock() else { return };
    let _fault = Fault::of_rank(c"mock_absent_rank", 2);
    let errors = run(3, IMPATIENT, |comm, device| reduce(comm, device).expect_err("one is absent"));
    assert!(errors.iter().any(|error| matches!(error, CommError::Deadline { .. })), "{errors:?}");
    assert_eq!(live(), 0);
}

#[test]
fn a_host_abort_ends_device_collectives() {
    let Some(_alone) = alone_with_the_mock() else { return };
    let _fault = Fault::of_rank(c"mock_hangs_rank", 1);
    let in_flight = Barrier::new(3);
    let errors = run(3, PATIENT, |comm, device| {
        let pending = comm.all_reduce(up(vec![1.0; 10], device), ReduceOp::Sum);
        in_flight.wait();
        if comm.rank() == 2 {
            std::thread::sleep(Duration::from_millis(300));
            comm.abort("disk full");
        }
        pending.wait().expect_err("aborted")
    });
    for error in errors {
        assert!(matches!(&error, CommError::Aborted { by: 2, reason, .. } if reason == "disk full"), "{error}");
    }
    assert_eq!(live(), 0);
}

/// Operations that run ahead return before they are complete. The next operation reports the error, and names the rank
/// that is missing.
#[test]
fn a_rank_that_is_missing_from_an_operation_that_runs_ahead_is_named() {
    let Some(_alone) = alone_with_the_mock() else { return };
    for size in [2, 4] {
        let done = Barrier::new(size);
        let errors = run(size, IMPATIENT, |comm, device| {
            assert_eq!(reduce(comm, device), Ok(vec![size as f32; 1000]));
            comm.run_ahead();
            assert_eq!(reduce(comm, device), Ok(vec![size as f32; 1000]));
            let error = (comm.rank() != 1).then(|| {
                let begun = Instant::now();
                let pending = comm.all_reduce(up(vec![1.0; 1000], device), ReduceOp::Sum);
                let ahead = pending.wait().expect("the device has the operation in its queue");
                assert!(begun.elapsed() < IMPATIENT / 2, "the result comes before the other ranks");
                // Waits for the device, until the operation is aborted.
                drop(down(ahead));
                reduce(comm, device).expect_err("rank 1 is missing")
            });
            done.wait();
            error
        });
        for error in errors.into_iter().flatten() {
            let text = error.to_string();
            assert!(text.contains("waiting for rank 1 in all_reduce #2"), "{text}");
        }
        assert_eq!(live(), 0);
    }
}

/// The device reports an error while an operation that runs ahead is in its queue.
#[test]
fn an_error_of_an_operation_that_runs_ahead_reaches_every_rank() {
    let Some(_alone) = alone_with_the_mock() else { return };
    let errors = run(3, PATIENT, |comm, device| {
        reduce(comm, device).expect("nothing is wrong yet");
        comm.run_ahead();
        reduce(comm, device).expect("nothing is wrong yet");
        let _fault = comm.barrier().wait().map(|()| Fault::of_rank(c"mock_fails_rank", 1));
        comm.barrier().wait().expect("all know of the fault");
        let begun = Instant::now();
        loop {
            if let Err(error) = reduce(comm, device) {
                return error;
            }
            assert!(begun.elapsed() < PATIENT);
        }
    });
    for error in errors {
        assert!(matches!(&error, CommError::Aborted { by: 1, reason, .. } if reason.starts_with("nccl: ")), "{error}");
    }
    assert_eq!(live(), 0);
}

/// The segments of a layer, whose shards differ in length, share one call of NCCL in a gather, and one in a reduction.
#[test]
fn a_layer_of_uneven_segments_takes_one_collective_of_nccl() {
    let Some(_alone) = alone_with_the_mock() else { return };
    const RANKS: usize = 3;
    const SEGMENTS: [[usize; RANKS]; 4] = [[5, 5, 4], [1000, 1024, 1024], [7, 9, 0], [3, 2, 2]];
    let value = |segment: usize, element: usize| (100 * segment + element) as f32;
    let wholes = SEGMENTS.iter().enumerate().map(|(segment, counts)| {
        (0..counts.iter().sum::<usize>()).map(|element| value(segment, element)).collect::<Vec<f32>>()
    });
    let wholes: &Vec<Vec<f32>> = &wholes.collect();
    run(RANKS, PATIENT, |comm, device| {
        let own = |counts: &[usize; RANKS]| {
            let start = counts[..comm.rank()].iter().sum::<usize>();
            start..start + counts[comm.rank()]
        };
        let segments = || wholes.iter().zip(SEGMENTS);
        // Between two barriers, all ranks together start these calls.
        let calls = |operation: &dyn Fn()| {
            let count = || {
                comm.barrier().wait().expect("all ranks are here");
                let count = mock::read(c"mock_collectives");
                comm.barrier().wait().expect("all ranks have counted");
                count
            };
            let before = count();
            operation();
            count() - before
        };
        let gathers = calls(&|| {
            let vector = |(whole, counts): (&Vec<f32>, [usize; RANKS])| ToGather {
                shard: up(whole[own(&counts)].to_vec(), device),
                output: up(vec![0.0; whole.len()], device),
                counts: counts.to_vec(),
            };
            let gathered = comm.all_gather_coalesced(segments().map(vector).collect()).wait().expect("gathered");
            assert!(gathered.into_iter().map(|of| down(of.output)).eq(wholes.iter().cloned()));
        });
        let reductions = calls(&|| {
            let vector = |(whole, counts): (&Vec<f32>, [usize; RANKS])| ToScatter {
                input: up(whole.clone(), device),
                shard: up(vec![0.0; counts[comm.rank()]], device),
                counts: counts.to_vec(),
            };
            let vectors = segments().map(vector).collect();
            let reduced = comm.reduce_scatter_coalesced(vectors, ReduceOp::Sum).wait().expect("reduced");
            let sums = segments()
                .map(|(whole, counts)| whole[own(&counts)].iter().map(|x| RANKS as f32 * x).collect::<Vec<f32>>());
            assert!(reduced.into_iter().map(|of| down(of.shard)).eq(sums));
        });
        assert_eq!([gathers, reductions], [RANKS as c_long; 2], "each rank starts one call");
    });
    assert_eq!(live(), 0);
}

#[test]
fn buffers_that_the_group_cannot_use_are_refused() {
    let Some(_alone) = alone_in_pairs() else { return };
    let devices = Device::count().expect("a driver");
    run(2, PATIENT, |comm, device| {
        let floats = || Buffer::from(vec![1f32; 4]);
        let elsewhere = (devices > 1).then(|| Device::open((device.ordinal() + 1) % devices).expect("a device"));
        let refused = [
            comm.all_gather(up(vec![0.0; 2], device), floats(), &[2, 2]).wait().err(),
            comm.reduce_scatter(floats(), up(vec![0.0; 2], device), &[2, 2], ReduceOp::Max).wait().err(),
            comm.all_to_all(up(vec![0.0; 4], device), floats(), &[2, 2], &[2, 2]).wait().err(),
        ];
        let stranger = elsewhere.map(|other| comm.all_reduce(up(vec![1.0], &other), ReduceOp::Sum).wait().err());
        for error in refused.into_iter().chain(stranger) {
            assert!(matches!(error, Some(CommError::Invalid { .. })), "{error:?}");
        }
        // The group accepts a host buffer in one operation and a device buffer in the next.
        let host = comm.all_reduce(floats(), ReduceOp::Sum);
        let on_device = comm.all_reduce(up(vec![1.0; 4], device), ReduceOp::Sum);
        let host = host.wait().expect("reduced");
        assert_eq!(host.as_f32(), Some(&[2f32; 4][..]));
        assert_eq!(on_device.wait().map(down), Ok(vec![2.0; 4]));
        assert_eq!(comm.stats()[Operation::AllReduce].calls, 2);
        assert!(matches!(
            comm.all_reduce(up(vec![], device), ReduceOp::Sum).wait().expect("an empty buffer is valid").into_f32(),
            Err(CommError::OnDevice { .. })
        ));
    });
    let alone = threads(1, &Options::default()).remove(0);
    let device = device_of(0);
    let error = alone.all_reduce(up(vec![1.0], &device), ReduceOp::Sum).wait().expect_err("no devices");
    assert!(error.to_string().contains("the group has no devices"), "{error}");
}

#[test]
fn buffers_on_host_and_device_are_a_mismatch() {
    let Some(_alone) = alone_in_pairs() else { return };
    let errors = run(2, PATIENT, |comm, device| {
        let buffer = if comm.rank() == 0 { up(vec![1.0; 4], device) } else { vec![1f32; 4].into() };
        comm.all_reduce(buffer, ReduceOp::Sum).wait().expect_err("one is on the host")
    });
    for error in errors {
        let text = error.to_string();
        assert!(matches!(error, CommError::Mismatch { .. }) && text.contains("(sum) on the device"), "{text}");
    }
}

#[test]
fn collectives_of_one_rank_return_its_own_values() {
    let Some(_alone) = alone() else { return };
    run(1, PATIENT, |comm, device| {
        let values: Vec<f32> = (0..10).map(|i| i as f32).collect();
        let gathered = comm.all_gather(up(values.clone(), device), up(vec![0.0; 10], device), &[10]).wait();
        let gathered = gathered.expect("gathered");
        assert_eq!((down(gathered.shard), down(gathered.output)), (values.clone(), values.clone()));
        let scattered =
            comm.reduce_scatter(up(values.clone(), device), up(vec![0.0; 10], device), &[10], ReduceOp::Sum);
        assert_eq!(scattered.wait().map(|scattered| down(scattered.shard)), Ok(values.clone()));
        let exchanged = comm.all_to_all(up(values.clone(), device), up(vec![0.0; 10], device), &[10], &[10]);
        assert_eq!(exchanged.wait().map(|exchanged| down(exchanged.output)), Ok(values.clone()));
        assert_eq!(comm.broadcast(up(values.clone(), device), 0).wait().map(down), Ok(values));
    });
    if !mock::is_real() {
        assert_eq!(live(), 0);
    }
}

#[test]
fn a_buffer_on_a_device_is_copied_and_compared_by_value() {
    let Some(_alone) = alone() else { return };
    let device = device_of(0);
    for dtype in Dtype::ALL {
        for length in [0, 1, 1000] {
            let mut host = Buffer::zeros(dtype, length);
            host.as_bytes_mut().iter_mut().enumerate().for_each(|(i, byte)| *byte = (i % 50) as u8);
            let vector = || DeviceVector::upload(&host, &device).expect("device memory");
            let buffer = DeviceBuffer::new(vector());
            let copy = buffer.clone();
            assert_eq!(copy, buffer);
            assert_eq!((copy.memory().dtype(), copy.memory().len(), copy.memory().device()), (dtype, length, 0));
            let back: DeviceVector = copy.downcast().expect("a vector");
            assert_eq!(back.download().as_ref(), Ok(&host));
            if length > 0 {
                host.as_bytes_mut()[0] ^= 1;
                assert_ne!(DeviceBuffer::new(DeviceVector::upload(&host, &device).expect("device memory")), buffer);
            }
        }
    }
}

#[test]
fn the_inventory_lists_every_device_and_its_peers() {
    let Some(_alone) = alone_with_the_mock() else { return };
    let found = inventory().expect("the inventory of the mock");
    assert_eq!((found.driver, found.nccl, found.devices.len()), ((13, 0), Ok((2, 28, 9)), 8));
    for (ordinal, device) in found.devices.iter().enumerate() {
        assert_eq!((device.name.as_str(), device.capability), (format!("mock {ordinal}").as_str(), (9, 0)));
        assert_eq!(device.memory, 8 << 30);
        let island = ordinal / 4 * 4..ordinal / 4 * 4 + 4;
        assert_eq!(device.peers, island.filter(|peer| *peer != ordinal).collect::<Vec<_>>());
    }
    let error = Device::open(8).expect_err("there are eight");
    assert!(error.to_string().starts_with("cuDeviceGet: CUDA_ERROR_INVALID_DEVICE"), "{error}");
}
