//! The bytes that ranks send in attention equal formulas that follow from the heads of each rank.

use zero_engine::comm::Operation;
use zero_engine::{Layers, zoo};

use super::{KINDS, by_both, by_both_with_ring, gpt2, keys, llama, uneven_llama};
use crate::world::{BF16, batch, engine_of, gpt2_config, world};

const ROWS: usize = 2;
const TIME: usize = 16;
const LAYERS: usize = 2;
/// Elements of a head in all models here.
const SIZE: usize = 8;

/// Six heads with packed queries, keys and values.
fn uneven_gpt2() -> Layers {
    zoo::gpt2(&zoo::Gpt2Config { n_head: 6, n_embd: 48, ..gpt2_config() })
}

/// A model, and the heads that each rank of a group computes.
struct Heads {
    layers: fn() -> Layers,
    /// Query heads of each rank.
    queries: &'static [usize],
    /// Number of key heads that each rank gets. A rank gets a key head more than once if its query heads do not form
    /// groups of the same size, one for each key head.
    keys: &'static [usize],
    /// Key heads of the model.
    all_keys: usize,
}

const MODELS: [Heads; 8] = [
    Heads { layers: gpt2, queries: &[2, 2], keys: &[2, 2], all_keys: 4 },
    Heads { layers: gpt2, queries: &[1; 4], keys: &[1; 4], all_keys: 4 },
    Heads { layers: uneven_gpt2, queries: &[2, 2, 1, 1], keys: &[2, 2, 1, 1], all_keys: 6 },
    Heads { layers: llama, queries: &[2, 2], keys: &[1, 1], all_keys: 2 },
    // Two ranks get the same key head.
    Heads { layers: llama, queries: &[1; 4], keys: &[1; 4], all_keys: 2 },
    // Rank 0 has the query heads 0 to 2, which read the key heads 0, 0 and 1.
    Heads { layers: uneven_llama, queries: &[3, 3], keys: &[3, 3], all_keys: 3 },
    Heads { layers: uneven_llama, queries: &[2, 2, 1, 1], keys: &[1; 4], all_keys: 3 },
    Heads { layers: uneven_gpt2, queries: &[3, 3], keys: &[3, 3], all_keys: 6 },
];

impl Heads {
    /// Returns the elements that a rank sends in the forward and in the backward of a layer. Queries, keys and values
    /// go to the ranks that compute their heads, and results return to their positions. Gradients go the opposite ways.
    fn exchanged(&self, rank: usize, slice: usize) -> [usize; 2] {
        let head = ROWS * slice * SIZE;
        let of_others = |heads: &[usize]| head * (heads.iter().sum::<usize>() - heads[rank]);
        let to_others = |heads: &[usize]| head * heads[rank] * (heads.len() - 1);
        let forward = of_others(self.queries) + 2 * of_others(self.keys) + to_others(self.queries);
        let backward = to_others(self.queries) + 2 * to_others(self.keys) + of_others(self.queries);
        [forward, backward]
    }
}

/// Returns the bytes that a rank sends to the other ranks in the forward and in the backward: its keys and values and,
/// in the backward, also the gradients of the other ranks' keys and values in f32.
fn passed(heads: usize, slice: usize, ranks: usize, bytes: usize) -> [usize; 2] {
    let block = 2 * ROWS * slice * heads * SIZE * (ranks - 1);
    [block * bytes, block * (bytes + 4)]
}

#[test]
fn grouped_and_uneven_heads_send_what_each_rank_lacks() {
    for heads in MODELS {
        let (ranks, layers, micro_batches) = (heads.queries.len(), heads.layers, 2);
        let slice = TIME / ranks;
        for (dtype, bytes) in [("", 4), (BF16, 2)] {
            for (more, forwards) in [("", 1), ("activation_checkpointing: {}", 2)] {
                for (index, kind) in KINDS.into_iter().enumerate() {
                    let text = kind(keys(ranks, ROWS, micro_batches, 2, &format!("{dtype}\n{more}")));
                    let sent = world(ranks, |comm| {
                        let mut engine = engine_of(layers(), comm, &text);
                        engine.train_batch(&batch(0, micro_batches * ROWS)).unwrap();
                        engine.zero().groups().context().unwrap().stats().sent_bytes()
                    });
                    for (rank, sent) in sent.into_iter().enumerate() {
                        let [forward, backward] = match index {
                            0 => heads.exchanged(rank, slice).map(|elements| elements * bytes),
                            _ => passed(heads.all_keys, slice, ranks, bytes),
                        };
                        let expected = LAYERS * micro_batches * (forwards * forward + backward);
                        assert_eq!(sent, expected as u64, "rank {rank}: {text}");
                    }
                }
            }
        }
    }
}

/// With both keys, the two ranks of a pair exchange heads of their slices. Each rank then gathers the keys and values
/// of its heads from the other pair, or passes them around a ring. Apart from this, a rank sends only ZeRO's
/// collectives, and sums of losses and norms.
#[test]
fn traffic_of_sequence_and_context_parallelism_adds_up() {
    for heads in MODELS.into_iter().filter(|heads| heads.queries.len() == 2) {
        for (dtype, bytes) in [("", 4), (BF16, 2)] {
            for kind in [by_both, by_both_with_ring] {
                let text = kind(keys(4, ROWS, 1, 2, dtype));
                let sent = world(4, |comm| {
                    let mut engine = engine_of((heads.layers)(), comm, &text);
                    let before = engine.stats();
                    engine.train_batch(&batch(0, ROWS)).unwrap();
                    let sent = engine.stats() - before;
                    let zero = engine.zero();
                    let place = (zero.groups().mesh(), zero.groups().at());
                    let options = &engine.settings().zero;
                    let state =
                        zero_partition::expected_payload(engine.program(), zero.layout(), place, bytes, options, |_| 0);
                    // At stage 2, only losses and norms are summed with all_reduce.
                    sent.sent_bytes() - sent[Operation::AllReduce].sent_bytes - state.total()
                });
                for (rank, sent) in sent.into_iter().enumerate() {
                    let place = rank % 2;
                    let of_heads: usize = heads.exchanged(place, TIME / 4).iter().sum();
                    let of_queries: usize = passed(heads.keys[place], TIME / 2, 2, bytes).iter().sum();
                    assert_eq!(sent, (LAYERS * (of_heads * bytes + of_queries)) as u64, "rank {rank}: {text}");
                }
            }
        }
    }
}
