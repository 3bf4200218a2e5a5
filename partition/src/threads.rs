//! Multi-threaded versions of the optimizer's kernels, because one core cannot saturate the memory bandwidth. They use
//! the same number of threads as operations. Every element and every block of the norm is computed independently, so
//! results are bit-identical for any number of threads.

use zero_model::ops::{convert, in_parallel, orthogonalize, orthogonalize_bytes, threads};
use zero_optim::norm::BLOCK;
use zero_optim::{
    Adafactor, ExactSum, HalfFloat, LengthError, MatrixStates, Muon, SecondMoment, Step, read_half, write_half,
};

use crate::grad_buffer::Grads;

/// Smaller inputs stay on one thread, because they finish before a second thread has started.
const SMALL: usize = 64 * BLOCK;

/// Returns the number of elements per thread, in whole blocks.
pub(crate) fn share(elements: usize) -> usize {
    let parts = if elements < SMALL { 1 } else { threads() };
    elements.div_ceil(parts).next_multiple_of(BLOCK).max(1)
}

/// Runs [`zero_optim::average`] on several threads.
pub(crate) fn average(weight: f32, params: &[f32], averages: &mut [f32]) -> Result<(), LengthError> {
    if averages.len() != params.len() {
        return zero_optim::average(weight, params, averages);
    }
    convert(params, averages, |params, averages| {
        let _ = zero_optim::average(weight, params, averages);
    });
    Ok(())
}

/// Runs a Muon step on a whole matrix of this shape. Its matrix products run on several threads.
///
/// # Errors
/// Fails if the slices differ in length.
pub fn update_matrix(
    muon: &Muon,
    step: &Step,
    shape: [usize; 2],
    params: &mut [f32],
    grads: &[f32],
    exp_avg: &mut [f32],
) -> Result<(), LengthError> {
    let mut direction = muon.direction(step, grads, exp_avg)?;
    orthogonalize(&mut direction, shape[0], shape[1], muon.ns_steps);
    muon.apply(step, shape, params, &direction)
}

/// Returns the states that Muon keeps of a matrix of this shape: its momentum.
#[must_use]
pub fn muon_states([rows, columns]: [usize; 2]) -> MatrixStates {
    let elements = rows * columns;
    MatrixStates {
        values: vec![elements],
        buffer_bytes: orthogonalize_bytes(rows, columns) as usize + 4 * elements,
        // The multiply-adds of one matrix product of a Newton–Schulz iteration.
        multiply_adds: elements as u128 * rows.min(columns) as u128,
    }
}

/// Number of bands of rows. Each band sums its columns separately, so the sums do not depend on the number of threads.
const BANDS: usize = 16;

/// Adds the gradients of a whole matrix to its factors, on several threads, and returns the mean of the row factors:
/// see [`Adafactor::factor`].
pub(crate) fn factor(
    of: &Adafactor,
    step: &Step,
    [rows, columns]: [usize; 2],
    grads: &[f32],
    factors: &mut [f32],
) -> Result<f32, LengthError> {
    let band = rows.div_ceil(BANDS);
    let mut of_rows = vec![0.0; rows];
    let mut bands: Vec<_> = grads
        .chunks(band * columns)
        .zip(of_rows.chunks_mut(band))
        .map(|(grads, rows)| (grads, rows, vec![0.0; columns], Ok(())))
        .collect();
    // Make at most as many parts as there are threads, because each part gets a thread.
    let size = bands.len().div_ceil(threads()).max(1);
    let mut parts: Vec<_> = bands.chunks_mut(size).collect();
    in_parallel(&mut parts, |bands| {
        for (grads, rows, columns, result) in bands.iter_mut() {
            *result = of.sum(step, grads, rows, columns);
        }
    });
    let mut of_columns = vec![0.0; columns];
    for (.., of_band, result) in bands {
        result?;
        of_columns.iter_mut().zip(of_band).for_each(|(sum, of_band)| *sum += of_band);
    }
    of.factor(step, (&of_rows, &of_columns), factors)
}

