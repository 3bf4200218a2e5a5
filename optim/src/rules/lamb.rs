//! LAMB (You et al., 2020): Adam whose step on a parameter is scaled by the ratio of two norms.
//!
//! ```text
//! m ← m + (1−β₁)(g − m)        v ← β₂v + (1−β₂)g²        u = m/(√v + ε) + λθ
//! r = ‖θ‖/‖u‖, at least min_coeff and at most max_coeff; 1 if a norm is 0
//! θ ← θ − lr·√(1−β₂ᵗ)/(1−β₁ᵗ) · r · u
//! ```
//! The formulas come from DeepSpeed's kernel, `csrc/lamb/fused_lamb_cuda_kernel.cu`: the bias correction multiplies the
//! whole step, including the weight decay. The paper applies the correction to the moments instead.
//!
//! The norms are taken over whole parameters, so a step has two passes. [`Lamb::accumulate`] adds a range of the
//! gradients to the moments, and the squares of θ and u to exact sums. These sums do not depend on how the parameter is
//! split. [`update`](crate::update) then moves the parameters, with `lr` multiplied by [`Lamb::trust_ratio`].

use zero_isa::Isa;

use crate::norm::{BLOCK, square_sum};
use crate::rules::rule::{Rule, apply, mean_square};
use crate::simd::{Kernel, run};
use crate::stored::Stored;
use crate::{ExactSum, LengthError, Step, expect_length};

/// Hyperparameters of LAMB; the defaults are DeepSpeed's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lamb {
    /// Decay rates of the first and the second moment, each in [0, 1).
    pub betas: (f64, f64),
    /// ε, added to the root of the second moment.
    pub eps: f64,
    /// Whether ε is added to the second moment instead, under the root.
    pub eps_inside_sqrt: bool,
    /// λ, the weight decay.
    pub weight_decay: f64,
    /// Whether the step is multiplied by √(1 − β₂ᵗ)/(1 − β₁ᵗ).
    pub bias_correction: bool,
    /// The smallest and the largest trust ratio.
    pub coeffs: (f64, f64),
}

impl Default for Lamb {
    fn default() -> Self {
        Self {
            betas: (0.9, 0.999),
            eps: 1e-8,
            eps_inside_sqrt: false,
            weight_decay: 0.0,
            bias_correction: true,
            coeffs: (0.01, 10.0),
        }
    }
}

/// The squares of the norms of a parameter and of its direction u.
#[derive(Debug, Clone, Default)]
pub struct Squares {
    /// ‖θ‖²
    pub params: ExactSum,
    /// ‖u‖²
    pub direction: ExactSum,
}

impl Squares {
    /// Adds the squares of another range.
    pub fn merge(&mut self, other: &Self) {
        self.params.merge(&other.params);
        self.direction.merge(&other.direction);
    }
}

impl Lamb {
    /// Adds the gradients of a range of a parameter to its moments m and v, and the squares of θ and u in the range to
    /// `squares`. The range starts at a multiple of [`BLOCK`] elements of the parameter, and ends at such a multiple or
    /// at the end of the parameter.
    ///
    /// # Errors
    /// Fails if the slices differ in length. In that case nothing is written.
    pub fn accumulate(
        &self,
        step: &Step,
        params: &[f32],
        grads: &[f32],
        moments: [&mut [f32]; 2],
        squares: &mut Squares,
    ) -> Result<(), LengthError> {
        self.accumulate_at(Isa::current(), step, params, grads, moments, squares)
    }

    fn accumulate_at(
        &self,
        isa: Isa,
        step: &Step,
        params: &[f32],
        grads: &[f32],
        [m, v]: [&mut [f32]; 2],
        squares: &mut Squares,
    ) -> Result<(), LengthError> {
        expect_length("grads", params.len(), grads.len())?;
        expect_length("exp_avg", params.len(), m.len())?;
        expect_length("exp_avg_sq", params.len(), v.len())?;
        let (moments, of, mut direction) = (self.moments(step), self.direction(step), [0.0; BLOCK]);
        let blocks = params.chunks(BLOCK).zip(grads.chunks(BLOCK)).zip(m.chunks_mut(BLOCK).zip(v.chunks_mut(BLOCK)));
        for ((params, grads), (m, v)) in blocks {
            apply((isa, step.grad_limit), moments, m, grads, [v]);
            let direction = &mut direction[..params.len()];
            run(isa, Directions { of, params, m, v, direction });
            squares.params.add(square_sum(isa, params));
            squares.direction.add(square_sum(isa, direction));
        }
        Ok(())
    }

    /// Returns the trust ratio of a whole parameter.
    #[must_use]
    pub fn trust_ratio(&self, squares: &Squares) -> f64 {
        let (params, direction) = (squares.params.to_f64().sqrt(), squares.direction.to_f64().sqrt());
        if params == 0.0 || direction == 0.0 {
            return 1.0;
        }
        let (ratio, (least, most)) = (params / direction, self.coeffs);
        // Not `clamp`, which panics if the bounds are in the wrong order. NaN stays NaN.
        let ratio = if ratio > most { most } else { ratio };
        if ratio < least { least } else { ratio }
    }

