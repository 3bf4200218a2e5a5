//! Attention of ranks that share sequences by queries, with gathered and with travelling keys and values: outputs and
//! gradients, joined from the slices of the ranks, compared with the whole score matrix in f64.

use crate::check::{close, floats, normal, plain_attention_within, run, same_bits};
use candle_core::{DType, Device, Result, Tensor, Var};
use zero_comm::{Options, threads};
use zero_ops::{AttentionSpan, Dropout, Pass, SequenceGroup, Sharing, causal_attention_with_dropout};

const PASS: Pass = Pass { training: true, seed: 7, step: 3, sample: 40, layer: 5 };

/// An attention of sequences of `ranks` × 2 chunks.
#[derive(Clone, Copy, Debug)]
struct Case {
    ranks: usize,
    chunk: usize,
    batch: usize,
    /// Query heads, and heads of keys and values.
    heads: [usize; 2],
    size: usize,
    window: Option<usize>,
    /// Length of the documents that are packed into a sequence.
    document: Option<usize>,
}

impl Case {
    fn time(self) -> usize {
        2 * self.ranks * self.chunk
    }

    /// Returns q, k and v.
    fn inputs(self, dtype: DType) -> [Tensor; 3] {
        let Self { batch, heads, size, .. } = self;
        let of = |name, heads| normal(name, &[batch, self.time(), heads, size]).to_dtype(dtype).unwrap();
        [of("q", heads[0]), of("k", heads[1]), of("v", heads[1])]
    }

    fn span(self) -> AttentionSpan {
        let span = self.window.map_or_else(AttentionSpan::default, |window| AttentionSpan::default().window(window));
        let Some(document) = self.document else { return span };
        let positions = (0..self.batch * self.time()).map(|at| (at % self.time() % document) as u32).collect();
        span.position_ids(Tensor::from_vec(positions, (self.batch, self.time()), &Device::Cpu).unwrap())
    }

    /// Returns the first position that a position sees.
    fn first(self, at: usize) -> usize {
        let document = self.document.map_or(0, |document| at / document * document);
        document.max((at + 1).saturating_sub(self.window.unwrap_or(self.time())))
    }

    /// Returns the result and the gradients of the whole score matrix, in f64.
    fn expected(self, dtype: DType) -> Vec<Tensor> {
        let wide = self.inputs(dtype).map(|x| x.to_dtype(DType::F64).unwrap());
        let (y, gradients) = run(&wide, |t| plain_attention_within(&t[0], &t[1], &t[2], |_, at| self.first(at)));
        [y].into_iter().chain(gradients).collect()
    }

    /// Returns the result and the gradients of [`run`] on whole sequences.
    fn alone(self, dtype: DType, dropout: f32) -> Vec<Tensor> {
        let (y, gradients) = run(&self.inputs(dtype), |t| self.attend(&[&t[0], &t[1], &t[2]], dropout));
        [y].into_iter().chain(gradients).collect()
    }

    fn attend(self, [q, k, v]: &[&Tensor; 3], probability: f32) -> Result<Tensor> {
        causal_attention_with_dropout(q, k, v, &self.span(), (&Dropout { probability, name: "here" }, &PASS))
    }

