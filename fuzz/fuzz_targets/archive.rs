//! Reads JSON lines from a bzip2, gzip or zstd archive. The first bytes of the input select the format.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| zero_train::data::fuzzing::file("a.jsonl", data));
