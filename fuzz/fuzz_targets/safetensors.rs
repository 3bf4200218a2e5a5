//! Parses the header of a safetensors file.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| zero_checkpoint::fuzzing::safetensors(data));
