//! How a parameter is cut: which of its elements each rank of a tensor group has.

use crate::flag::Replaced;
use candle_core::{Result, Shape, Tensor, bail};
use candle_nn::{Init, VarBuilder};
use std::cell::RefCell;
use std::ops::Range;

/// The share of a parameter that one rank of a tensor group has. The parameter is cut along one dimension.
///
/// The dimension consists of one or more *parts*, such as queries, keys and values in one weight. Each rank has one
/// slice of each part, with ⌈length / ranks⌉ indices. Where a part does not divide evenly, the last slices are shorter.
/// The local tensor is then padded behind its last element, so that it has the same shape on all ranks.
///
/// The dimension can begin with indices that all ranks share, such as the scales of a quantized weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    whole: Vec<usize>,
    dimension: usize,
    shared: usize,
    parts: Vec<usize>,
    index: usize,
    ranks: usize,
}

/// Consecutive elements of a local tensor, and their place in the whole tensor. Indices are row-major.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// The elements of the local tensor.
    pub local: Range<usize>,
    /// Index of the first of these elements in the whole tensor.
    pub whole: usize,
}

impl Cut {
    /// Cuts a tensor of shape `whole` along `dimension`, which is the concatenation of `parts`, and returns the part of
    /// rank `index` of `ranks`.
    ///
    /// # Errors
    /// Fails if the parts do not make up the dimension, or do not divide evenly. Only the first dimension may be
    /// uneven, and only as a single part.
    pub fn new(whole: &[usize], dimension: usize, parts: &[usize], place: (usize, usize)) -> Result<Self> {
        Self::after_shared(0, whole, dimension, parts, place)
    }

    /// Cuts a tensor whose dimension begins with `shared` indices that every rank has. The parts follow them.
    ///
    /// # Errors
    /// Fails in the same cases as [`Cut::new`].
    pub fn after_shared(
        shared: usize,
        whole: &[usize],
        dimension: usize,
        parts: &[usize],
        (index, ranks): (usize, usize),
    ) -> Result<Self> {
        let cut = Self { whole: whole.to_vec(), dimension, shared, parts: parts.to_vec(), index, ranks };
        let sum = parts.iter().try_fold(shared, |sum, &part| sum.checked_add(part));
        if index >= ranks || sum.is_none() || whole.get(dimension) != sum.as_ref() {
            bail!("{whole:?} cannot be split along dimension {dimension} into {parts:?} and across {ranks} ranks");
        }
        let is_even = parts.iter().all(|part| part.is_multiple_of(ranks));
        if !is_even && (dimension > 0 || parts.len() > 1) {
            bail!("dimension {dimension} of {whole:?} cannot be divided evenly among {ranks} ranks");
        }
        Ok(cut)
    }

    /// Returns the same cut from the view of rank `index`.
    #[must_use]
    pub fn of(&self, index: usize) -> Self {
        Self { index, ..self.clone() }
    }

    /// Returns the shape of the whole tensor.
    #[must_use]
    pub fn whole(&self) -> &[usize] {
        &self.whole
    }

    /// Returns the dimension that is cut.
    #[must_use]
    pub fn dimension(&self) -> usize {
        self.dimension
    }

    /// Returns the number of indices at the start of the dimension that all ranks share.
    #[must_use]
    pub fn shared(&self) -> usize {
        self.shared
    }

    /// Returns the lengths of the parts of the dimension.
    #[must_use]
    pub fn parts(&self) -> &[usize] {
        &self.parts
    }

    /// Returns the index of the rank in its group.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Returns the shape of the local tensor, which is the same on all ranks.
    #[must_use]
    pub fn shape(&self) -> Shape {
        let mut dims = self.whole.clone();
        dims[self.dimension] = self.shared + self.parts.iter().map(|part| part.div_ceil(self.ranks)).sum::<usize>();
        dims.into()
    }

    /// Returns this rank's ranges of the dimension, in order.
    pub fn ranges(&self) -> Vec<Range<usize>> {
        let mut start = self.shared;
        let range = |&part: &usize| {
            let own = share(part, (self.index, self.ranks));
            let first = start;
            start += part;
            first + own.start..first + own.end
        };
        let shared = (self.shared > 0).then_some(0..self.shared);
        shared.into_iter().chain(self.parts.iter().map(range)).collect()
    }