    /// Moves the parameters along the moments that [`Lamb::accumulate`] has updated. The slices have the same length.
    pub(crate) fn advance<P: Stored, S: Stored>(&self, isa: Isa, step: &Step, params: &mut [P], [m, v]: [&[S]; 2]) {
        let correction = match self.bias_correction {
            true => {
                let power = |beta: f64| libm::pow(beta, step.step as f64);
                (1.0 - power(self.betas.1)).sqrt() / (1.0 - power(self.betas.0))
            }
            false => 1.0,
        };
        run(isa, Advance { of: self.direction(step), minus_rate: (-step.lr * correction) as f32, params, m, v });
    }

    fn moments(&self, step: &Step) -> Moments {
        let (beta1, beta2) = self.betas;
        Moments {
            grad_scale: step.grad_scale,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
        }
    }

    fn direction(&self, step: &Step) -> Direction {
        let eps = self.eps as f32;
        Direction {
            decay: if step.decay { self.weight_decay as f32 } else { 0.0 },
            eps: if self.eps_inside_sqrt { [eps, 0.0] } else { [0.0, eps] },
        }
    }
}

/// The rule that updates the moments. It treats m as the parameter and v as its state.
#[derive(Clone, Copy)]
struct Moments {
    grad_scale: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
}

impl Rule<1> for Moments {
    #[inline(always)]
    fn step(self, m: f32, grad: f32, [v]: [f32; 1]) -> (f32, [f32; 1]) {
        let grad = grad * self.grad_scale;
        let v = mean_square(v, grad, self.beta2, self.one_minus_beta2);
        (self.one_minus_beta1.mul_add(grad - m, m), [v])
    }
}

/// The formula of u.
#[derive(Clone, Copy)]
struct Direction {
    decay: f32,
    /// ε under the root, and ε added to the root. One of them is 0.
    eps: [f32; 2],
}

impl Direction {
    #[inline(always)]
    fn at(self, param: f32, m: f32, v: f32) -> f32 {
        self.decay.mul_add(param, m / ((v + self.eps[0]).sqrt() + self.eps[1]))
    }
}

struct Directions<'a> {
    of: Direction,
    params: &'a [f32],
    m: &'a [f32],
    v: &'a [f32],
    direction: &'a mut [f32],
}

impl Kernel for Directions<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { of, params, m, v, direction } = self;
        for (((u, &param), &m), &v) in direction.iter_mut().zip(params).zip(m).zip(v) {
            *u = of.at(param, m, v);
        }
    }
}

struct Advance<'a, P, S> {
    of: Direction,
    minus_rate: f32,
    params: &'a mut [P],
    m: &'a [S],
    v: &'a [S],
}

