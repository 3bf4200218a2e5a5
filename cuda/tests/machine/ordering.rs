//! The mock reports memory that several streams use without an order between the uses.

use std::ffi::c_void;
use std::sync::mpsc::{Sender, channel};

use cudarc::driver::sys::{self, CUresult};
use zero_cuda::{Event, Stream, check};

use super::{allocate, free, of_child, skipped, stream, write};

/// Runs `fault` in a child process and expects the mock to report the fault `found`.
fn is_found(test: &str, found: &str, fault: impl Fn(&Stream, &Stream)) {
    if skipped() {
        return;
    }
    if let Some(said) = of_child(test) {
        assert!(said.contains(&format!("mock: {found}\n")), "{said}");
        return;
    }
    let (first, second) = (stream(), stream());
    fault(&first, &second);
    let error = first.synchronize().unwrap_err();
    assert_eq!(error.code, CUresult::CUDA_ERROR_LAUNCH_FAILED);
}

/// Makes `second` wait for the work on `first`.
fn order(first: &Stream, second: &Stream) {
    let event = Event::new(first.device()).unwrap();
    first.record(&event).unwrap();
    second.wait_for(&event).unwrap();
}

#[test]
fn a_use_on_a_stream_that_does_not_wait_for_the_allocation_is_found() {
    let found = "memory is used on a stream that does not wait for its allocation on another one";
    is_found("ordering::a_use_on_a_stream_that_does_not_wait_for_the_allocation_is_found", found, |first, second| {
        order(first, second);
        write(allocate(100, first).unwrap(), 100, second);
    });
}

#[test]
fn a_free_on_a_stream_that_does_not_wait_for_a_use_is_found() {
    let found = "memory is freed on a stream that does not wait for its use on another one";
    is_found("ordering::a_free_on_a_stream_that_does_not_wait_for_a_use_is_found", found, |first, second| {
        let address = allocate(100, first).unwrap();
        order(first, second);
        write(address, 10, second);
        order(second, first);
        write(address, 10, second);
        free(address, first);
    });
}

#[test]
fn a_use_after_free_is_found() {
    is_found("ordering::a_use_after_free_is_found", "memory is used after it was freed", |first, _| {
        let address = allocate(100, first).unwrap();
        free(address, first);
        write(address + 50, 1, first);
    });
}

unsafe extern "C" fn say(to: *mut c_void) {
    // SAFETY: the test keeps the sender alive until it has received the message.
    unsafe { &*to.cast::<Sender<()>>() }.send(()).expect("the test listens");
}

/// Streams are ordered by events (also through a third stream), by waits of the host, and by a message from a stream to
/// the host.
#[test]
fn streams_that_wait_may_use_and_free_memory_of_others() {
    if skipped() || of_child("ordering::streams_that_wait_may_use_and_free_memory_of_others").is_some() {
        return;
    }
    let streams = [stream(), stream(), stream()];
    let [first, second, third] = &streams;
    let pieces = [(); 4].map(|()| allocate(100, first).unwrap());
    order(first, second);
    order(second, third);
    for address in pieces {
        write(address, 100, third);
    }
    order(third, first);
    free(pieces[0], first);
    third.synchronize().unwrap();
    free(pieces[1], second);
    write(pieces[2], 100, third);
    let event = Event::new(third.device()).unwrap();
    third.record(&event).unwrap();
    while !event.is_done().unwrap() {
        std::thread::yield_now();
    }
    free(pieces[2], second);
    write(pieces[3], 100, third);
    let (said, heard) = channel::<()>();
    // SAFETY: the sender lives until the message has been received.
    let code = unsafe { sys::cuLaunchHostFunc(third.raw(), Some(say), (&raw const said).cast_mut().cast()) };
    check("cuLaunchHostFunc", code).unwrap();
    heard.recv().unwrap();
    free(pieces[3], second);
    streams.iter().for_each(|stream| stream.synchronize().unwrap());
}