/// Returns the states that Adafactor keeps of a matrix of this shape: a value for each row, and then a value for each
/// column.
#[must_use]
pub fn adafactor_states([rows, columns]: [usize; 2]) -> MatrixStates {
    MatrixStates {
        values: vec![rows + columns],
        // The buffers that [`factor`] allocates.
        buffer_bytes: 8 * (rows + columns * (1 + rows.div_ceil(rows.div_ceil(BANDS).max(1)))),
        multiply_adds: rows as u128 * columns as u128,
    }
}

/// Runs [`Adafactor::advance`] on several threads. `moment` returns the second moment starting at an element.
pub(crate) fn advance<'a>(
    of: &Adafactor,
    step: &Step,
    params: &mut [f32],
    grads: &[f32],
    moment: impl Fn(usize) -> SecondMoment<'a>,
) -> Result<(), LengthError> {
    let size = share(params.len());
    let parts = params.chunks_mut(size).zip(grads.chunks(size)).enumerate();
    let mut parts: Vec<_> = parts.map(|(part, (params, grads))| (params, grads, moment(part * size), Ok(()))).collect();
    in_parallel(&mut parts, |(params, grads, moment, result)| *result = of.advance(step, params, grads, *moment));
    parts.into_iter().try_for_each(|(.., result)| result)
}

/// Runs [`ExactSum::add_parameter_range`] on several threads.
pub(crate) fn add_parameter_range(sum: &mut ExactSum, grads: Grads<'_>) {
    let parts = grads.parts(share(grads.len())).into_iter();
    let mut parts: Vec<_> = parts.map(|grads| (grads, ExactSum::new())).collect();
    in_parallel(&mut parts, |(grads, sum)| match grads {
        Grads::F32(grads) => sum.add_parameter_range(grads),
        Grads::Bf16(grads) => {
            let mut wide = [0.0; BLOCK];
            for grads in grads.chunks(BLOCK) {
                let wide = &mut wide[..grads.len()];
                // The lengths are equal, so `read_half` cannot fail.
                let _ = read_half(grads, wide);
                sum.add_parameter_range(wide);
            }
        }
    });
    for (_, part) in &parts {
        sum.merge(part);
    }
}

/// Runs [`zero_optim::rounded`] on several threads.
pub(crate) fn rounded<H: HalfFloat + Send>(values: &[f32]) -> Vec<H> {
    let mut rounded = vec![H::ZERO; values.len()];
    round_all(values, &mut rounded);
    rounded
}

/// Runs [`write_half`] on several threads.
pub(crate) fn round_into<H: HalfFloat + Send>(values: &[f32], rounded: &mut [H]) -> Result<(), LengthError> {
    if rounded.len() != values.len() {
        return write_half(values, rounded);
    }
    round_all(values, rounded);
    Ok(())
}

/// Runs [`round_into`] on slices of the same length.
///
/// # Panics
/// Panics if the lengths differ.
pub(crate) fn round_all<H: HalfFloat + Send>(values: &[f32], rounded: &mut [H]) {
    // The lengths are equal, so `write_half` cannot fail.
    convert(values, rounded, |values, rounded| {
        let _ = write_half(values, rounded);
    });
}

/// Rounds values to 16 bits and back, on several threads and without a second buffer.
pub(crate) fn round_in_place<H: HalfFloat>(values: &mut [f32]) {
    let mut parts: Vec<_> = values.chunks_mut(share(values.len())).collect();
    in_parallel(&mut parts, |values| {
        let mut rounded = [H::ZERO; BLOCK];
        for values in values.chunks_mut(BLOCK) {
            let rounded = &mut rounded[..values.len()];
            // The lengths are equal, so neither call can fail.
            let _ = write_half(values, rounded);
            let _ = read_half(rounded, values);
        }
    });
}

/// Adds values in f32 and rounds the sums, on several threads.
///
/// # Errors
/// Fails if the slices differ in length.
pub(crate) fn add_rounded<H: HalfFloat + Send + Sync>(sum: &mut [H], summand: &[H]) -> Result<(), LengthError> {
    if summand.len() != sum.len() {
        return Err(LengthError { what: "summand", expected: sum.len(), found: summand.len() });
    }
    convert(summand, sum, |summand, sum| {
        let (mut wide, mut added) = ([0.0; BLOCK], [0.0; BLOCK]);
        for (sum, summand) in sum.chunks_mut(BLOCK).zip(summand.chunks(BLOCK)) {
            let (wide, added) = (&mut wide[..sum.len()], &mut added[..sum.len()]);
            // The lengths are equal, so none of these calls can fail.
            let _ = read_half(sum, wide);
            let _ = read_half(summand, added);
            wide.iter_mut().zip(&*added).for_each(|(sum, added)| *sum += added);
            let _ = write_half(wide, sum);
        }
    });
    Ok(())
}

