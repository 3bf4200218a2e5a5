//! Layers whose parameters are split among the ranks of a tensor group: results and gradients, joined from the ranks,
//! compared with the whole computation in f64.

use crate::check::{close, floats, ids, normal, plain_attention_within, run, same_bits, tanh_gelu};
use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::{Module, VarBuilder};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use zero_comm::{Communicator, Options, threads};
use zero_ops::graph::{backward_from, fused_block, reshape, sum};
use zero_ops::sink::{Gradients, promise};
use zero_ops::{
    Conv1D, Embedding, Linear, SequenceGroup, Sharing, VocabParallel, causal_attention, columns, gelu, own_heads,
    whole_rows, whole_sequences, with_cuts,
};

const TIME: usize = 12;
const WIDTH: usize = 24;
const INNER: usize = 32;
/// Query heads, and heads of keys and values.
const HEADS: [usize; 2] = [8, 4];
const SIZE: usize = 6;
const QUERIES: usize = HEADS[0] * SIZE;
const KEYS: usize = HEADS[1] * SIZE;
const Z_LOSS: f32 = 0.03;
/// Groups of labels whose log-probabilities are summed.
const GROUPS: usize = 3;

/// A parameter of a layer.
struct Parameter {
    name: &'static str,
    shape: &'static [usize],
    /// The dimension that the ranks split, and its parts, each of which they split; `None` if every rank has the whole
    /// parameter.
    split: Option<(usize, &'static [usize])>,
}

impl Parameter {
    const fn whole(name: &'static str, shape: &'static [usize]) -> Self {
        Self { name, shape, split: None }
    }

    const fn split(name: &'static str, shape: &'static [usize], along: usize, parts: &'static [usize]) -> Self {
        Self { name, shape, split: Some((along, parts)) }
    }

    fn values(&self, dtype: DType) -> Tensor {
        (normal(self.name, self.shape) * 0.2).unwrap().to_dtype(dtype).unwrap()
    }

    /// Returns the dimension that is split, and a rank's ranges of it, one in each part.
    fn ranges(&self, (rank, ranks): (usize, usize)) -> Option<(usize, Vec<Range<usize>>)> {
        let (along, parts) = self.split?;
        let mut start = 0;
        let range = |&part: &usize| {
            let (first, share) = (start, part.div_ceil(ranks));
            start += part;
            first + (rank * share).min(part)..first + ((rank + 1) * share).min(part)
        };
        Some((along, parts.iter().map(range).collect()))
    }

