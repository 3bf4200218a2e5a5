//! Tests of the mock driver itself: it detects faults, counts memory, and exposes missing synchronization.
#![allow(unsafe_code)]

#[path = "../../emulator/mock/mod.rs"]
mod mock;
mod ordering;

use std::ffi::c_void;
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};

use cudarc::driver::sys::{self, CUdeviceptr, CUmemPool_attribute as Attribute, CUmemoryPool, CUresult};
use zero_cuda::{Device, Event, Pinned, Stream, check};

const CHILD: &str = "ZERO_TRAIN_TEST_CHILD";

/// Runs a test in a child process with a small device and returns the child's standard error. Returns `None` in the
/// child.
fn of_child(test: &str) -> Option<String> {
    if std::env::var_os(CHILD).is_some() {
        assert!(mock::ready());
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, "1")
        .envs([("MOCK_DEVICE_BYTES", "1000000"), ("MOCK_COUNTS", "1")]);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    Some(said)
}

fn skipped() -> bool {
    !mock::only_the_mock()
}

/// On real devices a program without kernels must fail: otherwise it would skip every test and pass.
#[test]
fn without_kernels_tests_of_real_devices_fail() {
    const TEST: &str = "without_kernels_tests_of_real_devices_fail";
    let error = "cuModuleLoadData: CUDA_ERROR_INVALID_IMAGE";
    assert!(!mock::has_no_kernels(&"cuInit: CUDA_ERROR_NO_DEVICE"));
    if std::env::var_os(CHILD).is_some() {
        mock::has_no_kernels(&error);
        return;
    }
    let run = |real: bool| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", TEST, "--nocapture"]).env(CHILD, "1").env_remove(mock::REAL);
        let output = if real { command.env(mock::REAL, "1").output() } else { command.output() }.unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stdout).contains("skipped: built without kernels"))
    };
    assert_eq!((run(false), run(true)), ((true, true), (false, false)));
}

fn allocate(bytes: usize, stream: &Stream) -> Result<CUdeviceptr, CUresult> {
    let mut address = 0;
    // SAFETY: writes one address.
    match unsafe { sys::cuMemAllocAsync(&raw mut address, bytes, stream.raw()) } {
        CUresult::CUDA_SUCCESS => Ok(address),
        code => Err(code),
    }
}

fn free(address: CUdeviceptr, stream: &Stream) {
    // SAFETY: these tests allocated the memory.
    check("cuMemFreeAsync", unsafe { sys::cuMemFreeAsync(address, stream.raw()) }).unwrap();
}

fn write(address: CUdeviceptr, bytes: usize, stream: &Stream) {
    // SAFETY: the mock still owns the memory, even where the write is a fault under test.
    check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(address, 0, bytes, stream.raw()) }).unwrap();
}

fn priority(stream: &Stream) -> i32 {
    let mut priority = 0;
    // SAFETY: writes one number.
    check("cuStreamGetPriority", unsafe { sys::cuStreamGetPriority(stream.raw(), &raw mut priority) }).unwrap();
    priority
}

/// Also runs on real devices: every device that our kernels support has stream priorities.
#[test]
fn urgent_streams_have_a_higher_priority() {
    if !mock::ready() {
        return;
    }
    let device = mock::device_of(0);
    let (usual, urgent) = (Stream::new(&device).unwrap(), Stream::urgent(&device).unwrap());
    assert!(priority(&urgent) < priority(&usual), "{} {}", priority(&urgent), priority(&usual));
    assert_eq!(priority(&usual), 0);
}

fn stream() -> Stream {
    let device = Device::open(0).unwrap();
    device.make_current().unwrap();
    Stream::new(&device).unwrap()
}

#[test]
fn a_write_beyond_the_end_is_found() {
    if skipped() {
        return;
    }
    if let Some(said) = of_child("a_write_beyond_the_end_is_found") {
        assert!(said.contains("mock: a write beyond the ends of an allocation"), "{said}");
        return;
    }
    let stream = stream();
    let address = allocate(100, &stream).unwrap();
    write(address, 100, &stream);
    stream.synchronize().unwrap();
    write(address + 100, 1, &stream);
    free(address, &stream);
    let error = stream.synchronize().unwrap_err();
    assert_eq!(error.code, CUresult::CUDA_ERROR_LAUNCH_FAILED);
}

#[test]
fn a_write_after_free_is_found() {
    if skipped() {
        return;
    }
    if let Some(said) = of_child("a_write_after_free_is_found") {
        assert!(said.contains("mock: a write to memory that was freed"), "{said}");
        return;
    }
    let stream = stream();
    let address = allocate(100, &stream).unwrap();
    free(address, &stream);
    // SAFETY: the mock still owns the memory. The write goes through a host function, whose writes the driver does not
    // see.
    let code = unsafe { sys::cuLaunchHostFunc(stream.raw(), Some(poke), (address + 50) as *mut c_void) };
    check("cuLaunchHostFunc", code).unwrap();
    // The mock checks freed memory when it leaves the quarantine, so free more than the quarantine holds.
    for _ in 0..80 {
        free(allocate(900_000, &stream).unwrap(), &stream);
    }
    let error = stream.synchronize().unwrap_err();
    assert_eq!(error.code, CUresult::CUDA_ERROR_LAUNCH_FAILED);
}

