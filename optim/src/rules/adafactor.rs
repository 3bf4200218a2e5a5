//! Adafactor (Shazeer & Stern, 2018): stores the second moment of a matrix as one value for each row and column.
//!
//! ```text
//! w = t^β                      ρ = min(lr, 1/√t)           α = max(ε₂, rms(θ)) · ρ
//! R ← R + w(mean of g² over the row − R)                   C ← C + w(mean of g² over the column − C)
//! V = R·C / max(mean(R), ε₁)                               vectors: V ← V + w(g² − V)
//! u = g / √max(V, ε₁²)         θ ← θ(1 − lr·λ) − α / max(1, rms(u)/d) · u
//! ```
//! The formulas come from `torch.optim.Adafactor`.
//!
//! rms(θ) and rms(u) are taken over whole parameters, so a step has two passes. The first pass updates the moments and
//! adds the squares of θ and u to [`Squares`]. The second pass, [`Adafactor::advance`], moves the parameters at the
//! [rate](Adafactor::rate) that follows from the squares. A matrix is updated as a whole: its state is R, followed by
//! C.

use zero_isa::Isa;

use crate::norm::{BLOCK, square_sum};
use crate::rules::rule::clipped;
use crate::simd::{Kernel, run};
use crate::stored::Stored;
use crate::{LengthError, Squares, Step, expect_length};

/// Hyperparameters of Adafactor; the defaults are PyTorch's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adafactor {
    /// β, the exponent in tᵝ, the weight of new squares at step t; at most 0.
    pub beta2_decay: f64,
    /// ε₁, the lower bound of the second moment's root, and ε₂, the lower bound of the parameter's rms.
    pub eps: (f64, f64),
    /// d: a step u whose rms is larger is scaled down to this rms.
    pub d: f64,
    /// λ, the weight decay.
    pub weight_decay: f64,
    /// The factor of u in the second pass. `with_rate` sets it for each parameter.
    pub rate: f64,
}

impl Default for Adafactor {
    fn default() -> Self {
        Self { beta2_decay: -0.8, eps: (f64::from(f32::EPSILON), 1e-3), d: 1.0, weight_decay: 0.0, rate: 0.0 }
    }
}

/// The second moment V of a range of a parameter.
#[derive(Debug, Clone, Copy)]
pub enum SecondMoment<'a, S = f32> {
    /// One value for each element.
    Full(&'a [S]),
    /// The factors of a matrix.
    Factored {
        /// R, followed by C.
        factors: &'a [f32],
        /// Number of rows.
        rows: usize,
        /// The mean of R, or ε₁ if that is larger.
        mean: f32,
        /// Index of the range's first element in the matrix.
        first: usize,
    },
}

impl<S: Stored> SecondMoment<'_, S> {
    /// Writes V of the elements starting at `start`.
    fn write(&self, start: usize, values: &mut [f32]) {
        match self {
            Self::Full(moment) => {
                for (value, moment) in values.iter_mut().zip(&moment[start..]) {
                    *value = moment.load();
                }
            }
            Self::Factored { factors, rows, mean, first } => {
                let (rows, columns) = factors.split_at(*rows);
                let (mut at, mut rest) = (first + start, values);
                while !rest.is_empty() {
                    let (row, column) = (at / columns.len(), at % columns.len());
                    let (part, after) = rest.split_at_mut(rest.len().min(columns.len() - column));
                    let of_row = rows[row] / mean;
                    for (value, column) in part.iter_mut().zip(&columns[column..]) {
                        *value = of_row * column;
                    }
                    at += part.len();
                    rest = after;
                }
            }
        }
    }
}

impl Adafactor {
    /// Adds the gradients of a range of a parameter to its second moment. The parameter must not be a matrix.
    ///
    /// # Errors
    /// Fails if the slices differ in length. In that case nothing is written.
    pub fn add(&self, step: &Step, grads: &[f32], moment: &mut [f32]) -> Result<(), LengthError> {
        expect_length("variance", grads.len(), moment.len())?;
        let weight = self.weight(step) as f32;
        for (moment, &grad) in moment.iter_mut().zip(grads) {
            let grad = clipped(grad, step.grad_limit) * step.grad_scale;
            *moment += weight * (grad * grad - *moment);
        }
        Ok(())
    }

