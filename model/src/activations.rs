//! Activations: the tensors that layers pass to each other.

use candle_core::{Result, Tensor};

/// The values passed between layers: one or more tensors.
#[derive(Debug, Clone, Default)]
pub struct Activations(Vec<Tensor>);

impl Activations {
    /// Creates activations from several tensors.
    #[must_use]
    pub fn new(tensors: Vec<Tensor>) -> Self {
        Self(tensors)
    }

    /// Returns the only tensor.
    ///
    /// # Errors
    /// Fails if there is not exactly one tensor.
    pub fn single(&self) -> Result<&Tensor> {
        match self.0.as_slice() {
            [one] => Ok(one),
            many => candle_core::bail!("a layer expects one tensor, but got {} tensors", many.len()),
        }
    }

    /// Returns all tensors as an array of `N`.
    ///
    /// # Errors
    /// Fails if the number of tensors is not `N`.
    pub fn array<const N: usize>(&self) -> Result<[&Tensor; N]> {
        array(&self.0)
    }

    /// Returns all tensors.
    #[must_use]
    pub fn tensors(&self) -> &[Tensor] {
        &self.0
    }
}

impl From<Tensor> for Activations {
    fn from(tensor: Tensor) -> Self {
        Self(vec![tensor])
    }
}

/// Returns references to the tensors of a slice, which must have length `N`.
pub(crate) fn array<const N: usize>(tensors: &[Tensor]) -> Result<[&Tensor; N]> {
    match <&[Tensor; N]>::try_from(tensors) {
        Ok(tensors) => Ok(tensors.each_ref()),
        Err(_) => candle_core::bail!("{N} tensors are expected, but {} were given", tensors.len()),
    }
}
