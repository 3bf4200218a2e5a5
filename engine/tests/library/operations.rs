//! The number of collectives in a step: one for each layer, whatever its number of segments.

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
    let text = format!(
        "train_micro_batch_size_per_gpu: 1\ngradient_accumulation_steps: {MICRO_BATCHES}\nzero_optimization: {{{zero}}}"
    );
    let ranks = world(RANKS, |comm| {
        let mut engine = engine_of(layers(), comm, &text);
        let before = engine.zero().groups().world().stats();
        engine.train_batch(&batch(0, RANKS * MICRO_BATCHES)).unwrap();
        let stats = engine.zero().groups().world().stats() - before;
        let [mut gathers, mut reductions] = [Counts::default(), Counts::default()];
        for instruction in &engine.program().instructions {
            let (counts, segments) = match instruction {
                Instruction::Gather { segments } | Instruction::Refresh { segments } => (&mut gathers, segments),
                Instruction::Reduce { segments, .. } => (&mut reductions, segments),
                _ => continue,
            };
            counts.collectives += 1;
            counts.segments += segments.len();
        }
        assert_eq!(stats[Operation::AllGather].calls, gathers.collectives as u64, "{zero}");
        assert_eq!(stats[Operation::ReduceScatter].calls, reductions.collectives as u64, "{zero}");
        // One for the gradient norm, and one for the losses.
        assert_eq!(stats[Operation::AllReduce].calls, 2, "{zero}");
        [gathers, reductions]
    });
    let [first, second] = ranks.try_into().unwrap();
    assert_eq!(first, second);
    first
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