/// Runs [`read_half`] on several threads.
pub(crate) fn widen<H: HalfFloat + Sync>(rounded: &[H], values: &mut [f32]) -> Result<(), LengthError> {
    if rounded.len() != values.len() {
        return read_half(rounded, values);
    }
    convert(rounded, values, |rounded, values| {
        let _ = read_half(rounded, values);
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::narrow::{Values, update};
    use zero_optim::{AdamW, Optimizer};

    #[test]
    fn results_do_not_depend_on_the_number_of_threads() {
        let n = 3 * SMALL + 1234;
        let values = |seed: u32| -> Vec<f32> {
            (0..n as u32).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) as f32 / 1e7 - 0.8).collect()
        };
        let (optimizer, step) = (
            Optimizer::AdamW(AdamW::default()),
            Step { step: 3, lr: 1e-3, grad_scale: 0.7, grad_limit: f32::INFINITY, decay: true },
        );
        let run = |threads: usize| {
            zero_model::ops::set_threads(threads);
            let (mut params, grads, mut m) = (values(1), values(2), values(3));
            let mut v: Vec<f32> = values(4).into_iter().map(f32::abs).collect();
            let states = vec![Values::F32(&mut m), Values::F32(&mut v)];
            update(&optimizer, &step, Values::F32(&mut params), Grads::F32(&grads), states, None).expect("lengths fit");
            let mut sum = ExactSum::new();
            add_parameter_range(&mut sum, Grads::F32(&grads));
            let narrow: Vec<half::bf16> = rounded(&params);
            let mut wide = vec![0.0; n];
            widen(&narrow, &mut wide).expect("lengths fit");
            assert!(narrow == zero_optim::rounded::<half::bf16>(&params));
            assert!(wide.iter().zip(&narrow).all(|(&wide, narrow)| wide == narrow.to_f32()));
            let mut in_place = params.clone();
            round_in_place::<half::bf16>(&mut in_place);
            assert!(in_place == wide);
            // Gradients in bf16 give the same squares and the same update as the same values in f32.
            let (mut squares, mut of_wide) = (ExactSum::new(), ExactSum::new());
            add_parameter_range(&mut squares, Grads::Bf16(&narrow));
            add_parameter_range(&mut of_wide, Grads::F32(&wide));
            assert_eq!(squares.to_f64().to_bits(), of_wide.to_f64().to_bits());
            let mut sums = narrow.clone();
            let reversed: Vec<half::bf16> = narrow.iter().rev().copied().collect();
            add_rounded(&mut sums, &reversed).expect("lengths fit");
            let expected = narrow.iter().zip(&reversed).map(|(a, b)| half::bf16::from_f32(a.to_f32() + b.to_f32()));
            assert!(expected.eq(sums.iter().copied()));
            let updated = |grads: Grads<'_>| {
                let (mut params, mut m, mut v) = (values(1), values(3), values(4));
                let states = vec![Values::F32(&mut m), Values::F32(&mut v)];
                update(&optimizer, &step, Values::F32(&mut params), grads, states, None).expect("lengths fit");
                [params, m, v].concat().into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            assert!(updated(Grads::Bf16(&narrow)) == updated(Grads::F32(&wide)));
            let bits: Vec<u32> = [params, m, v].concat().into_iter().map(f32::to_bits).collect();
            (bits, sum.to_f64().to_bits())
        };
        let one = run(1);
        let three = run(3);
        let (mut params, mut m, mut v) = (values(1), values(3), values(4));
        let states = vec![Values::F32(&mut m), Values::F32(&mut v)];
        let short = update(&optimizer, &step, Values::F32(&mut params), Grads::F32(&values(2)[1..]), states, None);
        zero_model::ops::set_threads(1);
        assert!(one == three);
        assert!(short.is_err());
    }
}