#[test]
fn a_device_has_limited_memory() {
    if skipped() || of_child("a_device_has_limited_memory").is_some() {
        return;
    }
    let stream = stream();
    let free_bytes = || {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) }).unwrap();
        assert_eq!(total, 1_000_000);
        free
    };
    let mut pool: CUmemoryPool = std::ptr::null_mut();
    // SAFETY: writes one handle; device 0 exists.
    check("cuDeviceGetDefaultMemPool", unsafe { sys::cuDeviceGetDefaultMemPool(&raw mut pool, 0) }).unwrap();
    let counted = |attribute| {
        let mut value = 0u64;
        // SAFETY: these attributes are 64-bit numbers.
        let code = unsafe { sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut value).cast()) };
        check("cuMemPoolGetAttribute", code).unwrap();
        value
    };
    let set = |attribute, mut value: u64| {
        // SAFETY: as above.
        let code = unsafe { sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut value).cast()) };
        check("cuMemPoolSetAttribute", code).unwrap();
    };
    let (first, second) = (allocate(600_000, &stream).unwrap(), allocate(300_000, &stream).unwrap());
    assert_eq!(free_bytes(), 100_000);
    assert_eq!(allocate(100_001, &stream), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    free(first, &stream);
    assert_eq!(counted(Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 300_000);
    assert_eq!(counted(Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH), 900_000);
    // The freed memory stays reserved by the pool.
    assert_eq!((free_bytes(), counted(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)), (100_000, 900_000));
    set(Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, 500_000);
    stream.synchronize().unwrap();
    assert_eq!(free_bytes(), 500_000);
    set(Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, 0);
    set(Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0);
    stream.synchronize().unwrap();
    assert_eq!((free_bytes(), counted(Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)), (700_000, 300_000));
    free(second, &stream);
    stream.synchronize().unwrap();
    assert_eq!(free_bytes(), 1_000_000);
}

/// Memory freed on one stream is reused on another only where the order is certain: after an event, or after the host
/// has waited.
#[test]
fn memory_freed_on_another_stream_is_reused_after_an_event() {
    const TEST: &str = "memory_freed_on_another_stream_is_reused_after_an_event";
    if skipped() || of_child(TEST).is_some() {
        return;
    }
    let (first, second, third) = (stream(), stream(), stream());
    let device = Device::open(0).unwrap();
    let mut pool: CUmemoryPool = std::ptr::null_mut();
    // SAFETY: writes one handle; device 0 exists.
    check("cuDeviceGetDefaultMemPool", unsafe { sys::cuDeviceGetDefaultMemPool(&raw mut pool, 0) }).unwrap();
    let keep = Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    let mut all = u64::MAX;
    // SAFETY: these attributes are 64-bit numbers, here and below.
    check("set", unsafe { sys::cuMemPoolSetAttribute(pool, keep, (&raw mut all).cast()) }).unwrap();
    let reserved = || {
        let (attribute, mut value) = (Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, 0u64);
        // SAFETY: as above.
        check("get", unsafe { sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut value).cast()) }).unwrap();
        value
    };
    let event = || Event::new(&device).unwrap();
    let passes = |on: &Stream, behind: &Stream| {
        let (address, there) = (allocate(1000, on).unwrap(), event());
        on.record(&there).unwrap();
        behind.wait_for(&there).unwrap();
        free(address, behind);
    };
    passes(&first, &second);
    passes(&second, &second);
    assert_eq!(reserved(), 1000, "reused on the stream that freed it");
    passes(&first, &second);
    assert_eq!(reserved(), 2000, "not reused: the two streams are unordered");
    let (early, late) = (event(), event());
    second.record(&early).unwrap();
    third.wait_for(&early).unwrap();
    third.record(&late).unwrap();
    passes(&first, &second);
    assert_eq!(reserved(), 3000, "not reused: the first stream has not waited");
    first.wait_for(&late).unwrap();
    for _ in 0..2 {
        passes(&first, &second);
    }
    assert_eq!(reserved(), 3000, "reused through the third stream: freed before the event");
    passes(&first, &second);
    assert_eq!(reserved(), 4000, "not reused: freed after the event");
    second.synchronize().unwrap();
    for _ in 0..4 {
        passes(&first, &second);
    }
    assert_eq!(reserved(), 4000, "reused: the host has waited");
}

unsafe extern "C" fn hold(until: *mut c_void) {
    // SAFETY: the test keeps the receiver alive until the stream is done.
    let until = unsafe { &*until.cast::<Receiver<()>>() };
    until.recv().expect("the test lets go");
}

