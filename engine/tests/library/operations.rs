//! The number of collectives in a step: one for each layer and purpose, however many segments (flat parameters) the
//! layer has.

use zero_engine::comm::Operation;
use zero_engine::pipeline::Instruction;
use zero_engine::{Layers, zoo};

use crate::world::{batch, engine_of, gpt2_config, llama_config, world};

const RANKS: usize = 2;
const BLOCKS: usize = 3;
const MICRO_BATCHES: usize = 2;

/// A GPT-2 in which four matrices of each block have a segment of their own. The head is tied to the embedding.
fn gpt2() -> Layers {
    zoo::gpt2(&zoo::Gpt2Config { n_embd: 512, n_layer: BLOCKS, n_inner: Some(512), ..gpt2_config() })
}

/// A Llama in which the seven matrices of each block have a segment of their own.
fn llama() -> Layers {
    zoo::llama(&zoo::LlamaConfig {
        hidden_size: 512,
        intermediate_size: 512,
        num_hidden_layers: BLOCKS,
        num_key_value_heads: 4,
        ..llama_config()
    })
}

/// The collectives that a step starts, and the segments that they process.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    collectives: usize,
    segments: usize,
}

/// Counts gathers (with refreshes) and reductions, and checks the counts against the communicator.
fn counted(layers: fn() -> Layers, zero: &str) -> [Counts; 2] {
    counted_in(RANKS, layers, zero, "", |reductions| [reductions, 0, 0])
}

/// Like `counted`, with further keys. `collectives` takes the number of reductions and returns how many
/// reduce-scatters, all-to-alls and all-reduces they consist of.
fn counted_in(
    ranks: usize,
    layers: fn() -> Layers,
    zero: &str,
    more: &str,
    collectives: impl Fn(usize) -> [usize; 3] + Sync,
) -> [Counts; 2] {
    let text = format!(
        "train_micro_batch_size_per_gpu: 1\ngradient_accumulation_steps: {MICRO_BATCHES}\n{more}\n\
         zero_optimization: {{{zero}}}"
    );
    let of_ranks = world(ranks, |comm| {
        let mut engine = engine_of(layers(), comm, &text);
        let before = engine.zero().groups().stats();
        engine.train_batch(&batch(0, ranks * MICRO_BATCHES)).unwrap();
        let stats = engine.zero().groups().stats() - before;
        let [mut gathers, mut reductions] = [Counts::default(), Counts::default()];
        for instruction in &engine.program().instructions {
            let (counts, segments) = match instruction {
                Instruction::Gather { segments }
                | Instruction::GatherSecondary { segments }
                | Instruction::Refresh { segments } => (&mut gathers, segments),
                Instruction::Reduce { segments, .. } => (&mut reductions, segments),
                _ => continue,
            };
            counts.collectives += 1;
            counts.segments += segments.len();
        }
        assert_eq!(stats[Operation::AllGather].calls, gathers.collectives as u64, "{zero}");
        let [scatters, exchanges, sums] = collectives(reductions.collectives);
        let operations = [Operation::ReduceScatter, Operation::AllToAll, Operation::AllReduce];
        // One all-reduce for the gradient norm, and one for the losses.
        let expected = [scatters, exchanges, sums + 2].map(|calls| calls as u64);
        assert_eq!(operations.map(|operation| stats[operation].calls), expected, "{text}");
        [gathers, reductions]
    });
    let first = of_ranks.into_iter().reduce(|first, other| {
        assert_eq!(first, other);
        first
    });
    first.unwrap()
}

/// A model has an embedding, B blocks of several segments, a final norm and a head. GPT-2's embedding has two segments.
/// The head shares one of these segments, which is reduced with the embedding. At stage 3, each layer is gathered for
/// its forward and again for its backward, except that the head stays gathered, and the embedding's backward reads no
/// parameters.
#[test]
fn a_layers_segments_share_one_collective() {
    let stage_3 = "stage: 3, stage3_param_persistence_threshold: 0, stage3_max_reuse_distance: 0";
    let no_prefetch = &format!("{stage_3}, stage3_prefetch_bucket_size: 0");
    let counts = |collectives, segments| Counts { collectives, segments };
    let (b, m) = (BLOCKS, MICRO_BATCHES);

    let (layers, segments) = (b + 2, 5 * b + 3);
    let reductions = || counts(layers * m, segments * m);
    assert_eq!(counted(gpt2, "stage: 2"), [counts(layers, segments), reductions()]);
    assert_eq!(counted(gpt2, no_prefetch), [counts((2 * b + 4) * m, (10 * b + 5) * m), reductions()]);

    let (layers, segments) = (b + 3, 8 * b + 3);
    let reductions = || counts(layers * m, segments * m);
    assert_eq!(counted(llama, "stage: 2"), [counts(layers, segments), reductions()]);
    let gathers = || counts((2 * b + 4) * m, (16 * b + 4) * m);
    assert_eq!(counted(llama, no_prefetch), [gathers(), reductions()]);
    // Prefetching starts the same gathers earlier.
    for bucket in ["1", "1000000", "100000000"] {
        let zero = format!("{stage_3}, stage3_prefetch_bucket_size: {bucket}");
        assert_eq!(counted(llama, &zero), [gathers(), reductions()], "{bucket}");
    }
}

/// A reduction that sends codes (quantized gradients) has one all-to-all for all segments of a layer, or two if the
/// shard group is divided into near groups. The replicates of a shard then sum the gradients of a layer in one
/// all-reduce, once for all micro-batches.
#[test]
fn a_layers_codes_share_one_all_to_all() {
    let near = "stage: 3, zero_quantized_gradients: true, stage3_param_persistence_threshold: 0, \
                stage3_max_reuse_distance: 0, zero_hpz_partition_size: 2";
    let replicates = "mesh: {data_parallel_replicate_degree: 2}";
    let (b, m) = (BLOCKS, MICRO_BATCHES);
    for (layers, count, segments) in [(gpt2 as fn() -> Layers, b + 2, 5 * b + 3), (llama, b + 3, 8 * b + 3)] {
        let reductions = Counts { collectives: count * m, segments: segments * m };
        for (ranks, zero, more, levels, sums) in [
            (RANKS, "stage: 2, zero_quantized_gradients: true", "", 1, 0),
            (4, near, "", 2, 0),
            (4, "stage: 2, zero_quantized_gradients: true", replicates, 1, count),
        ] {
            let [_, found] = counted_in(ranks, layers, zero, more, |reductions| [0, levels * reductions, sums]);
            assert_eq!(found, reductions, "{zero}, {more}");
        }
    }
}