    /// Returns the values of a rank. Padding is not 0, so that a layer that reads it gives wrong results.
    fn own(&self, (rank, ranks): (usize, usize), dtype: DType) -> Tensor {
        let whole = self.values(dtype);
        let Some((along, ranges)) = self.ranges((rank, ranks)) else { return whole };
        let (_, first) = self.ranges((0, ranks)).unwrap();
        let mut padded = self.shape.to_vec();
        padded[along] = first.iter().zip(&ranges).map(|(first, own)| first.len() - own.len()).sum();
        let padding = Tensor::full(7f32, padded, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        let mut pieces: Vec<Tensor> =
            ranges.iter().map(|range| whole.narrow(along, range.start, range.len()).unwrap()).collect();
        pieces.push(padding);
        pieces.retain(|piece| piece.elem_count() > 0);
        Tensor::cat(&pieces, along).unwrap()
    }

    /// Joins the gradients of all ranks, or adds them if every rank has the whole parameter.
    fn joined(&self, of_ranks: &[Tensor]) -> Tensor {
        let wide = |x: &Tensor| x.to_dtype(DType::F64).unwrap();
        let Some((along, _)) = self.split else {
            return of_ranks.iter().map(wide).reduce(|a, b| (a + b).unwrap()).unwrap();
        };
        let mut pieces = vec![];
        for (rank, gradient) in of_ranks.iter().enumerate() {
            let mut first = 0;
            for range in self.ranges((rank, of_ranks.len())).unwrap().1 {
                pieces.push((range.start, gradient.narrow(along, first, range.len()).unwrap()));
                first += range.len();
            }
            let padding = gradient.narrow(along, first, gradient.dim(along).unwrap() - first).unwrap();
            assert!(floats(&padding).iter().all(|&x| x == 0.0), "the gradient of the padding of {}", self.name);
        }
        pieces.retain(|(_, piece)| piece.elem_count() > 0);
        pieces.sort_by_key(|(start, _)| *start);
        Tensor::cat(&pieces.into_iter().map(|(_, piece)| wide(&piece)).collect::<Vec<_>>(), along).unwrap()
    }
}

type Layer = Box<dyn Fn(&Tensor) -> Result<Tensor>>;

/// A layer of a rank, and the same layer with candle's operations on x and the whole parameters.
struct Case {
    name: &'static str,
    parameters: Vec<Parameter>,
    layer: fn(&VarBuilder, usize) -> Result<Layer>,
    plain: fn(&[Tensor]) -> Result<Tensor>,
}

fn cases() -> Vec<Case> {
    let linear = || {
        vec![
            Parameter::split("up.weight", &[INNER, WIDTH], 0, &[INNER]),
            Parameter::split("up.bias", &[INNER], 0, &[INNER]),
            Parameter::split("down.weight", &[WIDTH, INNER], 1, &[INNER]),
            Parameter::whole("down.bias", &[WIDTH]),
        ]
    };
    let attention = vec![
        Parameter::split("qkv.weight", &[QUERIES + 2 * KEYS, WIDTH], 0, &[QUERIES, KEYS, KEYS]),
        Parameter::split("qkv.bias", &[QUERIES + 2 * KEYS], 0, &[QUERIES, KEYS, KEYS]),
        Parameter::split("out.weight", &[WIDTH, QUERIES], 1, &[QUERIES]),
        Parameter::whole("out.bias", &[WIDTH]),
    ];
    let convolutions = vec![
        Parameter::split("up.weight", &[WIDTH, INNER], 1, &[INNER]),
        Parameter::split("up.bias", &[INNER], 0, &[INNER]),
        Parameter::split("down.weight", &[INNER, WIDTH], 0, &[INNER]),
        Parameter::whole("down.bias", &[WIDTH]),
    ];
    // With 61 entries, the last rank has fewer than the others. With 5 entries, the last of 4 ranks has none.
    let table = |entries: &'static [usize], shape| vec![Parameter::split("weight", shape, 0, entries)];
    let (many, few) = (|| table(&[61], &[61, WIDTH]), || table(&[5], &[5, WIDTH]));
    vec![
        Case { name: "rows", parameters: linear(), layer: mlp_of_rows, plain: plain_mlp },
        Case { name: "sequences", parameters: linear(), layer: mlp_of_sequences, plain: plain_mlp },
        Case { name: "convolutions", parameters: convolutions, layer: convolution, plain: plain_convolution },
        Case { name: "attention", parameters: attention, layer: self::attention, plain: plain_attention },
        Case { name: "embedding", parameters: many(), layer: embedding::<61>, plain: plain_embedding::<61> },
        Case { name: "small embedding", parameters: few(), layer: embedding::<5>, plain: plain_embedding::<5> },
        Case { name: "loss", parameters: many(), layer: loss::<61>, plain: plain_loss::<61> },
        Case { name: "small loss", parameters: few(), layer: loss::<5>, plain: plain_loss::<5> },
        Case { name: "log-probabilities", parameters: many(), layer: log_probs::<61>, plain: plain_log_probs::<61> },
    ]
}

fn mlp_of_rows(vb: &VarBuilder, _: usize) -> Result<Layer> {
    let (up, down) = linear_maps(vb)?;
    Ok(Box::new(move |x| fused_block(x, |x| sum(x, &whole_rows(x, |x| down.forward(&gelu(&up.forward(x)?)?))?))))
}

fn mlp_of_sequences(vb: &VarBuilder, _: usize) -> Result<Layer> {
    let (up, down) = linear_maps(vb)?;
    Ok(Box::new(move |x| fused_block(x, |x| sum(x, &whole_sequences(x, |x| down.forward(&gelu(&up.forward(x)?)?))?))))
}

fn linear_maps(vb: &VarBuilder) -> Result<(Linear, zero_ops::RowParallel<Linear>)> {
    let up = Linear::column_parallel(WIDTH, &[INNER], true, 0.1, vb.pp("up"))?;
    Ok((up, Linear::row_parallel(INNER, WIDTH, true, 0.1, vb.pp("down"))?))
}

fn plain_mlp(t: &[Tensor]) -> Result<Tensor> {
    let inner = tanh_gelu(&t[0].broadcast_matmul(&t[1].t()?)?.broadcast_add(&t[2])?)?;
    &t[0] + inner.broadcast_matmul(&t[3].t()?)?.broadcast_add(&t[4])?
}

fn convolution(vb: &VarBuilder, _: usize) -> Result<Layer> {
    let up = Conv1D::column_parallel(WIDTH, &[INNER], 0.1, vb.pp("up"))?;
    let down = Conv1D::row_parallel(INNER, WIDTH, 0.1, vb.pp("down"))?;
    Ok(Box::new(move |x| fused_block(x, |x| whole_rows(x, |x| down.sum(&up.forward_gelu_then(x, down.map())?)))))
}

fn plain_convolution(t: &[Tensor]) -> Result<Tensor> {
    let inner = tanh_gelu(&t[0].broadcast_matmul(&t[1])?.broadcast_add(&t[2])?)?;
    inner.broadcast_matmul(&t[3])?.broadcast_add(&t[4])
}

fn attention(vb: &VarBuilder, _: usize) -> Result<Layer> {
    let qkv = Linear::column_parallel(WIDTH, &[QUERIES, KEYS, KEYS], true, 0.1, vb.pp("qkv"))?;
    let out = Linear::row_parallel(QUERIES, WIDTH, true, 0.1, vb.pp("out"))?;
    let [heads, kv_heads] = [own_heads("test", HEADS[0])?, own_heads("test", HEADS[1])?];
    let attend = move |x: &Tensor| {
        let (batch, time, _) = x.dims3()?;
        let qkv = qkv.forward(x)?;
        let heads_of = |first: usize, heads: usize| {
            reshape(&columns(&qkv, first * SIZE..(first + heads) * SIZE)?, (batch, time, heads, SIZE))
        };
        let (q, k, v) = (heads_of(0, heads)?, heads_of(heads, kv_heads)?, heads_of(heads + kv_heads, kv_heads)?);
        out.forward(&reshape(&causal_attention(&q, &k, &v)?, (batch, time, heads * SIZE))?)
    };
    Ok(Box::new(move |x| fused_block(x, |x| sum(x, &whole_sequences(x, &attend)?))))
}

fn plain_attention(t: &[Tensor]) -> Result<Tensor> {
    let (batch, time, _) = t[0].dims3()?;
    let qkv = t[0].broadcast_matmul(&t[1].t()?)?.broadcast_add(&t[2])?;
    let heads_of = |first: usize, heads: usize| qkv.narrow(2, first, heads * SIZE)?.reshape((batch, time, heads, SIZE));
    let (q, k, v) = (heads_of(0, HEADS[0])?, heads_of(QUERIES, HEADS[1])?, heads_of(QUERIES + KEYS, HEADS[1])?);
    let attended = plain_attention_within(&q, &k, &v, |_, _| 0)?.reshape((batch, time, QUERIES))?;
    &t[0] + attended.broadcast_matmul(&t[3].t()?)?.broadcast_add(&t[4])?
}

fn indices(batch: usize, entries: usize) -> Tensor {
    ids("indices", &[batch, TIME], entries as u32)
}

fn embedding<const ENTRIES: usize>(vb: &VarBuilder, batch: usize) -> Result<Layer> {
    let table = Embedding::vocab_parallel(ENTRIES, WIDTH, 0.1, vb.clone())?;
    Ok(Box::new(move |x| fused_block(x, |x| sum(x, &table.forward(&indices(batch, ENTRIES))?))))
}

fn plain_embedding<const ENTRIES: usize>(t: &[Tensor]) -> Result<Tensor> {
    let ids = indices(t[0].dim(0)?, ENTRIES).flatten_all()?;
    &t[0] + t[1].index_select(&ids, 0)?.reshape(t[0].dims())?
}

/// Returns the gradient that a loss will receive. A loss needs it in the forward, which already computes the gradients.
fn gradient_of_loss() -> f32 {
    floats(&normal("weights of the result", &[]))[0]
}

fn loss<const CLASSES: usize>(vb: &VarBuilder, batch: usize) -> Result<Layer> {
    let head = VocabParallel::new(WIDTH, CLASSES, 0.1, vb)?;
    Ok(Box::new(move |x| Ok(head.cross_entropy(x, &indices(batch, CLASSES), (gradient_of_loss(), Z_LOSS))?.0)))
}

fn plain_loss<const CLASSES: usize>(t: &[Tensor]) -> Result<Tensor> {
    let logits = t[0].broadcast_matmul(&t[1].t()?)?;
    let ln_z = logits.log_sum_exp(D::Minus1)?;
    let of_targets = logits.gather(&indices(t[0].dim(0)?, CLASSES).unsqueeze(2)?, 2)?.squeeze(2)?;
    ((&ln_z - of_targets)? + (ln_z.sqr()? * f64::from(Z_LOSS))?)?.mean_all()
}

fn groups(batch: usize) -> Tensor {
    ids("groups", &[batch, TIME], GROUPS as u32)
}

fn log_probs<const CLASSES: usize>(vb: &VarBuilder, batch: usize) -> Result<Layer> {
    let head = VocabParallel::new(WIDTH, CLASSES, 0.1, vb)?;
    let of_group = groups(batch).to_dtype(DType::U8)?;
    Ok(Box::new(move |x| head.log_probs(x, &indices(batch, CLASSES), &of_group, GROUPS)))
}

fn plain_log_probs<const CLASSES: usize>(t: &[Tensor]) -> Result<Tensor> {
    let (batch, _, _) = t[0].dims3()?;
    let log_p = candle_nn::ops::log_softmax(&t[0].broadcast_matmul(&t[1].t()?)?, D::Minus1)?;
    let of_labels = log_p.gather(&indices(batch, CLASSES).unsqueeze(2)?, 2)?.squeeze(2)?;
    let of = |group: usize| (&of_labels * groups(batch).eq(group as u32)?.to_dtype(of_labels.dtype())?)?.sum(1);
    Tensor::stack(&(0..GROUPS).map(of).collect::<Result<Vec<_>>>()?, 1)
}

/// A rank's result, the gradient of its slice of x, and the gradients of its parameters.
type Outcome = (Tensor, Tensor, Vec<Tensor>);

impl Case {
    fn x(batch: usize, dtype: DType) -> Tensor {
        normal("x", &[batch, TIME, WIDTH]).to_dtype(dtype).unwrap()
    }

