//! Shampoo (Gupta, Koren & Singer 2018, "Shampoo: Preconditioned Stochastic Tensor Optimization", algorithm 1), an
//! optimizer that zero-train does not include. It updates the matrices of a model; Adam updates all other parameters.
//!
//! ```text
//! L ← L + G·Gᵀ        R ← R + Gᵀ·G        W ← W(1 − lr·λ) − lr · (L + εI)^(−1/4) · G · (R + εI)^(−1/4)
//! ```

use zero_train::optimizer::{CustomOptimizer, CustomStep, MatrixStates, Update};

/// The ε of Shampoo and Adam, and the decay of Adam's moments.
#[derive(Debug)]
pub(crate) struct Shampoo {
    pub(crate) epsilon: f64,
    pub(crate) betas: (f64, f64),
}

impl CustomOptimizer for Shampoo {
    /// For a matrix, the states are L and R; for any other parameter, Adam's two moments.
    fn states(&self) -> &'static [&'static str] {
        &["first", "second"]
    }

    fn matrix(&self, name: &str, [rows, columns]: [usize; 2]) -> Option<MatrixStates> {
        let is_embedding = name.contains("wte") || name.contains("wpe") || name.contains("embed");
        let side = rows.max(columns);
        (!is_embedding).then(|| MatrixStates {
            values: vec![rows * rows, columns * columns],
            // The f64 buffers that `root` and `update` hold at the same time.
            buffer_bytes: 8 * (4 * side * side + 2 * rows * columns),
            multiply_adds: 32 * (rows.pow(3) + columns.pow(3)) as u128,
        })
    }

    fn update(&self, step: &CustomStep, update: Update<'_>) {
        let Update { params, grads, states, matrix } = update;
        let [first, second] = states else { unreachable!("there are two states") };
        let kept = 1.0 - step.lr * step.weight_decay;
        let Some([rows, columns]) = matrix else {
            let (beta1, beta2) = self.betas;
            let corrections = [beta1, beta2].map(|beta| 1.0 - beta.powf(step.step as f64));
            for (i, (param, &grad)) in params.iter_mut().zip(grads).enumerate() {
                let grad = f64::from(grad);
                first[i] = (beta1 * f64::from(first[i]) + (1.0 - beta1) * grad) as f32;
                second[i] = (beta2 * f64::from(second[i]) + (1.0 - beta2) * grad * grad) as f32;
                let root = (f64::from(second[i]) / corrections[1]).sqrt() + self.epsilon;
                *param = (f64::from(*param) * kept - step.lr * f64::from(first[i]) / corrections[0] / root) as f32;
            }
            return;
        };
        let grads: Vec<f64> = grads.iter().map(|&grad| grad.into()).collect();
        for (i, j) in (0..rows).flat_map(|i| (0..rows).map(move |j| (i, j))) {
            let product = (0..columns).map(|k| grads[i * columns + k] * grads[j * columns + k]).sum::<f64>();
            first[i * rows + j] += product as f32;
        }
        for (i, j) in (0..columns).flat_map(|i| (0..columns).map(move |j| (i, j))) {
            let product = (0..rows).map(|k| grads[k * columns + i] * grads[k * columns + j]).sum::<f64>();
            second[i * columns + j] += product as f32;
        }
        let left = product(&self.root(first, rows), &grads, [rows, rows, columns]);
        let direction = product(&left, &self.root(second, columns), [rows, columns, columns]);
        for (param, direction) in params.iter_mut().zip(direction) {
            *param = (f64::from(*param) * kept - step.lr * direction) as f32;
        }
    }
}

impl Shampoo {
    /// Returns (A + εI)^(−1/4) of a symmetric matrix of `n` rows.
    fn root(&self, matrix: &[f32], n: usize) -> Vec<f64> {
        let (values, vectors) = eigen(matrix.iter().map(|&value| value.into()).collect(), n);
        let powers: Vec<f64> = values.into_iter().map(|value| (value.max(0.0) + self.epsilon).powf(-0.25)).collect();
        let scaled: Vec<f64> = vectors.iter().enumerate().map(|(at, value)| value * powers[at % n]).collect();
        let transposed: Vec<f64> = (0..n * n).map(|at| vectors[at % n * n + at / n]).collect();
        product(&scaled, &transposed, [n, n, n])
    }
}

/// Multiplies matrices of rows × inner and inner × columns.
fn product(a: &[f64], b: &[f64], [rows, inner, columns]: [usize; 3]) -> Vec<f64> {
    let mut product = vec![0.0; rows * columns];
    for (row, a) in product.chunks_mut(columns).zip(a.chunks(inner)) {
        for (a, b) in a.iter().zip(b.chunks(columns)) {
            row.iter_mut().zip(b).for_each(|(sum, b)| *sum += a * b);
        }
    }
    product
}

/// Returns the eigenvalues of a symmetric matrix of `n` rows, and its eigenvectors as columns, by Jacobi's rotations.
fn eigen(mut a: Vec<f64>, n: usize) -> (Vec<f64>, Vec<f64>) {
    let mut vectors: Vec<f64> = (0..n * n).map(|at| if at / n == at % n { 1.0 } else { 0.0 }).collect();
    let norm: f64 = a.iter().map(|value| value * value).sum();
    for _ in 0..50 {
        let is_diagonal = |&(at, _): &(usize, &f64)| at / n == at % n;
        let rest: f64 = a.iter().enumerate().filter(|at| !is_diagonal(at)).map(|(_, value)| value * value).sum();
        if rest <= 1e-30 * norm {
            break;
        }
        for (p, q) in (0..n).flat_map(|p| (p + 1..n).map(move |q| (p, q))) {
            let off = a[p * n + q];
            if off == 0.0 {
                continue;
            }
            let theta = (a[q * n + q] - a[p * n + p]) / (2.0 * off);
            let tangent = theta.signum() / (theta.abs() + theta.hypot(1.0));
            let cosine = 1.0 / tangent.hypot(1.0);
            let sine = tangent * cosine;
            for row in a.chunks_mut(n).chain(vectors.chunks_mut(n)) {
                let (x, y) = (row[p], row[q]);
                (row[p], row[q]) = (cosine * x - sine * y, sine * x + cosine * y);
            }
            let (above, below) = a.split_at_mut(q * n);
            let (row_p, row_q) = (&mut above[p * n..], below);
            for k in 0..n {
                let (x, y) = (row_p[k], row_q[k]);
                (row_p[k], row_q[k]) = (cosine * x - sine * y, sine * x + cosine * y);
            }
        }
    }
    ((0..n).map(|i| a[i * n + i]).collect(), vectors)
}
