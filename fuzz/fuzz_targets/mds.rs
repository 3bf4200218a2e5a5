//! Reads a folder of MDS. The input is `index.json`, a zero byte, and a shard that `index.json` may name.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let end = data.iter().position(|&byte| byte == 0).unwrap_or(data.len());
    zero_train::data::fuzzing::shard(&data[..end], data.get(end + 1..).unwrap_or_default());
});