    /// Does the same as [`Case::alone`] on the ranks of a group, and joins their slices.
    fn shared(self, sharing: Sharing, dtype: DType, dropout: f32) -> Vec<Tensor> {
        let rank = |comm| -> Vec<(Vec<std::ops::Range<usize>>, Tensor)> {
            let group = SequenceGroup::new(comm, sharing);
            let vars = self.inputs(dtype).map(|x| Var::from_tensor(&group.slice(&x).unwrap()).unwrap());
            let [q, k, v] = vars.each_ref().map(Var::as_tensor);
            let y = group.within(|| self.attend(&[q, k, v], dropout)).unwrap();
            let whole = [self.batch, self.time(), self.heads[0], self.size];
            let weights = group.slice(&normal("weights of the result", &whole)).unwrap().to_dtype(dtype).unwrap();
            let gradients = (&y * weights).unwrap().sum_all().unwrap().backward().unwrap();
            let of = |x| gradients.get(x).unwrap().clone();
            let positions = group.positions(self.time()).unwrap();
            [y, of(q), of(k), of(v)].into_iter().map(|slice| (positions.clone(), slice)).collect()
        };
        let of_ranks: Vec<Vec<_>> = std::thread::scope(|scope| {
            let comms = threads(self.ranks, &Options::default());
            let started: Vec<_> = comms.into_iter().map(|comm| scope.spawn(|| rank(comm))).collect();
            started.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let join = |which: usize| {
            let mut chunks: Vec<(usize, Tensor)> = vec![];
            for (positions, slice) in of_ranks.iter().map(|slices| &slices[which]) {
                for (chunk, positions) in positions.iter().enumerate() {
                    chunks.push((positions.start, slice.narrow(1, chunk * self.chunk, self.chunk).unwrap()));
                }
            }
            chunks.sort_by_key(|(start, _)| *start);
            Tensor::cat(&chunks.into_iter().map(|(_, chunk)| chunk).collect::<Vec<_>>(), 1).unwrap()
        };
        (0..4).map(join).collect()
    }
}

fn cases() -> Vec<Case> {
    let all = Case { ranks: 2, chunk: 5, batch: 2, heads: [4, 2], size: 6, window: None, document: None };
    let long = Case { chunk: 70, batch: 1, heads: [2, 1], ..all };
    vec![
        all,
        Case { ranks: 3, chunk: 1, ..all },
        Case { ranks: 4, heads: [2, 2], ..all },
        Case { ranks: 5, chunk: 3, window: Some(4), ..all },
        Case { ranks: 3, chunk: 16, document: Some(21), ..all },
        Case { ranks: 4, chunk: 7, window: Some(9), document: Some(23), ..all },
        long,
        Case { ranks: 3, window: Some(100), ..long },
        Case { window: Some(2), ..long },
    ]
}

/// The error of f32 arithmetic, relative to the largest element: 3e-6 for the result and 1e-5 for gradients, as on one
/// rank.
#[test]
fn attention_with_travelling_keys_and_values_is_within_rounding_of_f64() {
    for case in cases() {
        let tolerances = [(DType::F32, [3e-6, 1e-5]), (DType::BF16, [1e-2, 2e-2]), (DType::F16, [2e-3, 4e-3])];
        for (dtype, [of_result, of_gradients]) in tolerances {
            let expected = case.expected(dtype);
            let found = case.shared(Sharing::Ring, dtype, 0.0);
            for (which, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let tolerance = if which == 0 { of_result } else { of_gradients };
                close(&format!("{which} of {case:?}"), found, expected, tolerance);
            }
            // The order of all sums is fixed.
            let again = case.shared(Sharing::Ring, dtype, 0.0);
            found.iter().zip(&again).for_each(|(found, again)| same_bits(&format!("{case:?}"), found, again));
        }
    }
}

#[test]
fn the_same_probabilities_are_dropped_as_on_one_rank() {
    for case in cases() {
        let expected = case.alone(DType::F32, 0.4);
        for (found, expected) in case.shared(Sharing::Ring, DType::F32, 0.4).iter().zip(&expected) {
            close(&format!("{case:?}"), found, expected, 1e-5);
        }
    }
}

#[test]
fn attention_with_gathered_keys_and_values_is_bit_identical_to_one_rank() {
    for case in cases() {
        let (found, expected) = (case.shared(Sharing::Queries, DType::F32, 0.4), case.alone(DType::F32, 0.4));
        same_bits(&format!("{case:?}"), &found[0], &expected[0]);
        assert!(floats(&found[0]).iter().any(|&x| x != 0.0));
    }
}
