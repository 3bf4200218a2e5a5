//! Ready metrics for [`Trainer::metric`](crate::Trainer::metric).

use candle_core::{D, DType, Result, Tensor};

/// Computes the share of targets that equal the class with the highest score. `scores` has the shape `[…, classes]`,
/// and `targets` and the result have the shape `[…]`. The result is 1 or 0 for each target. Losses ignore targets of
/// −100; here they count as wrong.
///
/// # Errors
/// Fails if the shapes do not match.
pub fn accuracy(scores: &Tensor, targets: &Tensor) -> Result<Tensor> {
    scores.argmax(D::Minus1)?.eq(&targets.to_dtype(DType::U32)?)?.to_dtype(DType::F32)
}

/// Computes the squared error of each number.
///
/// # Errors
/// Fails if the shapes do not match.
pub fn squared_error(outputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
    (outputs - targets)?.sqr()
}

/// Computes the absolute error of each number.
///
/// # Errors
/// Fails if the shapes do not match.
pub fn absolute_error(outputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
    (outputs - targets)?.abs()
}
