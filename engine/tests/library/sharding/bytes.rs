//! Bytes in memory match the ZeRO paper's formulas, and bytes sent match the plan exactly.

use crate::world;

use candle_core::DType;
use world::{batch, engine_of, world};
use zero_engine::pipeline::{Instruction, ZeroStage};
use zero_engine::{Engine, Kind, Layers, zoo};
use zero_partition::{
    Category, DiskOptions, Layout, OnGpu, Order, ShardedState, StateBytes, Widths, ZeroOptions, expected_payload,
    expected_state, state_formula,
};

/// With a `width` of 256, shards that end at blocks of 1,024 elements differ by less than 1 % from equal shards.
fn model(width: usize, tied: bool) -> Layers {
    zoo::gpt2(&zoo::Gpt2Config {
        vocab_size: 64,
        n_positions: 16,
        n_embd: width,
        n_layer: 2,
        n_head: 4,
        tie_word_embeddings: tied,
        ..zoo::Gpt2Config::default()
    })
}

/// Measurements of one rank after one step.
struct Rank {
    layout: Layout,
    /// Peak bytes.
    held: StateBytes,
    expected: StateBytes,
    sent: u64,
    expected_sent: u64,
    /// Number of elements of all gathers in the program.
    gathered: usize,
}

struct Run {
    zero_stage: u8,
    ranks: usize,
    micro_batches: usize,
    width: usize,
    tied: bool,
    dtype: DType,
    reproducible: bool,
    /// Additional keys of `zero_optimization`.
    zero: &'static str,
}

const PLAIN: Run = Run {
    zero_stage: 0,
    ranks: 2,
    micro_batches: 1,
    width: 256,
    tied: true,
    dtype: DType::F32,
    reproducible: false,
    zero: "stage3_param_persistence_threshold: 0, stage3_max_reuse_distance: 0",
};

/// The configuration section of a dtype. The initial loss scale is 1.
fn section(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bf16: {enabled: true}",
        DType::F16 => "fp16: {enabled: true, initial_scale_power: 0}",
        _ => "",
    }
}

impl Run {
    fn bytes_per_element(&self) -> usize {
        self.dtype.size_in_bytes()
    }

    fn step(&self) -> Vec<Rank> {
        let text = format!(
            "train_micro_batch_size_per_gpu: 1\ngradient_accumulation_steps: {}\n{}\n\
             training: {{reproducible: {}}}\nzero_optimization: {{stage: {}, {}}}",
            self.micro_batches,
            section(self.dtype),
            self.reproducible,
            self.zero_stage,
            self.zero
        );
        world(self.ranks, |comm| {
            let mut engine = engine_of(model(self.width, self.tied), comm, &text);
            let step = engine.train_batch(&batch(0, self.ranks * self.micro_batches)).unwrap();
            let zero = engine.zero();
            let layout = Layout::clone(zero.layout());
            let peak = |category| zero.ledger().peak(category);
            let elements = |i: &Instruction| match i {
                Instruction::Gather { segments } => segments.iter().map(|&id| layout.segments()[id].elements()).sum(),
                _ => 0,
            };
            Rank {
                held: StateBytes {
                    parameters: peak(Category::Parameters),
                    gradients: peak(Category::Gradients),
                    optimizer: peak(Category::OptimizerState),
                },
                expected: expected_state(&layout, zero.stages(), zero.groups().at(), &widths(self.bytes_per_element())),
                sent: step.sent_bytes,
                expected_sent: expected_payload(
                    engine.program(),
                    &layout,
                    (zero.groups().mesh(), zero.groups().at()),
                    self.bytes_per_element(),
                    &options(&engine, self.dtype),
                    |_| 0,
                )
                .total(),
                gathered: engine.program().instructions.iter().map(elements).sum(),
                layout,
            }
        })
    }

    /// Bytes that a step sends in addition to its program: one exact sum for the norm, and the losses.
    fn norm_and_loss(&self, rank: usize) -> u64 {
        let losses = if self.zero_stage >= 2 { self.micro_batches } else { 1 };
        let [norm, losses] =
            [zero_optim::exact_sum::LIMBS, losses].map(|elements| all_reduced(elements, self.ranks, rank));
        (8 * norm + 4 * losses) as u64
    }
}

/// Number of elements that a rank sends in an all-reduce: it sends each part of the vector to the rank that sums the
/// part, and then the sum of its own part to every other rank.
pub(crate) fn all_reduced(elements: usize, ranks: usize, rank: usize) -> usize {
    let own = elements / ranks + usize::from(rank < elements % ranks);
    elements - own + own * (ranks - 1)
}

