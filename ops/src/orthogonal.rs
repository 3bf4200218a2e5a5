//! The nearest orthogonal matrix, by Newton–Schulz iterations, as the optimizer Muon needs it.
//!
//! Source: Jordan et al., *Muon: An optimizer for hidden layers in neural networks*, 2024
//! (<https://kellerjordan.github.io/posts/muon/>). The operations and their order are the same as in
//! `torch.optim.Muon`, but in f32 instead of bf16.

use crate::measure;
use crate::parallel::threads;
use crate::product::{Matrix, Start, new_product, product};

/// The coefficients a, b and c of X ← aX + b(XXᵀ)X + c(XXᵀ)²X.
const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];
/// Smallest norm that a matrix is divided by.
const EPS: f64 = 1e-7;

/// Replaces a row-major matrix of `rows` × `columns` by an approximation of its nearest semi-orthogonal matrix: UVᵀ for
/// the singular value decomposition USVᵀ. After 5 `steps`, singular values are between about 0.7 and 1.2.
///
/// The result is bit-identical for any number of threads and any instruction set. All operands are f32, so AMX, which
/// multiplies bf16, is not used.
///
/// # Panics
/// Panics if `values` does not have `rows` · `columns` elements.
pub fn orthogonalize(values: &mut [f32], rows: usize, columns: usize, steps: usize) {
    assert_eq!(values.len(), rows * columns, "a matrix of {rows} × {columns}");
    let _timed = measure::update("Newton–Schulz", [rows, columns]);
    let norm = values.iter().map(|&value| f64::from(value) * f64::from(value)).sum::<f64>().sqrt().max(EPS);
    let inverse = (1.0 / norm) as f32;
    values.iter_mut().for_each(|value| *value *= inverse);
    // The Gram matrix of the shorter side: XXᵀ, or XᵀX if there are more rows than columns. It is symmetric in both
    // cases.
    let (short, is_tall, threads) = (rows.min(columns), rows > columns, threads());
    let [a, b, c] = COEFFICIENTS;
    let mut next = vec![0.0; values.len()];
    for _ in 0..steps {
        let x = Matrix::new(&*values, rows, columns);
        let gram = match is_tall {
            true => new_product(Start::Zero, x.t(), x, threads),
            false => new_product(Start::Zero, x, x.t(), threads),
        };
        let of_gram = Matrix::new(&*gram, short, short);
        let mut factor = new_product(Start::Zero, of_gram, of_gram, threads);
        factor.iter_mut().zip(&gram).for_each(|(square, gram)| *square = b * gram + c * *square);
        let factor = Matrix::new(&*factor, short, short);
        match is_tall {
            true => product(&mut next, x, factor, threads),
            false => product(&mut next, factor, x, threads),
        }
        values.iter_mut().zip(&next).for_each(|(x, next)| *x = next + a * *x);
    }
}

/// Returns the peak size in bytes of the buffers of [`orthogonalize`].
#[must_use]
pub fn orthogonalize_bytes(rows: usize, columns: usize) -> u64 {
    let short = rows.min(columns);
    4 * (rows * columns + 2 * short * short) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(count: usize) -> Vec<f32> {
        let value = |i: usize| ((i * i * 7919 + i * 31) % 2003) as f32 / 1024.0 - 1.0;
        (0..count).map(value).collect()
    }

    /// The same iterations in f64, by plain loops.
    fn plain(values: &[f32], rows: usize, columns: usize, steps: usize) -> Vec<f64> {
        let norm = values.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt();
        let mut x: Vec<f64> = values.iter().map(|&value| f64::from(value) / norm).collect();
        let product = |a: &[f64], b: &dyn Fn(usize, usize) -> f64, rows: usize, inner: usize, columns: usize| {
            let element = |at: usize| (0..inner).map(|k| a[at / columns * inner + k] * b(k, at % columns)).sum::<f64>();
            (0..rows * columns).map(element).collect::<Vec<f64>>()
        };
        let [a, b, c] = COEFFICIENTS.map(f64::from);
        for _ in 0..steps {
            let gram = product(&x, &|k, j| x[j * columns + k], rows, columns, rows);
            let square = product(&gram, &|k, j| gram[k * rows + j], rows, rows, rows);
            let factor: Vec<f64> = gram.iter().zip(&square).map(|(gram, square)| b * gram + c * square).collect();
            let moved = product(&factor, &|k, j| x[k * columns + j], rows, rows, columns);
            x.iter_mut().zip(moved).for_each(|(x, moved)| *x = a * *x + moved);
        }
        x
    }

    #[test]
    fn newton_schulz_iterations_match_f64() {
        for (rows, columns) in [(1, 1), (1, 7), (5, 1), (16, 16), (24, 40), (40, 24), (33, 65)] {
            let values = random(rows * columns);
            let expected = plain(&values, rows, columns, 5);
            let mut got = values;
            orthogonalize(&mut got, rows, columns, 5);
            for (got, expected) in got.iter().zip(&expected) {
                // A rounding of 2⁻²⁴ grows by a factor of 3.4 in each iteration.
                assert!((f64::from(*got) - expected).abs() < 3e-5, "{rows} × {columns}: {got} {expected}");
            }
        }
    }

    #[test]
    fn rows_become_nearly_orthonormal() {
        let (rows, columns) = (24, 40);
        let mut values = random(rows * columns);
        orthogonalize(&mut values, rows, columns, 5);
        let dot = |a: usize, b: usize| -> f32 {
            values[a * columns..][..columns].iter().zip(&values[b * columns..][..columns]).map(|(a, b)| a * b).sum()
        };
        for (a, b) in (0..rows).flat_map(|a| (0..rows).map(move |b| (a, b))) {
            let limits = if a == b { 0.4..1.5 } else { -0.5..0.5 };
            assert!(limits.contains(&dot(a, b)), "rows {a} and {b}: {}", dot(a, b));
        }
        let mut zeros = vec![0.0; 12];
        orthogonalize(&mut zeros, 3, 4, 5);
        assert_eq!(zeros, [0.0; 12]);
    }

    /// A profile reports all products of one call of `orthogonalize` as one operation of the update.
    #[test]
    fn a_profile_has_the_work_of_the_update() {
        measure::start();
        orthogonalize(&mut random(6 * 10), 6, 10, 5);
        let measured = measure::finish();
        let [one] = &measured[..] else { panic!("{measured:?}") };
        assert!(one.is_update && one.operation == "Newton–Schulz 6 x 10" && one.calls == 1, "{one:?}");
        // Each of the five steps computes XXᵀ, its square, and the product of their combination with X.
        assert_eq!(one.flops(), Some(2.0 * 5.0 * (6 * 6 * 10 + 6 * 6 * 6 + 6 * 6 * 10) as f64));
    }
}
