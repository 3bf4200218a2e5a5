//! Parses messages of a peer. The first byte of the input selects the kind of message.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| zero_comm::fuzzing::frames(data));