    /// Sums the squares of whole rows of a matrix: writes the sum of each row to `rows`, and adds the sum of each
    /// column to `columns`.
    ///
    /// # Errors
    /// Fails if the number of gradients is not the number of rows times the number of columns.
    pub fn sum(&self, step: &Step, grads: &[f32], rows: &mut [f64], columns: &mut [f64]) -> Result<(), LengthError> {
        expect_length("grads", rows.len() * columns.len(), grads.len())?;
        let (isa, mut scaled) = (Isa::current(), [0.0; BLOCK]);
        for (row, grads) in rows.iter_mut().zip(grads.chunks(columns.len().max(1))) {
            *row = 0.0;
            for (grads, columns) in grads.chunks(BLOCK).zip(columns.chunks_mut(BLOCK)) {
                let scaled = &mut scaled[..grads.len()];
                run(isa, Columns { step, grads, scaled, columns });
                *row += square_sum(isa, scaled);
            }
        }
        Ok(())
    }

    /// Adds the sums of all rows and columns of a matrix to its factors R and C. Returns the mean of R, or ε₁ if that
    /// is larger.
    ///
    /// # Errors
    /// Fails if the number of factors is not the number of rows plus the number of columns. In that case nothing is
    /// written.
    pub fn factor(
        &self,
        step: &Step,
        (rows, columns): (&[f64], &[f64]),
        factors: &mut [f32],
    ) -> Result<f32, LengthError> {
        expect_length("variance", rows.len() + columns.len(), factors.len())?;
        let weight = self.weight(step) as f32;
        let (of_rows, of_columns) = factors.split_at_mut(rows.len());
        for (factors, sums, count) in [(&mut *of_rows, rows, columns.len()), (of_columns, columns, rows.len())] {
            for (factor, sum) in factors.iter_mut().zip(sums) {
                *factor += weight * ((sum / count as f64) as f32 - *factor);
            }
        }
        Ok(self.mean(of_rows))
    }

    /// Returns the mean of R, or ε₁ if that is larger.
    #[must_use]
    pub fn mean(&self, rows: &[f32]) -> f32 {
        let mean = rows.iter().map(|&row| f64::from(row)).sum::<f64>() / rows.len() as f64;
        // Not `max`, which would hide a NaN.
        if mean < self.eps.0 { self.eps.0 as f32 } else { mean as f32 }
    }

    /// Adds the squares of a range of a parameter, and of the same range of u, to `squares`. The range starts at a
    /// multiple of [`BLOCK`] elements of the parameter, and ends at such a multiple or at the end of the parameter.
    ///
    /// # Errors
    /// Fails if the slices differ in length.
    pub fn add_squares(
        &self,
        step: &Step,
        params: &[f32],
        grads: &[f32],
        moment: SecondMoment<'_>,
        squares: &mut Squares,
    ) -> Result<(), LengthError> {
        expect_length("grads", params.len(), grads.len())?;
        let (isa, mut direction) = (Isa::current(), [0.0; BLOCK]);
        for (block, (params, grads)) in params.chunks(BLOCK).zip(grads.chunks(BLOCK)).enumerate() {
            let direction = &mut direction[..params.len()];
            self.direction(isa, step, block * BLOCK, grads, moment, direction);
            squares.params.add(square_sum(isa, params));
            squares.direction.add(square_sum(isa, direction));
        }
        Ok(())
    }

    /// Returns the optimizer with the second pass's rate, for a parameter of `elements` elements with these squares.
    #[must_use]
    pub fn with_rate(self, step: &Step, squares: &Squares, elements: usize) -> Self {
        let rms = |sum: f64| (sum / elements as f64).sqrt();
        // Not `max`, which would hide a NaN.
        let at_least = |bound: f64, value: f64| if value < bound { bound } else { value };
        let largest = step.lr.min(1.0 / (step.step as f64).sqrt());
        let alpha = at_least(self.eps.1, rms(squares.params.to_f64())) * largest;
        Self { rate: alpha / at_least(1.0, rms(squares.direction.to_f64()) / self.d), ..self }
    }

