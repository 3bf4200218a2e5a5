//! What a peer can send; the first byte of the input says as what.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| zero_comm::fuzzing::frames(data));