/// Asserts that the peak bytes of an engine's state are those of the formula, and returns them.
#[track_caller]
pub(crate) fn assert_state(engine: &Engine, what: &str) -> StateBytes {
    let expected = of_formula(engine);
    let held = [Category::Parameters, Category::Gradients, Category::OptimizerState]
        .map(|category| engine.zero().ledger().peak(category));
    assert_eq!(held, [expected.parameters, expected.gradients, expected.optimizer], "{what}");
    expected
}

/// Does the same as [`assert_state`] for the optimizer state only: a reproducible run also holds partial sums of
/// gradients.
#[track_caller]
pub(crate) fn assert_optimizer_state(engine: &Engine, what: &str) -> u64 {
    let expected = of_formula(engine).optimizer;
    assert_eq!(engine.zero().ledger().peak(Category::OptimizerState), expected, "{what}");
    expected
}

fn of_formula(engine: &Engine) -> StateBytes {
    let zero = engine.zero();
    expected_state(zero.layout(), zero.stages(), zero.groups().at(), &zero.widths())
}

/// Returns the number of values of optimizer state that a rank holds.
pub(crate) fn state_values(zero: &ShardedState) -> u64 {
    let ranges = (0..zero.state_names().len()).flat_map(|state| zero.held_ranges(Kind::State(state)));
    ranges.map(|range| range.elements.len() as u64).sum()
}

/// Returns the bytes of each element with AdamW, for a working dtype of `parameter` bytes.
pub(crate) fn widths(parameter: usize) -> Widths {
    let master = if parameter == 4 { 0 } else { 4 };
    Widths { parameter, gradient: 4, master, average: 0, state: 4, states: vec![2], kept: 0, outer: None }
}

/// Options that determine the payload of an engine's program. Gradients travel in the working dtype.
pub(crate) fn options(engine: &Engine, dtype: DType) -> ZeroOptions {
    ZeroOptions {
        clippings: vec![],
        optimizers: vec![zero_optim::Optimizer::AdamW(zero_optim::AdamW::default())],
        average: None,
        outer: None,
        sums_micro_batches: false,
        gradient_dtype: DType::F32,
        state_dtype: DType::F32,
        has_master: true,
        stochastic_rounding: None,
        order: Order::Arrival,
        communication: dtype,
        coded: engine.settings().zero.coded,
        reduce_scatter: engine.config().zero.reduce_scatter,
        decay_all: false,
        ignore_unused: false,
        disk: DiskOptions::default(),
        on_gpu: OnGpu::default(),
    }
}

/// Returns the number of elements that stage 3 gathers in a step if it gathers each layer for each use: in each
/// micro-batch twice, except that the last layer stays gathered from its forward to its backward, and the first layer's
/// backward reads no parameters. A tied parameter is gathered for each layer that uses it.
pub(crate) fn gathered_at_stage_3(layout: &Layout, micro_batches: usize) -> usize {
    let elements = |ids: &[usize]| ids.iter().map(|&id| layout.segments()[id].elements()).sum::<usize>();
    let layers: Vec<usize> = layout.shape().layers.iter().map(|layer| elements(&layer.segments)).collect();
    micro_batches * (2 * layers.iter().sum::<usize>() - layers[0] - layers[layers.len() - 1])
}

#[track_caller]
fn assert_within(found: f64, expected: f64, fraction: f64, what: &str) {
    let off = (found - expected).abs();
    assert!(off <= fraction * expected, "{what}: {found} is {:.2} % off {expected}", 100.0 * off / expected);
}

#[test]
fn state_matches_the_formula() {
    for ranks in [1, 2, 4] {
        for zero_stage in 0..=3 {
            for micro_batches in if ranks == 2 { 1..=3 } else { 1..=1 } {
                let run = Run { zero_stage, ranks, micro_batches, ..PLAIN };
                for (rank, measured) in run.step().into_iter().enumerate() {
                    let what = format!("stage {zero_stage}, rank {rank} of {ranks}, {micro_batches} micro-batches");
                    assert_eq!(measured.held, measured.expected, "{what}");
                    let stage = ZeroStage::from_number(zero_stage).unwrap();
                    let formula = state_formula(stage, measured.layout.elements(), ranks);
                    assert_within(measured.held.total() as f64, formula, 0.01, &what);
                }
            }
        }
    }
}

