//! Unpacks a gzip or zstd archive of JSON lines, by the magic number of the input.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| zero_train::data::fuzzing::file("a.jsonl", data));
