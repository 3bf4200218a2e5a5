//! The bytes that ranks send equal formulas that follow from the model's sizes: in split layers, and in the attention
//! of a context group whose layers are split.

use zero_engine::Layers;

use super::{gpt2, keys, llama};
use crate::world::{BF16, batch, engine_of, world};

const ROWS: usize = 2;
const TIME: usize = 16;
const WIDTH: usize = 32;
const LAYERS: usize = 2;
/// Query heads, and elements of a head.
const HEADS: [usize; 2] = [4, 8];

/// Elements of the unsplit parameters of [`gpt2`]: positions; for each layer, the weights and biases of two norms, and
/// the biases of the two maps whose inputs are split; the last norm.
const UNSPLIT_OF_GPT2: usize = TIME * WIDTH + LAYERS * (2 * 2 * WIDTH + 2 * WIDTH) + 2 * WIDTH;
/// Elements of the unsplit parameters of [`llama`]: for each layer, the weights of two norms, of the norms of queries
/// and of keys, and the two biases; the last norm.
const UNSPLIT_OF_LLAMA: usize = LAYERS * (2 * WIDTH + 2 * HEADS[1] + 2 * WIDTH) + WIDTH;

/// Trains one step. Returns the bytes that each rank sent to its tensor group and to its context group.
fn sent(layers: fn() -> Layers, ranks: usize, text: &str) -> Vec<[u64; 2]> {
    world(ranks, |comm| {
        let mut engine = engine_of(layers(), comm, text);
        engine.train_batch(&batch(0, engine.config().train_batch_size)).unwrap();
        let groups = engine.zero().groups();
        [groups.tensor(), groups.context()].map(|group| group.map_or(0, |group| group.stats().sent_bytes()))
    })
}

/// Returns the bytes that a rank sends to its tensor group in the layers of a micro-batch of `time` positions
/// (Korthikanti et al., 2022, section 4.2.2):
/// - for each attention and each feed-forward network: in the forward, a gather of slices and a reduce-scatter; in the
///   backward, their counterparts and the same gather again,
/// - the reduce-scatter of the embedding and the gather before the head, and their counterparts,
/// - three numbers per row for the loss.
fn in_layers(time: usize, ranks: usize, bytes: usize, forwards: usize) -> usize {
    // One slice to each other rank.
    let exchange = ROWS * time / ranks * WIDTH * bytes * (ranks - 1);
    // A layer has two gathers and two reduce-scatters in each forward. Its backward has their counterparts and two more
    // gathers. The exchanges of the embedding and the head run once in the forward and once in the backward.
    let of_layers = LAYERS * (4 * forwards + 6) * exchange;
    of_layers + 4 * exchange + 3 * 4 * ROWS * time * (ranks - 1)
}

/// Returns the bytes that the ranks of a group together send to sum `elements` elements of `bytes` bytes: all other
/// ranks send each element to the rank that sums it, and that rank sends the sum back to all of them.
fn to_sum(elements: usize, bytes: usize, ranks: usize) -> usize {
    2 * (ranks - 1) * elements * bytes
}

/// In addition to [`in_layers`], ranks send the sum of squares for the gradient norm, and once per step the gradients
/// of unsplit parameters in f32. ZeRO divides the sums of these gradients among the ranks of a shard group.
#[test]
fn traffic_matches_the_formulas() {
    let micro_batches = 2;
    let norm = zero_optim::ExactSum::new().limbs().len();
    for (layers, unsplit, tensor, replicas, stage) in [
        (gpt2 as fn() -> Layers, UNSPLIT_OF_GPT2, 2, 1, 2),
        (gpt2, UNSPLIT_OF_GPT2, 4, 1, 2),
        (llama, UNSPLIT_OF_LLAMA, 2, 1, 2),
        (gpt2, UNSPLIT_OF_GPT2, 2, 2, 1),
        (llama, UNSPLIT_OF_LLAMA, 2, 2, 3),
    ] {
        for (dtype, bytes) in [("", 4), (BF16, 2)] {
            for (more, forwards) in [("", 1), ("activation_checkpointing: {}", 2)] {
                let text = keys(tensor, ROWS, micro_batches, stage, &format!("{dtype}\n{more}"));
                let sent = sent(layers, tensor * replicas, &text);
                let of_layers = micro_batches * in_layers(TIME, tensor, bytes, forwards);
                let expected =
                    tensor * replicas * of_layers + replicas * to_sum(norm, 8, tensor) + to_sum(unsplit, 4, tensor);
                let total: u64 = sent.iter().map(|[tensor, _]| tensor).sum();
                assert_eq!(total, expected as u64, "{text}: {sent:?}");
                // The ranks of a tensor group send the same number of bytes, except for one element of each sum.
                for group in sent.chunks_exact(tensor) {
                    assert!(group.iter().all(|[sent, _]| sent.abs_diff(group[0][0]) <= 64), "{text}: {sent:?}");
                }
            }
        }
    }
}

/// The ranks of a context group have slices of the same sequences, and the same heads, which follow from their common
/// position in their tensor groups.
#[test]
fn traffic_of_context_and_tensor_groups_adds_up() {
    let norm = zero_optim::ExactSum::new().limbs().len();
    let ring = "mesh: {context_parallel_degree: 2, context_parallel_rotate_method: alltoall}";
    for (key, is_by_heads) in
        [("sequence_parallel_size: 2", true), ("mesh: {context_parallel_degree: 2}", false), (ring, false)]
    {
        for (dtype, bytes) in [("", 4), (BF16, 2)] {
            for stage in [1, 3] {
                let (context, tensor) = (2, 2);
                let text = keys(tensor, ROWS, 1, stage, &format!("{dtype}\n{key}"));
                let sent = sent(gpt2, context * tensor, &text);
                let slice = TIME / context;
                let of_tensor = context * tensor * in_layers(slice, tensor, bytes, 1)
                    + context * to_sum(norm, 8, tensor)
                    + to_sum(UNSPLIT_OF_GPT2, 4, tensor);
                assert_eq!(sent.iter().map(|[tensor, _]| tensor).sum::<u64>(), of_tensor as u64, "{text}: {sent:?}");
                let part = ROWS * slice * (HEADS[0] / tensor) * HEADS[1];
                let of_context = match is_by_heads {
                    // Queries, keys, values and results in each direction, except for the heads that a rank keeps.
                    true => 2 * 4 * part * bytes * (context - 1) / context,
                    // Keys and values in both directions, and their gradients in f32.
                    false => 2 * part * (2 * bytes + 4) * (context - 1),
                };
                assert!(sent.iter().all(|[_, sent]| *sent == (LAYERS * of_context) as u64), "{text}: {sent:?}");
            }
        }
    }
}