    /// Returns the result of the whole layer and its gradients, in f64.
    fn expected(&self, batch: usize, dtype: DType) -> Vec<Tensor> {
        let parameters = self.parameters.iter().map(|parameter| parameter.values(dtype));
        let inputs = std::iter::once(Self::x(batch, dtype)).chain(parameters);
        let wide: Vec<Tensor> = inputs.map(|x| x.to_dtype(DType::F64).unwrap()).collect();
        let (y, gradients) = run(&wide, self.plain);
        std::iter::once(y).chain(gradients).collect()
    }

    /// Runs the layer on a rank. With a sink, the layer is one node of candle's graph, as in training.
    fn on_rank(&self, batch: usize, dtype: DType, comm: Arc<dyn Communicator>, has_sink: bool) -> Result<Outcome> {
        let place = (comm.rank(), comm.size());
        let group = SequenceGroup::new(comm, Sharing::Layers);
        let leaf = |x: &Tensor| Ok::<_, candle_core::Error>(Var::from_tensor(x)?.as_tensor().clone());
        let own = self.parameters.iter().map(|parameter| leaf(&parameter.own(place, dtype)));
        let parameters: Vec<Tensor> = own.collect::<Result<_>>()?;
        let names = self.parameters.iter().map(|parameter| parameter.name.to_string());
        let named: HashMap<String, Tensor> = names.zip(parameters.iter().cloned()).collect();
        let vb = VarBuilder::from_tensors(named, dtype, &Device::Cpu);
        let layer = with_cuts(place, || (self.layer)(&vb, batch))?;
        let x = leaf(&group.slice(&Self::x(batch, dtype))?)?;
        let differentiated = || {
            let y = group.within(|| layer(&x))?;
            let weights = match y.dims() {
                // All ranks have this rank's result.
                &[] | &[_, _] => normal("weights of the result", y.dims()),
                dims => group.slice(&normal("weights of the result", &[dims[0], TIME, dims[2]]))?,
            };
            let store = backward_from(&[(y.clone(), weights.to_dtype(y.dtype())?)])?;
            Ok::<_, candle_core::Error>((y, store))
        };
        if !has_sink {
            let (y, store) = differentiated()?;
            let of = |x: &Tensor| store.get(x).expect("a gradient").clone();
            return Ok((y, of(&x), parameters.iter().map(of).collect()));
        }
        let (mut places, mut end) = (vec![], 0);
        for parameter in &parameters {
            places.push((parameter.id(), end..end + parameter.elem_count(), false));
            end += parameter.elem_count();
        }
        let mut sink = Gradients::default();
        sink.add_buffer(vec![f32::NAN; end], places.clone());
        let (sink, outcome) = sink.capture(|| promise(differentiated));
        let ((y, store), buffer) = (outcome?, sink.into_buffers().remove(0));
        let of_places = parameters.iter().zip(places);
        let gradients = of_places
            .map(|(parameter, (_, place, _))| Tensor::from_slice(&buffer[place], parameter.shape(), &Device::Cpu));
        Ok((y, store.get(&x).expect("a gradient of x").clone(), gradients.collect::<Result<_>>()?))
    }

