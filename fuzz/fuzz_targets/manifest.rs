//! Parses the `manifest.json` of a checkpoint.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| zero_checkpoint::fuzzing::manifest(data));
