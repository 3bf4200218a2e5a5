//! The bytes that ranks read from a folder of weights.

use std::fs;
use std::path::Path;

use zero_engine::{Engine, configured_layers};

use super::{Parameters, config, pretrained, trained};
use crate::world::{parameters, world};

const MODEL: &str = "type: gpt2, vocab_size: 4000, n_positions: 16, n_embd: 64, n_layer: 2, n_head: 2";

/// Bytes that this thread has read from files so far; `None` if the system does not count them.
fn bytes_read() -> Option<u64> {
    let counters = fs::read_to_string("/proc/thread-self/io").ok()?;
    counters.lines().find_map(|line| line.strip_prefix("rchar: "))?.parse().ok()
}

/// Returns the bytes that each rank reads when it loads the weights, and the size of the file's header; `None` if the
/// system does not count what a thread reads.
fn read(ranks: usize, layout: &str, folder: &Path, expected: &Parameters) -> Option<(Vec<u64>, u64)> {
    let read = world(ranks, |comm| {
        let config = config(ranks, &format!("{}{layout}", pretrained(folder)));
        let layers = configured_layers(&config, None).unwrap();
        let before = bytes_read();
        let mut engine = Engine::with_communicator(config, layers, comm).unwrap();
        let read = before.zip(bytes_read()).map(|(before, after)| after - before);
        assert!(parameters(&mut engine) == *expected);
        read
    });
    let header = 8 + u64::from_le_bytes(fs::read(folder.join("model.safetensors")).unwrap()[..8].try_into().unwrap());
    let read = read.into_iter().collect::<Option<Vec<u64>>>();
    if read.is_none() {
        println!("skipped: the system does not count what a thread reads");
    }
    println!("{layout}: ranks read {read:?} bytes, each including a header of {header} bytes");
    Some((read?, header))
}

/// `read` also includes the header of the file, and the thread's reads of its own counters.
fn assert_read(read: u64, values: usize, (ranks, header): (u64, u64)) {
    assert!(read >= values as u64 && read <= values as u64 + ranks * (header + 2000), "{read} for {values}");
}

#[test]
fn a_rank_reads_only_its_shards() {
    let root = tempfile::tempdir().unwrap();
    let (folder, expected, _) = trained(root.path(), MODEL);
    let values: usize = expected.iter().map(|(_, values)| 4 * values.len()).sum();
    let stage = "zero_optimization: {stage: 3, stage3_param_persistence_threshold: 0}";
    let Some((read, header)) = read(4, stage, &folder, &expected) else { return };
    assert_read(read.iter().sum(), values, (4, header));
    // Shards are cut on blocks of 1,024 elements.
    assert!(read.iter().all(|&bytes| bytes < values as u64 / 3), "{read:?}");
}

/// A rank reads its part of each split parameter, and all of each other parameter: norms, positions, and biases of
/// linear layers with split inputs. With ZeRO stage 3, the ranks with the same part divide what they read.
#[test]
fn a_rank_of_a_tensor_group_reads_only_its_slices() {
    let root = tempfile::tempdir().unwrap();
    let (folder, expected, _) = trained(root.path(), MODEL);
    let is_whole = |name: &str| name.contains("ln_") || name.contains("wpe") || name.ends_with("c_proj.bias");
    let bytes = |whole: bool| -> usize {
        let parameters = expected.iter().filter(|(name, _)| is_whole(name) == whole);
        parameters.map(|(_, values)| 4 * values.len()).sum()
    };
    // Positions, and per layer two norms and two biases; the last norm.
    assert_eq!(bytes(true), 4 * (16 * 64 + 2 * (4 * 64 + 2 * 64) + 2 * 64));
    let tensor = "tensor_parallel: {autotp_size: 2}\nzero_optimization: {stage: 0}";
    let Some((read_whole, header)) = read(2, tensor, &folder, &expected) else { return };
    for read in read_whole {
        assert_read(read, bytes(false) / 2 + bytes(true), (1, header));
    }
    let sharded = "tensor_parallel: {autotp_size: 2}\n\
                   zero_optimization: {stage: 3, stage3_param_persistence_threshold: 0}";
    let Some((read, header)) = read(4, sharded, &folder, &expected) else { return };
    assert_read(read.iter().sum(), bytes(false) + 2 * bytes(true), (4, header));
    let total: u64 = read.iter().sum();
    assert!(read.iter().all(|&read| read < total / 3), "{read:?}");
}