    /// Joins the results and the gradients of all ranks.
    fn found(&self, ranks: usize, batch: usize, dtype: DType, has_sink: bool) -> Vec<Tensor> {
        let of_ranks: Vec<Outcome> = std::thread::scope(|scope| {
            let start = |comm| scope.spawn(|| self.on_rank(batch, dtype, comm, has_sink).unwrap());
            let started: Vec<_> = threads(ranks, &Options::default()).into_iter().map(start).collect();
            started.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let slices =
            |of: fn(&Outcome) -> &Tensor| Tensor::cat(&of_ranks.iter().map(of).collect::<Vec<_>>(), 1).unwrap();
        let y = match of_ranks[0].0.rank() {
            3 => slices(|outcome| &outcome.0),
            _ => {
                of_ranks.iter().for_each(|(y, ..)| same_bits(self.name, y, &of_ranks[0].0));
                of_ranks[0].0.clone()
            }
        };
        let gradients = self.parameters.iter().enumerate().map(|(index, parameter)| {
            let of_ranks: Vec<Tensor> = of_ranks.iter().map(|(_, _, gradients)| gradients[index].clone()).collect();
            parameter.joined(&of_ranks)
        });
        [y, slices(|outcome| &outcome.1)].into_iter().chain(gradients).collect()
    }
}

/// The error of f32 arithmetic, relative to the largest element: 1e-6 for the result and 2e-6 for gradients. In bf16,
/// each rank rounds its part of a sum, and the sum is rounded again.
#[test]
fn split_layers_are_within_rounding_of_f64() {
    let tolerances = [(DType::F32, [1e-6, 2e-6]), (DType::BF16, [1e-2, 2e-2])];
    for case in cases() {
        for (dtype, [of_result, of_gradients]) in tolerances {
            for batch in [1, 3] {
                let expected = case.expected(batch, dtype);
                for (ranks, has_sink) in [(2, false), (2, true), (4, false), (4, true)] {
                    let found = case.found(ranks, batch, dtype, has_sink);
                    assert_eq!(found.len(), expected.len());
                    for (which, (found, expected)) in found.iter().zip(&expected).enumerate() {
                        let what = format!("{which} of {}, {dtype:?}, {ranks} ranks, sink: {has_sink}", case.name);
                        let tolerance = if which == 0 { of_result } else { of_gradients };
                        close(&what, found, expected, tolerance);
                    }
                }
            }
        }
    }
}
