//! Reads a Parquet file. A panic of the decoder is no failure, because the reader converts it to an error.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(init: std::panic::set_hook(Box::new(|_| ())), |data: &[u8]| zero_train::data::fuzzing::file("a.parquet", data));