/// Empty pinned memory must be aligned, so that a program can make an empty slice of values from it.
#[test]
fn empty_pinned_memory_is_aligned_for_values() {
    if skipped() {
        return;
    }
    let pinned = Pinned::new(&Device::open(0).unwrap(), 0).unwrap();
    assert!(pinned.is_empty() && pinned.as_ptr().cast::<u64>().is_aligned());
}

/// A stream that does not wait for a delayed copy reads the old contents.
#[test]
fn a_stream_that_does_not_wait_reads_old_contents() {
    if skipped() {
        return;
    }
    let (writer, reader) = (stream(), stream());
    let device = Device::open(0).unwrap();
    let (mut from, mut to) = (Pinned::new(&device, 8).unwrap(), Pinned::new(&device, 8).unwrap());
    from.copy_from_slice(&[7; 8]);
    let address = allocate(8, &writer).unwrap();
    writer.synchronize().unwrap();
    let (let_go, held) = channel::<()>();
    // SAFETY: the receiver and both buffers live until the streams are done.
    unsafe {
        let held = (&raw const held).cast_mut().cast();
        check("cuLaunchHostFunc", sys::cuLaunchHostFunc(writer.raw(), Some(hold), held)).unwrap();
        check("cuMemcpyHtoDAsync", sys::cuMemcpyHtoDAsync_v2(address, from.as_ptr().cast(), 8, writer.raw())).unwrap();
        let into = to.as_mut_ptr().cast();
        check("cuMemcpyDtoHAsync", sys::cuMemcpyDtoHAsync_v2(into, address, 8, reader.raw())).unwrap();
        reader.synchronize().unwrap();
        assert_eq!(to[..], [0xff; 8]);
        let written = Event::new(&device).unwrap();
        writer.record(&written).unwrap();
        reader.wait_for(&written).unwrap();
        check("cuMemcpyDtoHAsync", sys::cuMemcpyDtoHAsync_v2(into, address, 8, reader.raw())).unwrap();
        assert_eq!(to[..], [0xff; 8]);
        let_go.send(()).unwrap();
        reader.synchronize().unwrap();
        assert_eq!(to[..], [7; 8]);
    }
    free(address, &writer);
    writer.synchronize().unwrap();
}

#[test]
fn driver_calls_are_counted() {
    if skipped() {
        return;
    }
    if let Some(said) = of_child("driver_calls_are_counted") {
        for line in ["mock_bytes_up 100100", "mock_bytes_down 20", "mock_bytes_within 6", "mock_launches 0"] {
            assert!(said.lines().any(|said| said == line), "{said}");
        }
        return;
    }
    let stream = stream();
    let address = allocate(100_000, &stream).unwrap();
    let (mut plain, mut pinned) = (vec![0u8; 100_000], Pinned::new(stream.device(), 10).unwrap());
    // Copies to the device from pageable memory (a large and a small copy) and from pinned memory, then to the host
    // into both kinds of memory, and within the device.
    // SAFETY: all buffers live until the stream is done.
    unsafe {
        for bytes in [100_000, 90] {
            let from = plain.as_ptr().cast();
            check("up", sys::cuMemcpyHtoDAsync_v2(address, from, bytes, stream.raw())).unwrap();
        }
        stream.upload(&pinned, address, 10).unwrap();
        stream.download(address, &mut pinned, 10).unwrap();
        check("down", sys::cuMemcpyDtoHAsync_v2(plain.as_mut_ptr().cast(), address, 10, stream.raw())).unwrap();
        check("within", sys::cuMemcpyDtoDAsync_v2(address + 6, address, 6, stream.raw())).unwrap();
    }
    write(address, 50, &stream);
    let event = Event::new(stream.device()).unwrap();
    stream.record(&event).unwrap();
    stream.wait_for(&event).unwrap();
    event.wait().unwrap();
    free(address, &stream);
    stream.synchronize().unwrap();
    assert!(stream.is_done().unwrap());
    let counts = [
        (c"mock_copies_up", 3),
        (c"mock_pageable_up", 2),
        (c"mock_copies_down", 2),
        (c"mock_pageable_down", 1),
        (c"mock_copies_within", 1),
        (c"mock_fills", 1),
        (c"mock_bytes_filled", 50),
        (c"mock_pool_allocations", 1),
        (c"mock_pool_frees", 1),
        (c"mock_pinned_allocations", 1),
        (c"mock_records", 1),
        (c"mock_event_waits", 1),
        (c"mock_queries", 1),
        // The host waits for the large copy from pageable memory and for the copy to pageable memory.
        (c"mock_waits_copy", 2),
        (c"mock_waits_event", 1),
        (c"mock_waits_stream", 1),
        (c"mock_waits", 4),
    ];
    for (name, count) in counts {
        assert_eq!(mock::read(name), count, "{name:?}");
    }
}

unsafe extern "C" fn poke(to: *mut c_void) {
    // SAFETY: the caller owns the byte.
    unsafe { to.cast::<u8>().write_volatile(0) };
}