    /// Returns the number of local elements that are part of the whole tensor. They come first; the rest is padding.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.outer() * self.row()
    }

    /// Returns the places of a range of local elements in the whole tensor, in order and without padding.
    #[must_use]
    pub fn runs(&self, local: Range<usize>) -> Vec<Run> {
        let row = self.row();
        let outer = local.start / row.max(1)..local.end.div_ceil(row.max(1)).min(self.outer());
        self.blocks(outer)
            .filter_map(|Run { local: block, whole }| {
                let (start, end) = (block.start.max(local.start), block.end.min(local.end));
                (start < end).then(|| Run { local: start..end, whole: whole + (start - block.start) })
            })
            .collect()
    }

    /// Returns which elements of a range of the whole tensor are local, in order.
    #[must_use]
    pub fn runs_of_whole(&self, whole: Range<usize>) -> Vec<Run> {
        let row = self.whole[self.dimension] * self.inner();
        let outer = whole.start / row.max(1)..whole.end.div_ceil(row.max(1)).min(self.outer());
        self.blocks(outer)
            .filter_map(|Run { local, whole: first }| {
                let (start, end) = (first.max(whole.start), (first + local.len()).min(whole.end));
                let begin = local.start + start.saturating_sub(first);
                (start < end).then(|| Run { local: begin..begin + (end - start), whole: start })
            })
            .collect()
    }

    /// Returns the contiguous blocks for a range of row-major indices over the dimensions before the cut one.
    fn blocks(&self, outer: Range<usize>) -> impl Iterator<Item = Run> {
        let (inner, ranges, dimension) = (self.inner(), self.ranges(), self.whole[self.dimension]);
        let row = self.row();
        outer.flat_map(move |outer| {
            let mut local = outer * row;
            let block = |range: &Range<usize>| {
                let first = local;
                local += range.len() * inner;
                Run { local: first..local, whole: (outer * dimension + range.start) * inner }
            };
            ranges.iter().map(block).collect::<Vec<_>>()
        })
    }

    /// Returns the number of local elements for each index over the dimensions before the cut one.
    fn row(&self) -> usize {
        self.ranges().iter().map(Range::len).sum::<usize>() * self.inner()
    }

    fn outer(&self) -> usize {
        self.whole[..self.dimension].iter().product()
    }

    fn inner(&self) -> usize {
        self.whole[self.dimension + 1..].iter().product()
    }
}

/// Returns the indices of a part that rank `index` of `ranks` has.
fn share(part: usize, (index, ranks): (usize, usize)) -> Range<usize> {
    let share = part.div_ceil(ranks);
    index.saturating_mul(share).min(part)..(index + 1).saturating_mul(share).min(part)
}

/// The entries of a vocabulary that one rank of a tensor group has.
#[derive(Clone, Debug)]
pub(crate) struct OwnEntries {
    own: Range<usize>,
    /// Number of entries of the whole vocabulary.
    pub(crate) all: usize,
}

impl OwnEntries {
    /// Returns the entries of this rank while layers are built for a tensor group.
    pub(crate) fn of(all: usize) -> Option<Self> {
        cutting().map(|place| Self { own: share(all, place), all })
    }

    /// Returns the number of entries of this rank. Further rows of its table are padding.
    pub(crate) fn len(&self) -> usize {
        self.own.len()
    }

    /// Returns the range of this rank's entries in the whole vocabulary.
    #[cfg(feature = "cuda")]
    pub(crate) fn range(&self) -> &Range<usize> {
        &self.own
    }

    /// Returns the index of an entry among this rank's entries, or `None` if another rank has it.
    pub(crate) fn place(&self, entry: usize) -> Option<usize> {
        self.own.contains(&entry).then(|| entry - self.own.start)
    }
}

thread_local! {
    static CUTTING: RefCell<Option<(usize, usize)>> = const { RefCell::new(None) };
    static ASKING: RefCell<Option<Cut>> = const { RefCell::new(None) };
}

/// Builds layers whose parameters are cut among the ranks of a tensor group, for rank `index` of `ranks`.
pub fn with_cuts<T>((index, ranks): (usize, usize), build: impl FnOnce() -> T) -> T {
    let _cutting = Replaced::with(&CUTTING, (ranks > 1).then_some((index, ranks)));
    build()
}

/// Returns this rank's index and the number of ranks among which parameters are cut while layers are built, or `None`
/// if parameters are whole.
#[must_use]
pub fn cutting() -> Option<(usize, usize)> {
    CUTTING.with_borrow(|cutting| *cutting)
}

/// Returns how the parameter that a layer is requesting from a `VarBuilder` is cut, or `None` if it is whole. The
/// requested shape is the shape of the local tensor.
#[must_use]
pub fn asks_cut() -> Option<Cut> {
    ASKING.with_borrow(Clone::clone)
}

/// Requests a parameter of shape `whole`. While layers are built for a tensor group, the parameter is cut along
/// `dimension`, which is the concatenation of `parts`, and this function returns the local tensor. The parts must
/// divide evenly, unless `dimension` is the first one and has a single part.
///
/// # Errors
/// Fails in the same cases as [`Cut::new`]. Returns errors of the builder.
pub fn get_cut(
    vb: &VarBuilder,
    whole: &[usize],
    (dimension, parts): (usize, &[usize]),
    name: &str,
    init: Init,
) -> Result<Tensor> {
    get_part(vb, whole, cut_of(vb, whole, (dimension, parts))?, name, init)
}

