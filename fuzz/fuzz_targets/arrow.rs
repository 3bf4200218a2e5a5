//! Reads an Arrow file or stream. A panic of the decoder, which the reader makes an error, is no failure.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(init: std::panic::set_hook(Box::new(|_| ())), |data: &[u8]| zero_train::data::fuzzing::file("a.arrow", data));