/// In bf16 and f16: 2 bytes of working parameters per element, 4 bytes of master parameters and 8 bytes of Adam state
/// for each element that a rank updates. Gradients accumulate in f32.
#[test]
fn state_in_16_bits_matches_the_formula() {
    for (ranks, dtype) in [(1, DType::BF16), (2, DType::BF16), (4, DType::BF16), (2, DType::F16)] {
        for zero_stage in 0..=3 {
            let run = Run { zero_stage, ranks, dtype, ..PLAIN };
            for (rank, measured) in run.step().into_iter().enumerate() {
                let what = format!("stage {zero_stage}, rank {rank} of {ranks}");
                assert_eq!(measured.held, measured.expected, "{what}");
                let (psi, n) = (measured.layout.elements() as f64, ranks as f64);
                let formula = match zero_stage {
                    0 => 18.0 * psi,
                    1 => 6.0 * psi + 12.0 * psi / n,
                    2 => 2.0 * psi + 16.0 * psi / n,
                    _ => 18.0 * psi / n,
                };
                assert_within(measured.held.total() as f64, formula, 0.01, &what);
            }
        }
    }
}

/// A binary tree over four micro-batches holds two partial sums; accumulation in order of arrival holds one.
#[test]
fn reproducible_sums_hold_one_buffer_per_tree_level() {
    for zero_stage in 0..=3 {
        let run = Run { zero_stage, micro_batches: 4, reproducible: true, width: 32, ..PLAIN };
        for Rank { held, expected, .. } in run.step() {
            assert_eq!(held, StateBytes { gradients: 2 * expected.gradients, ..expected }, "stage {zero_stage}");
        }
    }
}

#[test]
fn sent_bytes_match_the_plan() {
    let settings = [
        PLAIN.zero,
        "stage3_param_persistence_threshold: 100",
        "reduce_scatter: false",
        "reduce_bucket_size: 20000, allgather_bucket_size: 20000, overlap_comm: true",
        "stage3_max_reuse_distance: 1000000000",
    ];
    for zero in settings {
        for zero_stage in 0..=3 {
            for (ranks, micro_batches) in [(1, 2), (2, 1), (3, 2)] {
                for dtype in [DType::F32, DType::BF16, DType::F16] {
                    let run = Run { zero_stage, ranks, micro_batches, dtype, zero, width: 32, ..PLAIN };
                    for (rank, measured) in run.step().into_iter().enumerate() {
                        assert_eq!(
                            measured.sent,
                            measured.expected_sent + run.norm_and_loss(rank),
                            "{zero}: stage {zero_stage}, rank {rank} of {ranks}, {micro_batches} micro-batches"
                        );
                    }
                }
            }
        }
    }
}

/// In the sum over all ranks, uneven shards do not matter: with N ranks, each element of a reduction or gather is sent
/// N − 1 times.
#[test]
fn sent_bytes_match_the_closed_form() {
    for ranks in [2, 4] {
        for micro_batches in [1, 2] {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                for zero_stage in 0..=3 {
                    let run = Run { zero_stage, ranks, micro_batches, dtype, ..PLAIN };
                    let all = run.step();
                    let sent: u64 = all.iter().map(|rank| rank.expected_sent).sum();
                    let (psi, m, b) = (all[0].layout.elements(), micro_batches, run.bytes_per_element());
                    let elements = match zero_stage {
                        0 | 1 => 2 * psi,   // reduced once and gathered once
                        2 => (m + 1) * psi, // reduced once per micro-batch, gathered once
                        _ => m * psi + all[0].gathered,
                    };
                    assert_eq!(sent, ((ranks - 1) * elements * b) as u64, "stage {zero_stage} on {ranks} ranks");
                    let rule = if zero_stage == 3 { 3 * m * psi } else { elements };
                    for rank in all {
                        let share = ((ranks - 1) * rule * b) as f64 / ranks as f64;
                        assert_within(rank.sent as f64, share, 0.01, &format!("stage {zero_stage} on {ranks} ranks"));
                    }
                }
            }
        }
    }
}

#[test]
fn gathers_of_stage_3_match_the_closed_form() {
    for tied in [false, true] {
        for micro_batches in [1, 2, 3] {
            let run = Run { zero_stage: 3, micro_batches, tied, width: 32, ..PLAIN };
            let rank = run.step().remove(0);
            let expected = gathered_at_stage_3(&rank.layout, micro_batches);
            assert_eq!(rank.gathered, expected, "tied: {tied}, {micro_batches} micro-batches");
        }
    }
}