/// Requests the part of a parameter that `cut` describes, or the whole parameter.
pub(crate) fn get_part(vb: &VarBuilder, whole: &[usize], cut: Option<Cut>, name: &str, init: Init) -> Result<Tensor> {
    let shape = cut.as_ref().map_or_else(|| Shape::from(whole), Cut::shape);
    let _asking = Replaced::with(&ASKING, cut);
    vb.get_with_hints(shape, name, init)
}

/// Returns how a parameter is cut along a dimension, or `None` if layers are not built for a tensor group.
pub(crate) fn cut_of(vb: &VarBuilder, whole: &[usize], (dimension, parts): (usize, &[usize])) -> Result<Option<Cut>> {
    let cut = |place| Cut::new(whole, dimension, parts, place).map_err(|e| e.context(vb.prefix()));
    cutting().map(cut).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asserts that all ranks together have every element of the whole tensor once, and that `runs` and `runs_of_whole`
    /// agree.
    #[track_caller]
    fn assert_covered(whole: &[usize], dimension: usize, parts: &[usize], ranks: usize) {
        let elements: usize = whole.iter().product();
        let mut seen = vec![0; elements];
        for index in 0..ranks {
            let cut = Cut::new(whole, dimension, parts, (index, ranks)).unwrap();
            assert_eq!(cut.shape(), Cut::new(whole, dimension, parts, (0, ranks)).unwrap().shape());
            let mut next = 0;
            for Run { local, whole } in cut.runs(0..cut.shape().elem_count()) {
                assert_eq!(local.start, next);
                next = local.end;
                seen[whole..whole + local.len()].iter_mut().for_each(|count| *count += 1);
                assert_eq!(cut.runs_of_whole(whole..whole + local.len()), [Run { local, whole }]);
            }
            assert_eq!(next, cut.elements());
            // The runs of any range are a part of the runs of all elements.
            let places: Vec<usize> =
                cut.runs(0..next).into_iter().flat_map(|run| run.whole..run.whole + run.local.len()).collect();
            for (start, end) in [(0, 1), (1, next), (next / 3, 2 * next / 3), (next / 2, next)] {
                let part: Vec<usize> = cut
                    .runs(start..end.max(start))
                    .into_iter()
                    .flat_map(|run| run.whole..run.whole + run.local.len())
                    .collect();
                assert_eq!(part, places[start.min(next)..end.min(next).max(start.min(next))]);
            }
        }
        assert!(seen.iter().all(|&count| count == 1), "{seen:?}");
    }

    #[test]
    fn every_element_is_in_one_part() {
        assert_covered(&[12, 5], 0, &[12], 4);
        assert_covered(&[5, 12], 1, &[12], 3);
        assert_covered(&[18, 4], 0, &[6, 6, 6], 3);
        assert_covered(&[4, 16], 1, &[8, 4, 4], 2);
        assert_covered(&[3, 6, 4], 1, &[6], 2);
        assert_covered(&[7], 0, &[7], 2);
        // In this case the last rank has only padding.
        assert_covered(&[5, 3], 0, &[5], 4);
    }

    #[test]
    fn shared_indices_are_on_every_rank() {
        let cut = |index| Cut::after_shared(2, &[2, 8], 1, &[6], (index, 3)).unwrap();
        assert_eq!(cut(1).shape().dims(), [2, 4]);
        assert_eq!(cut(1).ranges(), [0..2, 4..6]);
        let runs = [(0..2, 0), (2..4, 4), (4..6, 8), (6..8, 12)].map(|(local, whole)| Run { local, whole });
        assert_eq!(cut(1).runs(0..8), runs);
        for index in 0..3 {
            let first = [Run { local: 0..2, whole: 0 }, Run { local: 4..6, whole: 8 }];
            assert_eq!([cut(index).runs_of_whole(0..2), cut(index).runs_of_whole(8..10)].concat(), first);
        }
        assert_eq!(cut(2).runs_of_whole(2..6), []);
        assert!(Cut::after_shared(2, &[2, 8], 1, &[8], (0, 2)).is_err());
        assert!(Cut::after_shared(usize::MAX, &[2, 8], 1, &[8], (0, 2)).is_err());
    }

    #[test]
    fn invalid_cuts_are_errors() {
        for (whole, dimension, parts, place) in [
            (&[4, 4][..], 2, &[4][..], (0, 2)),
            (&[4, 4], 0, &[3], (0, 2)),
            (&[4, 4], 0, &[4], (2, 2)),
            (&[4, 5], 1, &[5], (0, 2)),
            (&[5, 4], 0, &[2, 3], (0, 2)),
            (&[4, 4], 0, &[usize::MAX, 5], (0, 2)),
        ] {
            assert!(Cut::new(whole, dimension, parts, place).is_err(), "{whole:?} {parts:?}");
        }
    }
}