impl<P: Stored, S: Stored> Kernel for Advance<'_, P, S> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { of, minus_rate, params, m, v } = self;
        for ((param, m), v) in params.iter_mut().zip(m).zip(v) {
            let old = param.load();
            *param = P::rounded(minus_rate.mul_add(of.at(old, m.load(), v.load()), old));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Optimizer, update, update_at};

    const STEP: Step = Step { step: 1, lr: 0.01, grad_scale: 0.125, grad_limit: f32::INFINITY, decay: true };

    fn wave(n: usize, t: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|i| ((i as f32 * 1.7 + t as f32 * 0.9).sin() + 0.31) * scale).collect()
    }

    /// Takes a step on a whole parameter. The first pass runs on one part at a time; each of `cuts` is the first
    /// element of a part.
    fn stepped(isa: Isa, lamb: &Lamb, step: &Step, cuts: &[usize], at: &mut [Vec<f32>; 3], grads: &[f32]) -> f64 {
        let [params, m, v] = at;
        let (mut sums, mut start) = (vec![], 0);
        for &end in cuts.iter().chain([&params.len()]) {
            let (mut squares, range) = (Squares::default(), start..end);
            let moments = [&mut m[range.clone()], &mut v[range.clone()]];
            lamb.accumulate_at(isa, step, &params[range.clone()], &grads[range], moments, &mut squares).unwrap();
            sums.push(squares);
            start = end;
        }
        let mut all = Squares::default();
        sums.iter().rev().for_each(|part| all.merge(part));
        let ratio = lamb.trust_ratio(&all);
        let step = Step { lr: step.lr * ratio, ..*step };
        update_at(isa, &Optimizer::Lamb(*lamb), &step, params, grads, &mut [m, v]).unwrap();
        ratio
    }

    /// Takes a step by DeepSpeed's formulas in f64.
    fn textbook(lamb: &Lamb, step: &Step, [params, m, v]: &mut [Vec<f64>; 3], grads: &[f32]) -> f64 {
        let ((b1, b2), t) = (lamb.betas, step.step as i32);
        let decay = if step.decay { lamb.weight_decay } else { 0.0 };
        let mut u = vec![0.0; params.len()];
        for i in 0..params.len() {
            let g = f64::from(grads[i]) * f64::from(step.grad_scale);
            m[i] = b1 * m[i] + (1.0 - b1) * g;
            v[i] = b2 * v[i] + (1.0 - b2) * g * g;
            let root = if lamb.eps_inside_sqrt { (v[i] + lamb.eps).sqrt() } else { v[i].sqrt() + lamb.eps };
            u[i] = m[i] / root + decay * params[i];
        }
        let norm = |of: &[f64]| of.iter().map(|x| x * x).sum::<f64>().sqrt();
        let ratio = match (norm(params), norm(&u)) {
            (0.0, _) | (_, 0.0) => 1.0,
            (of_params, of_u) => (of_params / of_u).min(lamb.coeffs.1).max(lamb.coeffs.0),
        };
        let correction = if lamb.bias_correction { (1.0 - b2.powi(t)).sqrt() / (1.0 - b1.powi(t)) } else { 1.0 };
        for (param, u) in params.iter_mut().zip(u) {
            *param -= step.lr * correction * ratio * u;
        }
        ratio
    }

    #[test]
    fn fifty_steps_agree_with_the_formulas_in_f64() {
        let plain = Lamb { weight_decay: 0.1, ..Lamb::default() };
        let mut bounded = 0;
        for (lamb, scale) in [
            (plain, 1.0),
            (plain, 1e-4),
            (Lamb { bias_correction: false, betas: (0.8, 0.95), ..plain }, 1.0),
            (Lamb { eps: 1e-3, eps_inside_sqrt: true, ..plain }, 1.0),
            (Lamb { coeffs: (0.3, 0.4), ..plain }, 3.0),
            (Lamb { weight_decay: 0.0, ..plain }, 0.0),
        ] {
            for decay in [true, false] {
                let start = wave(2500, 0, scale);
                let mut expected = [start.iter().map(|&x| f64::from(x)).collect(), vec![0.0; 2500], vec![0.0; 2500]];
                let mut got = [start, vec![0.0; 2500], vec![0.0; 2500]];
                for t in 1..=50 {
                    let step = Step { step: t, lr: 0.01 / t as f64, decay, ..STEP };
                    let grads = wave(2500, t as usize, 3.0);
                    let ratio = stepped(Isa::current(), &lamb, &step, &[1024], &mut got, &grads);
                    let of_book = textbook(&lamb, &step, &mut expected, &grads);
                    assert!((ratio - of_book).abs() < 1e-5 * of_book, "{lamb:?}, step {t}: {ratio} {of_book}");
                    bounded += usize::from([lamb.coeffs.0, lamb.coeffs.1].contains(&ratio));
                }
                for (got, expected) in got.iter().zip(&expected) {
                    for (got, expected) in got.iter().zip(expected) {
                        let off = (f64::from(*got) - expected).abs();
                        assert!(off < 2e-6 * (f64::from(scale) + expected.abs()), "{lamb:?}: {got} {expected}");
                    }
                }
            }
        }
        assert!(bounded > 100, "bounds of the ratio had an effect in {bounded} steps");
    }

    #[test]
    fn shard_cuts_and_instruction_sets_do_not_change_bits() {
        let lamb = Lamb { weight_decay: 0.1, ..Lamb::default() };
        let run = |isa: Isa, cuts: &[usize]| {
            let mut at = [wave(5000, 0, 1.0), wave(5000, 1, 0.1), wave(5000, 2, 1.0).iter().map(|x| x * x).collect()];
            stepped(isa, &lamb, &Step { step: 3, grad_limit: 2.0, ..STEP }, cuts, &mut at, &wave(5000, 3, 3.0));
            at.map(|values| values.into_iter().map(f32::to_bits).collect::<Vec<_>>())
        };
        let expected = run(Isa::BASELINE, &[]);
        for isa in Isa::available() {
            for cuts in [&[][..], &[1024], &[2048, 4096], &[1024, 1024, 4096]] {
                assert!(run(isa, cuts) == expected, "{isa:?}, {cuts:?}");
            }
        }
    }

    #[test]
    fn wrong_lengths_are_errors_that_write_nothing() {
        let (mut m, mut v, mut short) = ([0.0f32; 3], [0.0f32; 3], [0.0f32; 2]);
        let (lamb, mut squares) = (Lamb::default(), Squares::default());
        let error = lamb.accumulate(&STEP, &[1.0; 3], &[1.0; 2], [&mut m, &mut v], &mut squares).unwrap_err();
        assert_eq!(error, LengthError { what: "grads", expected: 3, found: 2 });
        let error = lamb.accumulate(&STEP, &[1.0; 3], &[1.0; 3], [&mut m, &mut short], &mut squares).unwrap_err();
        assert_eq!(error, LengthError { what: "exp_avg_sq", expected: 3, found: 2 });
        assert_eq!((m, squares.params.to_f64()), ([0.0; 3], 0.0));
        let error = update(&Optimizer::Lamb(lamb), &STEP, &mut [1.0; 3], &[1.0; 3], &mut [&mut m]).unwrap_err();
        assert_eq!(error, LengthError { what: "states", expected: 2, found: 1 });
    }
}
