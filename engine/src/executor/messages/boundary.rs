//! Describes the tensors that cross a boundary between stages, and encodes them for an announcement.

use candle_core::DType;

use crate::executor::tensor_bytes::{dtype_code, dtype_of};

/// The tensors that cross the boundary before a layer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Boundary {
    pub(super) tensors: Vec<(DType, Vec<usize>)>,
    /// For each tensor, whether it has a gradient; `None` until the first backward.
    pub(super) gradients: Option<Vec<bool>>,
}

impl Boundary {
    /// Bytes of one micro-batch's tensors.
    pub(crate) fn bytes(&self) -> usize {
        self.tensors.iter().map(bytes).sum()
    }

    /// Bytes of one micro-batch's gradients.
    pub(crate) fn gradient_bytes(&self) -> usize {
        let with_gradient = self.gradients.iter().flatten().zip(&self.tensors).filter(|(has, _)| **has);
        with_gradient.map(|(_, tensor)| bytes(tensor)).sum()
    }

    /// Bytes of the announcement before the first activations.
    pub(crate) fn announcement_bytes(&self) -> usize {
        8 + 8 * words(&self.tensors).len()
    }

    /// Bytes of the announcement before the first gradients.
    pub(crate) fn gradient_announcement_bytes(&self) -> usize {
        8 * self.tensors.len()
    }
}

fn bytes((dtype, dims): &(DType, Vec<usize>)) -> usize {
    dims.iter().product::<usize>() * dtype.size_in_bytes()
}

/// Encodes dtypes and shapes for an announcement: for each tensor, dtype code, number of dimensions, dimensions.
pub(super) fn words(tensors: &[(DType, Vec<usize>)]) -> Vec<i64> {
    let of = |(dtype, dims): &(DType, Vec<usize>)| {
        [dtype_code(*dtype), dims.len() as i64].into_iter().chain(dims.iter().map(|&d| d as i64)).collect::<Vec<_>>()
    };
    tensors.iter().flat_map(of).collect()
}

pub(super) fn tensors(words: &[i64]) -> Option<Vec<(DType, Vec<usize>)>> {
    let (mut rest, mut tensors) = (words, vec![]);
    while let [code, dims, behind @ ..] = rest {
        let (dims, behind) = behind.split_at_checked(usize::try_from(*dims).ok()?)?;
        let dims = dims.iter().map(|&d| usize::try_from(d).ok()).collect::<Option<_>>()?;
        tensors.push((dtype_of(*code)?, dims));
        rest = behind;
    }
    rest.is_empty().then_some(tensors)
}

pub(super) fn with_gradient(boundary: &Boundary) -> impl Iterator<Item = &(DType, Vec<usize>)> {
    let has = boundary.gradients.iter().flatten();
    boundary.tensors.iter().zip(has).filter(|(_, has)| **has).map(|(tensor, _)| tensor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announcements_round_trip() {
        let all =
            vec![(DType::F32, vec![2, 3, 4]), (DType::I64, vec![]), (DType::BF16, vec![0, 7]), (DType::U32, vec![5])];
        assert_eq!(tensors(&words(&all)), Some(all.clone()));
        assert_eq!(tensors(&[]), Some(vec![]));
        for broken in [&words(&all)[..3], &[99, 0], &[0, -1], &[0, 1], &[0]] {
            assert_eq!(tensors(broken), None, "{broken:?}");
        }
        let boundary = Boundary { tensors: all, gradients: Some(vec![true, false, true, false]) };
        assert_eq!((boundary.bytes(), boundary.gradient_bytes()), (24 * 4 + 8 + 5 * 4, 24 * 4));
    }
}
