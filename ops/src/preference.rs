//! Losses of preference pairs, from the log-probabilities of a chosen and a rejected answer.

use crate::graph::apply::apply;
use crate::graph::op::{Inputs, Op};
use crate::graph::operand::f32s;
use crate::graph::output::tensor;
use crate::meta::footprint::{Costs, Footprint, Reads, floats};
use candle_core::{CpuStorage, DType, Result, Shape, Tensor, bail};

/// The loss of a pair. Δ is ln π(chosen)/π_ref(chosen) − ln π(rejected)/π_ref(rejected), and σ is the logistic
/// function. The mean log-probability of an answer is the sum over its tokens divided by their number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PreferenceLoss {
    /// −ln σ(βΔ): Rafailov et al., "Direct preference optimization", 2023.
    Sigmoid {
        /// β.
        beta: f64,
    },
    /// max(0, 1 − βΔ): Zhao et al., "SLiC-HF", 2023.
    Hinge {
        /// β.
        beta: f64,
    },
    /// (Δ − 1/(2β))², where Δ is computed from mean log-probabilities: Azar et al., "A general theoretical paradigm to
    /// understand learning from human preferences", 2023, eq. 17.
    Ipo {
        /// β, τ in the paper.
        beta: f64,
    },
    /// (−(1 − ε)·ln σ(βΔ) + ε·ln σ(−βΔ)) / (1 − 2ε): Chowdhury et al., "Provably robust DPO", 2024.
    Robust {
        /// β.
        beta: f64,
        /// ε, the probability that the two answers of a pair are swapped; below ½.
        label_smoothing: f64,
    },
    /// −m − β·ln σ(ln odds(chosen) − ln odds(rejected)): Hong et al., "ORPO", 2024. m is the mean log-probability of
    /// the chosen answer with its prompt. odds(y) is p/(1 − p), where ln p is the mean log-probability of y.
    Orpo {
        /// β, λ in the paper.
        beta: f64,
    },
    /// −ln σ(β·(mean log-probability of the chosen answer − that of the rejected one) − γ): Meng et al., "SimPO", 2024.
    SimPo {
        /// β.
        beta: f64,
        /// γ, the margin.
        gamma: f64,
    },
}

/// Short for [`PreferenceLoss::SUMS`].
const SUMS: usize = PreferenceLoss::SUMS;

impl PreferenceLoss {
    /// Number of log-probability sums of a pair: one each for the chosen answer, the rejected answer, and the prompt
    /// before the chosen answer.
    pub const SUMS: usize = 3;

    /// Returns whether the loss compares with a reference model.
    #[must_use]
    pub fn has_reference(self) -> bool {
        !matches!(self, Self::Orpo { .. } | Self::SimPo { .. })
    }

    /// Returns the loss of a pair, and its derivatives with respect to the log-probabilities.
    fn of(self, pair: &Pair) -> (f64, [f64; SUMS]) {
        let &Pair { log_probs: [chosen, rejected, prompt], reference, counts: [of_chosen, of_rejected, of_prompt] } =
            pair;
        let logits = (chosen - reference[0]) - (rejected - reference[1]);
        let opposite = |loss: f64, slope: f64| (loss, [slope, -slope, 0.0]);
        let (means, each) = ([chosen / of_chosen, rejected / of_rejected], [1.0 / of_chosen, 1.0 / of_rejected]);
        match self {
            Self::Sigmoid { beta } => opposite(softplus(-beta * logits), -beta * sigmoid(-beta * logits)),
            Self::Hinge { beta } => match 1.0 - beta * logits {
                loss if loss <= 0.0 => (0.0, [0.0; SUMS]),
                loss => opposite(loss, -beta),
            },
            Self::Ipo { beta } => {
                let logits = (chosen - reference[0]) * each[0] - (rejected - reference[1]) * each[1];
                let error = logits - 0.5 / beta;
                (error * error, [2.0 * error * each[0], -2.0 * error * each[1], 0.0])
            }
            Self::Robust { beta, label_smoothing } => {
                let (scaled, scale) = (beta * logits, 1.0 / (1.0 - 2.0 * label_smoothing));
                let loss = (1.0 - label_smoothing) * softplus(-scaled) - label_smoothing * softplus(scaled);
                let slope = (1.0 - label_smoothing) * sigmoid(-scaled) + label_smoothing * sigmoid(scaled);
                opposite(loss * scale, -beta * slope * scale)
            }
            Self::Orpo { beta } => {
                // ln(1 − e^m) for m < 0.
                let log1mexp = |mean: f64| libm::log(-libm::expm1(mean));
                let log_odds = (means[0] - means[1]) - (log1mexp(means[0]) - log1mexp(means[1]));
                let of_all = of_chosen + of_prompt;
                let loss = -(chosen + prompt) / of_all + beta * softplus(-log_odds);
                // d ln odds/dm = 1/(1 − e^m).
                let slope = |i: usize| -beta * sigmoid(-log_odds) * each[i] / -libm::expm1(means[i]);
                (loss, [slope(0) - 1.0 / of_all, -slope(1), -1.0 / of_all])
            }
            Self::SimPo { beta, gamma } => {
                let scaled = beta * (means[0] - means[1]) - gamma;
                let slope = -beta * sigmoid(-scaled);
                (softplus(-scaled), [slope * each[0], -slope * each[1], 0.0])
            }
        }
    }
}

