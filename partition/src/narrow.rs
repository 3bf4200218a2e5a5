//! Runs optimizer steps on several threads, on values in f32 or bf16 and on 8-bit states. Each step computes in f32 and
//! rounds its results once.

use std::ops::Range;

use half::bf16;
use zero_model::ParameterId;
use zero_model::ops::{Cut, Run, in_parallel};
use zero_model::random::Stream;
use zero_optim::{
    EIGHT_BIT_BLOCK, EightBit, LengthError, Optimizer, Step, Stored, read_half, update_restored, write_bf16_at_random,
};

use crate::error::ZeroError;
use crate::grad_buffer::Grads;
use crate::threads::share;

/// Number of elements to widen at a time for types without a specialized loop: parameters with stochastic rounding, and
/// 8-bit states. Gradients in bf16 are widened two chunks at a time. A chunk stays in the L1 cache and consists of
/// whole blocks of 8-bit states.
const CHUNK: usize = 1024;

/// Values that an update reads and writes.
pub enum Values<'a> {
    /// In f32.
    F32(&'a mut [f32]),
    /// In bf16.
    Bf16(&'a mut [bf16]),
    /// Optimizer states in 8 bits: the indices, and the largest absolute value of each block.
    EightBit(EightBit, &'a mut [u8], &'a mut [f32]),
}

impl<'a> Values<'a> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::EightBit(_, indices, _) => indices.len(),
        }
    }

    /// Returns the values if they are f32.
    pub(crate) fn f32(self) -> Result<&'a mut [f32], ZeroError> {
        match self {
            Self::F32(values) => Ok(values),
            Self::Bf16(_) | Self::EightBit(..) => Err(ZeroError::internal("this update needs values in f32")),
        }
    }

    /// Borrows the values for a shorter time.
    pub(crate) fn reborrow(&mut self) -> Values<'_> {
        match self {
            Self::F32(values) => Values::F32(values),
            Self::Bf16(values) => Values::Bf16(values),
            Self::EightBit(of, indices, largest) => Values::EightBit(*of, indices, largest),
        }
    }

    /// Borrows a range of the values. A range of 8-bit states must consist of whole blocks.
    pub(crate) fn part(&mut self, range: Range<usize>) -> Values<'_> {
        match self {
            Self::F32(values) => Values::F32(&mut values[range]),
            Self::Bf16(values) => Values::Bf16(&mut values[range]),
            Self::EightBit(of, indices, largest) => {
                Values::EightBit(*of, &mut indices[range.clone()], &mut largest[blocks(&range)])
            }
        }
    }

    /// Cuts the values into parts of `size`, a multiple of a block; the last may be shorter.
    fn parts(self, size: usize) -> Vec<Self> {
        match self {
            Self::F32(values) => values.chunks_mut(size).map(Self::F32).collect(),
            Self::Bf16(values) => values.chunks_mut(size).map(Self::Bf16).collect(),
            Self::EightBit(of, indices, largest) => {
                let largest = largest.chunks_mut(size / EIGHT_BIT_BLOCK);
                indices
                    .chunks_mut(size)
                    .zip(largest)
                    .map(|(indices, of_blocks)| Self::EightBit(of, indices, of_blocks))
                    .collect()
            }
        }
    }
}

/// Returns the blocks of a range of elements. The range must begin at a block boundary.
pub(crate) fn blocks(range: &Range<usize>) -> Range<usize> {
    range.start / EIGHT_BIT_BLOCK..range.end.div_ceil(EIGHT_BIT_BLOCK)
}

/// Random rounding of a parameter's elements to bf16: up or down, with the probability that makes the mean exact.
#[derive(Debug, Clone, Copy)]
pub struct Stochastic<'a> {
    stream: Stream,
    /// Index of the first element in its parameter. In a step, an element's random number depends only on its index in
    /// the whole parameter.
    first: usize,
    /// How the parameter is cut, if this rank has only a part of it.
    cut: Option<&'a Cut>,
}