    /// Moves a range of parameters along u.
    ///
    /// # Errors
    /// Fails if the slices differ in length.
    pub fn advance<P: Stored, S: Stored>(
        &self,
        step: &Step,
        params: &mut [P],
        grads: &[f32],
        moment: SecondMoment<'_, S>,
    ) -> Result<(), LengthError> {
        expect_length("grads", params.len(), grads.len())?;
        let (isa, mut direction) = (Isa::current(), [0.0; BLOCK]);
        let decay = if step.decay { self.weight_decay } else { 0.0 };
        let (kept, minus_rate) = ((1.0 - step.lr * decay) as f32, -self.rate as f32);
        for (block, (params, grads)) in params.chunks_mut(BLOCK).zip(grads.chunks(BLOCK)).enumerate() {
            let direction = &mut direction[..params.len()];
            self.direction(isa, step, block * BLOCK, grads, moment, direction);
            run(isa, Move { kept, minus_rate, params, direction });
        }
        Ok(())
    }

    fn weight(&self, step: &Step) -> f64 {
        libm::pow(step.step as f64, self.beta2_decay)
    }

    /// Writes u of the elements starting at `start`.
    fn direction<S: Stored>(
        &self,
        isa: Isa,
        step: &Step,
        start: usize,
        grads: &[f32],
        moment: SecondMoment<'_, S>,
        direction: &mut [f32],
    ) {
        moment.write(start, direction);
        run(isa, Direction { step, least: (self.eps.0 * self.eps.0) as f32, grads, direction });
    }
}

struct Columns<'a> {
    step: &'a Step,
    grads: &'a [f32],
    scaled: &'a mut [f32],
    columns: &'a mut [f64],
}

impl Kernel for Columns<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { step: &Step { grad_limit, grad_scale, .. }, grads, scaled, columns } = self;
        for ((&grad, scaled), column) in grads.iter().zip(scaled).zip(columns) {
            *scaled = clipped(grad, grad_limit) * grad_scale;
            *column += f64::from(*scaled) * f64::from(*scaled);
        }
    }
}

/// Replaces V by u.
struct Direction<'a> {
    step: &'a Step,
    least: f32,
    grads: &'a [f32],
    direction: &'a mut [f32],
}

impl Kernel for Direction<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { step: &Step { grad_limit, grad_scale, .. }, least, grads, direction } = self;
        for (value, &grad) in direction.iter_mut().zip(grads) {
            let moment = if *value < least { least } else { *value };
            *value = clipped(grad, grad_limit) * grad_scale / moment.sqrt();
        }
    }
}

struct Move<'a, P> {
    kept: f32,
    minus_rate: f32,
    params: &'a mut [P],
    direction: &'a [f32],
}

impl<P: Stored> Kernel for Move<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (param, &direction) in self.params.iter_mut().zip(self.direction) {
            *param = P::rounded(self.minus_rate.mul_add(direction, param.load() * self.kept));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Step = Step { step: 1, lr: 0.05, grad_scale: 0.125, grad_limit: 2.5, decay: true };

    fn wave(n: usize, t: u64, scale: f32) -> Vec<f32> {
        (0..n).map(|i| ((i as f32 * 1.7 + t as f32 * 0.9).sin() + 0.31) * scale).collect()
    }

    /// The formulas in f64. The parameter is a vector if `columns` is 0.
    fn textbook(of: &Adafactor, step: &Step, columns: usize, params: &mut [f64], state: &mut [f64], grads: &[f32]) {
        let grads: Vec<f64> =
            grads.iter().map(|&g| f64::from(g.clamp(-step.grad_limit, step.grad_limit) * step.grad_scale)).collect();
        let (n, t) = (params.len(), step.step as f64);
        let (w, rms) =
            (t.powf(of.beta2_decay), |x: &[f64]| (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64).sqrt());
        let rows = n.checked_div(columns).unwrap_or(0);
        let v: Vec<f64> = if rows == 0 {
            state.iter_mut().zip(&grads).for_each(|(v, g)| *v += w * (g * g - *v));
            state.to_vec()
        } else {
            for r in 0..rows {
                let mean = (0..columns).map(|c| grads[r * columns + c].powi(2)).sum::<f64>() / columns as f64;
                state[r] += w * (mean - state[r]);
            }
            for c in 0..columns {
                let mean = (0..rows).map(|r| grads[r * columns + c].powi(2)).sum::<f64>() / rows as f64;
                state[rows + c] += w * (mean - state[rows + c]);
            }
            let mean = (state[..rows].iter().sum::<f64>() / rows as f64).max(of.eps.0);
            (0..n).map(|i| state[i / columns] * state[rows + i % columns] / mean).collect()
        };
        let u: Vec<f64> = grads.iter().zip(&v).map(|(g, v)| g / v.max(of.eps.0.powi(2)).sqrt()).collect();
        let alpha = rms(params).max(of.eps.1) * step.lr.min(1.0 / t.sqrt());
        let decay = if step.decay { of.weight_decay } else { 0.0 };
        for (param, u_i) in params.iter_mut().zip(&u) {
            *param = *param * (1.0 - step.lr * decay) - alpha / (rms(&u) / of.d).max(1.0) * u_i;
        }
    }

