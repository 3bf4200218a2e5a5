//! Ready metrics for [`Trainer::metric`](crate::Trainer::metric).

use candle_core::{D, DType, Result, Tensor};

/// Share of targets that are the class with the highest score: scores `[…, classes]`, targets `[…]`. Gives 1 or 0 for each target.
///
/// # Errors
/// Shapes that do not fit.
pub fn accuracy(scores: &Tensor, targets: &Tensor) -> Result<Tensor> {
    scores.argmax(D::Minus1)?.eq(&targets.to_dtype(DType::U32)?)?.to_dtype(DType::F32)
}

/// Squared error of each number.
///
/// # Errors
/// Shapes that do not fit.
pub fn squared_error(outputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
    (outputs - targets)?.sqr()
}

/// Absolute error of each number.
///
/// # Errors
/// Shapes that do not fit.
pub fn absolute_error(outputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
    (outputs - targets)?.abs()
}