impl<'a> Stochastic<'a> {
    /// Prepares the rounding of elements starting at `first`, in an optimizer step. With a cut, indices count the
    /// elements of this rank's part.
    #[must_use]
    pub fn new(seed: u64, parameter: ParameterId, step: u64, first: usize, cut: Option<&'a Cut>) -> Self {
        Self { stream: Stream::new(seed, "rounding", step << 24 ^ parameter as u64), first, cut }
    }

    /// Rounds at most [`CHUNK`] elements starting at `from`.
    fn round(&self, from: usize, values: &[f32], rounded: &mut [bf16]) -> Result<(), LengthError> {
        let random = &mut [0; CHUNK][..values.len()];
        let first = self.first + from;
        match self.cut {
            None => self.stream.fill_bits(first as u64, random),
            // The padding behind the part is zero, whatever its random numbers are.
            Some(cut) => cut.runs(first..first + values.len()).into_iter().for_each(|Run { local, whole }| {
                self.stream.fill_bits(whole as u64, &mut random[local.start - first..local.end - first]);
            }),
        }
        write_bf16_at_random(values, random, rounded)
    }
}

/// Runs [`zero_optim::update`] on several threads. Parameters in bf16 are rounded to nearest, or at random. All states
/// have the same type.
///
/// # Errors
/// Fails if the lengths of the slices or the number of states are wrong. In that case it has written nothing.
pub fn update(
    optimizer: &Optimizer,
    step: &Step,
    mut params: Values<'_>,
    grads: Grads<'_>,
    mut states: Vec<Values<'_>>,
    stochastic: Option<Stochastic<'_>>,
) -> Result<(), LengthError> {
    let (elements, size) = (params.len(), share(params.len()));
    let fits = grads.len() == elements && states.iter().all(|state| state.len() == elements);
    if !fits {
        let mut lengths = std::iter::once(grads.len()).chain(states.iter().map(Values::len));
        let found = lengths.find(|&len| len != elements).unwrap_or(elements);
        return Err(LengthError { what: "gradients or states", expected: elements, found });
    }
    if elements <= size {
        return update_part(optimizer, step, &mut params, grads, &mut states, stochastic.map(|it| (it, 0)));
    }
    let mut states: Vec<_> = states.into_iter().map(|state| state.parts(size).into_iter()).collect();
    let parts = params.parts(size).into_iter().zip(grads.parts(size)).enumerate();
    let mut parts: Vec<_> = parts
        .map(|(part, (params, grads))| {
            let states: Vec<Values<'_>> = states.iter_mut().filter_map(Iterator::next).collect();
            (part * size, params, grads, states, Ok(()))
        })
        .collect();
    in_parallel(&mut parts, |(from, params, grads, states, result)| {
        *result = update_part(optimizer, step, params, *grads, states, stochastic.map(|it| (it, *from)));
    });
    parts.into_iter().try_for_each(|(.., result)| result)
}