/// Returns the mean [`PreferenceLoss`] over pairs, an f32 scalar. Computes in f64.
///
/// `log_probs` is `[pairs, 3]` in f32, as [`linear_log_probs`](crate::linear_log_probs) computes it: the sums of
/// log-probabilities of the chosen answer, the rejected answer, and the prompt before the chosen answer. Only ORPO
/// reads the last one. `counts` is `[pairs, 3]` in f32, the number of tokens of each. `reference` is `[pairs, 2]` in
/// f32, the log-probabilities of both answers under the reference model.
///
/// # Errors
/// Fails if shapes or dtypes do not match, or an answer has no tokens.
pub fn preference_loss(
    log_probs: &Tensor,
    reference: &Tensor,
    counts: &Tensor,
    loss: PreferenceLoss,
) -> Result<Tensor> {
    let pairs = log_probs.dim(0)?;
    let (reference, counts) = (reference.clone(), counts.clone());
    if pairs == 0 || log_probs.dims2()?.1 != SUMS || reference.dims2()? != (pairs, 2) {
        bail!(
            "{OP}: log-probabilities {:?} and those of the reference {:?} do not match",
            log_probs.shape(),
            reference.shape()
        );
    }
    if counts.dims() != log_probs.dims() {
        bail!("{OP}: log-probabilities {:?} and counts {:?} do not match", log_probs.shape(), counts.shape());
    }
    apply([log_probs], Preference { reference, counts, loss })
}

const OP: &str = "preference-loss";

struct Preference {
    reference: Tensor,
    counts: Tensor,
    loss: PreferenceLoss,
}

struct Pair {
    log_probs: [f64; SUMS],
    reference: [f64; 2],
    counts: [f64; SUMS],
}

impl Preference {
    /// Returns the loss of each pair and its derivatives.
    fn each(&self, log_probs: &[f32]) -> Result<Vec<(f64, [f64; SUMS])>> {
        let values = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<f32>();
        let (reference, counts) = (values(&self.reference)?, values(&self.counts)?);
        let pairs = log_probs.chunks_exact(SUMS).zip(reference.chunks_exact(2)).zip(counts.chunks_exact(SUMS));
        let mut losses = Vec::with_capacity(log_probs.len() / SUMS);
        for ((log_probs, reference), counts) in pairs {
            if counts[0] < 1.0 || counts[1] < 1.0 {
                bail!("{OP}: an answer of pair {} has no tokens", losses.len());
            }
            let wide = |values: &[f32], at: usize| f64::from(values[at]);
            losses.push(self.loss.of(&Pair {
                log_probs: [0, 1, 2].map(|at| wide(log_probs, at)),
                reference: [0, 1].map(|at| wide(reference, at)),
                counts: [0, 1, 2].map(|at| wide(counts, at)),
            }));
        }
        Ok(losses)
    }
}

/// Returns ln(1 + eˣ).
fn softplus(x: f64) -> f64 {
    x.max(0.0) + libm::log1p(libm::exp(-x.abs()))
}

/// Returns 1/(1 + e⁻ˣ).
fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + libm::exp(-x))
}

impl Footprint for Preference {
    const READS: Reads = Reads::inputs([true, false, false]);

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let pairs = inputs[0].dim(0)?;
        let each = floats((2 * (1 + SUMS) + 2 + SUMS) * pairs);
        Ok(Costs { forward: each, backward: each + floats(SUMS * pairs), ..Costs::new((), DType::F32) })
    }
}

impl Op<1> for Preference {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, [(storage, layout)]: Inputs<'_, CpuStorage, 1>) -> Result<(CpuStorage, Shape)> {
        let losses = self.each(&f32s(OP, storage, layout)?)?;
        let mean = losses.iter().map(|(loss, _)| loss).sum::<f64>() / losses.len() as f64;
        Ok((CpuStorage::F32(vec![mean as f32]), Shape::from(())))
    }

    fn bwd(&self, [log_probs]: [&Tensor; 1], _: &Tensor, d_loss: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let d_loss = f64::from(d_loss.to_dtype(DType::F32)?.to_scalar::<f32>()?);
        let losses = self.each(&log_probs.flatten_all()?.to_vec1::<f32>()?)?;
        let factor = d_loss / losses.len() as f64;
        let slopes = losses.iter().flat_map(|(_, slopes)| slopes).map(|slope| (slope * factor) as f32).collect();
        Ok([Some(tensor(CpuStorage::F32(slopes), log_probs.shape()))])
    }
}