    fn stepped(of: &Adafactor, step: &Step, columns: usize, params: &mut [f32], state: &mut [f32], grads: &[f32]) {
        let (n, mut squares) = (params.len(), Squares::default());
        let rows = n.checked_div(columns).unwrap_or(0);
        let mean = if columns == 0 {
            of.add(step, grads, state).unwrap();
            0.0
        } else {
            let (mut of_rows, mut of_columns) = (vec![0.0; rows], vec![0.0; columns]);
            of.sum(step, grads, &mut of_rows, &mut of_columns).unwrap();
            of.factor(step, (&of_rows, &of_columns), state).unwrap()
        };
        let moment = |first| match columns {
            0 => SecondMoment::Full(&state[first..]),
            _ => SecondMoment::Factored { factors: state, rows, mean, first },
        };
        // Each pass runs on the two parts of the parameter in turn.
        let cut = BLOCK.min(n);
        of.add_squares(step, &params[..cut], &grads[..cut], moment(0), &mut squares).unwrap();
        of.add_squares(step, &params[cut..], &grads[cut..], moment(cut), &mut squares).unwrap();
        let of = of.with_rate(step, &squares, n);
        of.advance(step, &mut params[..cut], &grads[..cut], moment(0)).unwrap();
        of.advance(step, &mut params[cut..], &grads[cut..], moment(cut)).unwrap();
    }

    #[test]
    fn fifty_steps_agree_with_the_formulas_in_f64() {
        let plain = Adafactor { weight_decay: 0.1, ..Adafactor::default() };
        for (of, scale) in [
            (plain, 3.0),
            (plain, 1e-5),
            (plain, 0.0),
            (plain, 0.7),
            (Adafactor { beta2_decay: -0.5, d: 2.0, eps: (1e-3, 0.1), ..plain }, 3.0),
        ] {
            for (n, columns) in [(1500, 0), (7, 0), (60 * 40, 40), (3 * 1500, 1500), (4, 2)] {
                for decay in [true, false] {
                    let mut params = wave(n, 0, 1.0);
                    let mut state = vec![0.0; n.checked_div(columns).map_or(n, |rows| rows + columns)];
                    let mut expected: Vec<f64> = params.iter().map(|&x| f64::from(x)).collect();
                    let mut expected_state = vec![0.0; state.len()];
                    for t in 1..=50 {
                        let (step, grads) = (
                            Step { step: t, decay, lr: if scale == 0.7 { 0.5 } else { 0.05 }, ..STEP },
                            wave(n, t, scale),
                        );
                        stepped(&of, &step, columns, &mut params, &mut state, &grads);
                        textbook(&of, &step, columns, &mut expected, &mut expected_state, &grads);
                    }
                    let all = params.iter().chain(&state).zip(expected.iter().chain(&expected_state));
                    for (got, expected) in all {
                        let off = (f64::from(*got) - expected).abs();
                        assert!(off < 1e-5 * (0.1 + expected.abs()), "{of:?}, {n}, {columns}: {got} {expected}");
                    }
                }
            }
        }
    }

    #[test]
    fn wrong_lengths_are_errors() {
        let of = Adafactor::default();
        let error = |what, expected, found| LengthError { what, expected, found };
        assert_eq!(of.add(&STEP, &[1.0; 3], &mut [0.0; 2]).unwrap_err(), error("variance", 3, 2));
        assert_eq!(of.sum(&STEP, &[1.0; 5], &mut [0.0; 2], &mut [0.0; 3]).unwrap_err(), error("grads", 6, 5));
        assert_eq!(of.factor(&STEP, (&[1.0; 2], &[1.0; 3]), &mut [0.0; 6]).unwrap_err(), error("variance", 5, 6));
        let full = SecondMoment::Full(&[1.0f32; 3]);
        assert_eq!(of.advance(&STEP, &mut [1.0f32; 3], &[1.0; 2], full).unwrap_err(), error("grads", 3, 2));
    }
}