fn update_part(
    optimizer: &Optimizer,
    step: &Step,
    params: &mut Values<'_>,
    grads: Grads<'_>,
    states: &mut [Values<'_>],
    stochastic: Option<(Stochastic<'_>, usize)>,
) -> Result<(), LengthError> {
    let grads = match grads {
        Grads::F32(grads) => return update_from_f32(optimizer, step, params, grads, states, stochastic),
        Grads::Bf16(grads) => grads,
    };
    let mut wide = [0.0; 2 * CHUNK];
    for (part, grads) in grads.chunks(wide.len()).enumerate() {
        let range = part * wide.len()..part * wide.len() + grads.len();
        let wide = &mut wide[..grads.len()];
        read_half(grads, wide)?;
        let mut states: Vec<_> = states.iter_mut().map(|state| state.part(range.clone())).collect();
        let stochastic = stochastic.map(|(stochastic, from)| (stochastic, from + range.start));
        update_from_f32(optimizer, step, &mut params.part(range), wide, &mut states, stochastic)?;
    }
    Ok(())
}

fn update_from_f32(
    optimizer: &Optimizer,
    step: &Step,
    params: &mut Values<'_>,
    grads: &[f32],
    states: &mut [Values<'_>],
    stochastic: Option<(Stochastic<'_>, usize)>,
) -> Result<(), LengthError> {
    match (params, stochastic) {
        (Values::F32(params), _) => update_states(optimizer, step, params, grads, states),
        (Values::Bf16(params), None) => update_states(optimizer, step, params, grads, states),
        (Values::EightBit(..), _) => {
            Err(LengthError { what: "parameters in f32 or bf16", expected: grads.len(), found: 0 })
        }
        (Values::Bf16(params), Some((stochastic, from))) => {
            let mut wide = [0.0; CHUNK];
            for start in (0..grads.len()).step_by(CHUNK) {
                let range = start..(start + CHUNK).min(grads.len());
                let wide = &mut wide[..range.len()];
                let params = &mut params[range.clone()];
                let mut states: Vec<_> = states.iter_mut().map(|state| state.part(range.clone())).collect();
                read_half(params, wide)?;
                update_states(optimizer, step, wide, &grads[range], &mut states)?;
                stochastic.round(from + start, wide, params)?;
            }
            Ok(())
        }
    }
}

/// Runs an update whose states all have the same type.
fn update_states<P: Stored>(
    optimizer: &Optimizer,
    step: &Step,
    params: &mut [P],
    grads: &[f32],
    states: &mut [Values<'_>],
) -> Result<(), LengthError> {
    let (mut wide, mut narrow, mut eight) = (vec![], vec![], vec![]);
    for state in states {
        match state {
            Values::F32(state) => wide.push(&mut **state),
            Values::Bf16(state) => narrow.push(&mut **state),
            Values::EightBit(of, indices, largest) => eight.push((*of, &mut **indices, &mut **largest)),
        }
    }
    if !eight.is_empty() {
        return update_eight_bit(optimizer, step, params, grads, &mut eight);
    }
    match narrow.is_empty() {
        true => zero_optim::update(optimizer, step, params, grads, &mut wide),
        false => zero_optim::update(optimizer, step, params, grads, &mut narrow),
    }
}

/// Dequantizes 8-bit states chunk by chunk, runs the update, and quantizes them again.
fn update_eight_bit<P: Stored>(
    optimizer: &Optimizer,
    step: &Step,
    params: &mut [P],
    grads: &[f32],
    states: &mut [(EightBit, &mut [u8], &mut [f32])],
) -> Result<(), LengthError> {
    let different = |what, found| Err(LengthError { what, expected: params.len(), found });
    if grads.len() != params.len() {
        return different("grads", grads.len());
    }
    for (_, indices, largest) in &*states {
        if indices.len() != params.len() {
            return different("indices", indices.len());
        }
        let (expected, found) = (indices.len().div_ceil(EIGHT_BIT_BLOCK), largest.len());
        if found != expected {
            return Err(LengthError { what: "largest", expected, found });
        }
    }
    let mut wide = vec![[0.0; CHUNK]; states.len()];
    let mut start = 0;
    for (params, grads) in params.chunks_mut(CHUNK).zip(grads.chunks(CHUNK)) {
        let range = start..start + grads.len();
        start = range.end;
        for (wide, (of, indices, largest)) in wide.iter_mut().zip(&*states) {
            of.dequantize(&indices[range.clone()], &largest[blocks(&range)], &mut wide[..range.len()])?;
        }
        let mut slices: Vec<&mut [f32]> = wide.iter_mut().map(|wide| &mut wide[..range.len()]).collect();
        update_restored(optimizer, step, params, grads, &mut slices)?;
        for (wide, (of, indices, largest)) in wide.iter().zip(&mut *states) {
            of.quantize(&wide[..range.len()], &mut indices[range.clone()], &mut largest[blocks(&range)])?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use zero_optim::AdamW;

    /// Random rounding picks one of a value's two neighbours; the mean of many roundings approaches the value.
    #[test]
    fn stochastic_rounding_has_the_mean_of_the_values() {
        let values: Vec<f32> = (0..64).map(|i| 1.0 + i as f32 / 8192.0).collect();
        let mut sums = vec![0.0; values.len()];
        let steps = 4000;
        for step in 0..steps {
            let mut rounded = vec![bf16::ZERO; values.len()];
            Stochastic::new(7, 3, step, 5, None).round(0, &values, &mut rounded).unwrap();
            for ((sum, rounded), value) in sums.iter_mut().zip(&rounded).zip(&values) {
                assert!((rounded.to_f32() - value).abs() < 1.0 / 128.0, "{value}: {rounded}");
                *sum += f64::from(rounded.to_f32());
            }
        }
        for (sum, value) in sums.iter().zip(&values) {
            // Five standard deviations of the mean of `steps` values that are one unit apart.
            let bound = 5.0 * 0.5 / 128.0 / (steps as f64).sqrt();
            assert!((sum / steps as f64 - f64::from(*value)).abs() < bound, "{value}: {}", sum / steps as f64);
        }
        let mut rounded = [bf16::ZERO; 3];
        let values = [f32::INFINITY, f32::NAN, -0.0];
        Stochastic::new(7, 3, 1, 0, None).round(0, &values, &mut rounded).unwrap();
        assert!(rounded[0].is_infinite() && rounded[1].is_nan() && rounded[2].to_bits() == 0x8000);
    }

    /// Ranks that cut a parameter round its elements like one rank that has the whole parameter.
    #[test]
    fn parts_of_a_cut_parameter_are_rounded_like_the_whole() {
        let value = |at: usize| 1.0 + (at as u32).wrapping_mul(2_654_435_761) as f32 / 2f32.powi(40);
        let rounded = |cut: Option<&Cut>, from: usize, values: &[f32]| {
            let mut rounded = vec![bf16::ZERO; values.len()];
            Stochastic::new(1, 2, 3, from, cut).round(0, values, &mut rounded).unwrap();
            rounded
        };
        let (rows, columns) = (12, 18);
        let values: Vec<f32> = (0..rows * columns).map(value).collect();
        let whole = rounded(None, 0, &values);
        for (dimension, parts) in [(0, vec![12]), (0, vec![6, 3, 3]), (1, vec![18]), (1, vec![12, 6])] {
            for index in 0..3 {
                let cut = Cut::new(&[rows, columns], dimension, &parts, (index, 3)).unwrap();
                let own: Vec<usize> = cut
                    .runs(0..cut.elements())
                    .into_iter()
                    .flat_map(|Run { local, whole }| whole..whole + local.len())
                    .collect();
                for from in [0, 5] {
                    let of_part: Vec<f32> = own[from..].iter().map(|&at| values[at]).collect();
                    let expected: Vec<bf16> = own[from..].iter().map(|&at| whole[at]).collect();
                    assert_eq!(rounded(Some(&cut), from, &of_part), expected, "{cut:?} from {from}");
                }
            }
        }
    }

    /// Updating a parameter in parts, with any number of threads, is bit-identical to updating it as a whole.
    #[test]
    fn updates_in_parts_are_bit_identical() {
        let n = 5 * CHUNK + 77;
        let values = |seed: u32| -> Vec<f32> {
            (0..n as u32).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) as f32 / 1e7 - 0.8).collect()
        };
        let (optimizer, grads) = (Optimizer::AdamW(AdamW::default()), values(2));
        let step = Step { step: 3, lr: 1e-2, grad_scale: 0.7, grad_limit: f32::INFINITY, decay: true };
        let run = |ranges: &[Range<usize>], threads: usize| {
            zero_model::ops::set_threads(threads);
            let mut params: Vec<bf16> = zero_optim::rounded(&values(1));
            let mut m: Vec<bf16> = zero_optim::rounded(&values(3));
            let v: Vec<f32> = values(4).into_iter().map(f32::abs).collect();
            let mut v: Vec<bf16> = zero_optim::rounded(&v);
            for range in ranges {
                let states = vec![Values::Bf16(&mut m[range.clone()]), Values::Bf16(&mut v[range.clone()])];
                let params = Values::Bf16(&mut params[range.clone()]);
                let stochastic = Stochastic::new(1, 2, 3, range.start, None);
                let grads = Grads::F32(&grads[range.clone()]);
                update(&optimizer, &step, params, grads, states, Some(stochastic)).unwrap();
            }
            zero_model::ops::set_threads(1);
            (params, m, v)
        };
        let whole = run(std::slice::from_ref(&(0..n)), 1);
        assert!(whole == run(std::slice::from_ref(&(0..n)), 3));
        assert!(whole == run(&[0..1000, 1000..1001, 1001..n], 2));
    }
}
