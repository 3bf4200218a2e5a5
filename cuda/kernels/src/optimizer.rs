//! Optimizer steps over flat shards, and conversions between types. The norm that precedes a step is in
//! [`gradient_norm`](crate::gradient_norm).

use zero_optim::Factors;

use crate::launch::{Address, Dtype, Launch, Source};

/// Matches `UpdateRange` of `cu/optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct UpdateRange {
    params: Address,
    states: [Address; 2],
    grads: Address,
    working: Address,
    averages: Address,
    count: u64,
    first_block: u32,
    factors: u16,
    communicated: u16,
}

/// Matches `UpdateArgs` of `cu/optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateArgs {
    ranges: [UpdateRange; UPDATE_RANGES],
    factors: [[f32; Factors::MAX]; 2],
    verdict: Address,
    used: u32,
    formula: u32,
    average_weight: f32,
    limit: f32,
}

/// Matches `CastArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CastArgs {
    from: Address,
    to: Address,
    count: u64,
}

/// Matches `AddCommunicatedArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AddCommunicatedArgs {
    from: Address,
    to: Address,
    count: u64,
    from_communicated: u32,
    to_communicated: u32,
}

/// A range of elements that are updated in the same way.
#[derive(Clone, Copy, Debug)]
pub struct Updated {
    /// Master parameters, f32.
    pub params: Address,
    /// The optimizer's states, f32; 0 for states that it lacks.
    pub states: [Address; 2],
    /// Reduced gradients, f32.
    pub grads: Address,
    /// The type to which gradients are rounded when they are read.
    pub communicated: Dtype,
    /// The working parameters that layers read, written in the same pass; 0 if the layers read the master parameters.
    pub working: Address,
    /// Averages of the parameters, f32; 0 if there are none.
    pub averages: Address,
    /// Number of elements of each array.
    pub count: u64,
    /// Whether weight decay applies.
    pub decay: bool,
}

/// Maximum number of ranges of one launch.
pub const UPDATE_RANGES: usize = 60;
/// Number of elements per block.
const TILE: u64 = 4096;

/// Updates ranges in one pass. `with_decay` and `without` are the factors of one step, with and without weight decay.
/// If `verdict` is not 0, the verdict at that address provides the gradient scale and may skip the update. `working` is
/// the type of the working parameters. `average_weight` is the weight of the new parameters in their averages,
/// [`zero_optim::Average::weight`]. Returns `None` if there are no elements.
///
/// # Panics
/// Fails if there are more than [`UPDATE_RANGES`] ranges, or the two sets of factors have different formulas.
pub fn update(
    working: Dtype,
    [with_decay, without]: [&Factors; 2],
    updated: &[Updated],
    average_weight: f32,
    verdict: Address,
) -> Option<Launch<UpdateArgs>> {
    assert_eq!(with_decay.formula, without.formula, "one step has one formula");
    let mut ranges = [UpdateRange::default(); UPDATE_RANGES];
    let (mut used, mut blocks) = (0, 0);
    for range in updated.iter().filter(|range| range.count > 0) {
        let Updated { params, states, grads, communicated, working, averages, count, decay } = *range;
        let (factors, communicated) = (u16::from(!decay), communicated.number() as u16);
        let first_block = blocks;
        ranges[used] =
            UpdateRange { params, states, grads, working, averages, count, first_block, factors, communicated };
        blocks += count.div_ceil(TILE) as u32;
        used += 1;
    }
    let (factors, formula) = ([with_decay.values, without.values], with_decay.formula as u32);
    let limit = with_decay.grad_limit;
    let args = UpdateArgs { ranges, factors, verdict, used: used as u32, formula, average_weight, limit };
    (used > 0).then(|| Launch::new(Source::Optimizer, "update", working, [blocks, 1, 1], args))
}

/// Converts to f32, exactly.
pub fn widen(from_dtype: Dtype, count: u64, from: Address, to: Address) -> Option<Launch<CastArgs>> {
    Launch::over_packs(Source::Optimizer, "widen", from_dtype, count, CastArgs { from, to, count })
}

/// Converts from f32, rounded to nearest, ties to even.
pub fn narrow(to_dtype: Dtype, count: u64, from: Address, to: Address) -> Option<Launch<CastArgs>> {
    Launch::over_packs(Source::Optimizer, "narrow", to_dtype, count, CastArgs { from, to, count })
}

/// Computes to += from, where `to` is f32.
pub fn add_to(from_dtype: Dtype, count: u64, from: Address, to: Address) -> Option<Launch<CastArgs>> {
    Launch::over_packs(Source::Optimizer, "add_to", from_dtype, count, CastArgs { from, to, count })
}

/// Does the same as [`add_to`] for f32 gradients. `from` and `to` are rounded to the types `from_as` and `to_as` when
/// they are read.
pub fn add_communicated(
    count: u64,
    [from, to]: [Address; 2],
    [from_as, to_as]: [Dtype; 2],
) -> Option<Launch<AddCommunicatedArgs>> {
    let (from_communicated, to_communicated) = (from_as.number(), to_as.number());
    let args = AddCommunicatedArgs { from, to, count, from_communicated, to_communicated };
    let launch = Launch::over(Source::Optimizer, "", Dtype::F32, count, args)?;
    Some(Launch { entry: "add_communicated".into(), ..launch })
}
