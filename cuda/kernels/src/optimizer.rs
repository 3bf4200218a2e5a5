//! A step of an optimizer over flat shards, and numbers from one type into another. The norm that comes before it is in
//! [`gradient_norm`](crate::gradient_norm).

use zero_optim::Factors;

use crate::launch::{Address, Dtype, Launch, Source};

/// `UpdateRange` of `cu/optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct UpdateRange {
    params: Address,
    states: [Address; 2],
    grads: Address,
    working: Address,
    count: u64,
    first_block: u32,
    factors: u16,
    travelled: u16,
}

/// `UpdateArgs` of `cu/optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateArgs {
    ranges: [UpdateRange; UPDATE_RANGES],
    factors: [[f32; 8]; 2],
    verdict: Address,
    used: u32,
    formula: u32,
}

/// `CastArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CastArgs {
    from: Address,
    to: Address,
    count: u64,
}

/// `AddTravelledArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AddTravelledArgs {
    from: Address,
    to: Address,
    count: u64,
    from_travelled: u32,
    to_travelled: u32,
}

/// Elements that one pass updates alike.
#[derive(Clone, Copy, Debug)]
pub struct Updated {
    /// Master parameters, f32.
    pub params: Address,
    /// The optimizer's states, f32; 0 for those that it does not have.
    pub states: [Address; 2],
    /// Reduced gradients, f32.
    pub grads: Address,
    /// The type to which gradients are rounded when they are read.
    pub travelled: Dtype,
    /// The parameters that layers read, which are written in passing; 0 if those are the masters.
    pub working: Address,
    /// Elements of each.
    pub count: u64,
    /// Whether weight decay applies.
    pub decay: bool,
}

/// Ranges that one launch takes at most.
pub const UPDATE_RANGES: usize = 64;
/// Elements of a block.
const TILE: u64 = 4096;

/// One pass over ranges. `with_decay` and `without` are the factors of one step; where `verdict` is not 0, the verdict there has the
/// scale of gradients, and may say that nothing is updated. `working` is the type of the parameters that layers read. `None` if there are no
/// elements.
///
/// # Panics
/// There are more than [`UPDATE_RANGES`] ranges, or the factors are of two formulas.
pub fn update(
    working: Dtype,
    [with_decay, without]: [&Factors; 2],
    updated: &[Updated],
    verdict: Address,
) -> Option<Launch<UpdateArgs>> {
    assert_eq!(with_decay.formula, without.formula, "one step has one formula");
    let mut ranges = [UpdateRange::default(); UPDATE_RANGES];
    let (mut used, mut blocks) = (0, 0);
    for range in updated.iter().filter(|range| range.count > 0) {
        let Updated { params, states, grads, travelled, working, count, decay } = *range;
        let (factors, travelled) = (u16::from(!decay), travelled.number() as u16);
        ranges[used] = UpdateRange { params, states, grads, working, count, first_block: blocks, factors, travelled };
        blocks += count.div_ceil(TILE) as u32;
        used += 1;
    }
    let (factors, formula) = ([with_decay.values, without.values], with_decay.formula as u32);
    let args = UpdateArgs { ranges, factors, verdict, used: used as u32, formula };
    (used > 0).then(|| Launch::new(Source::Optimizer, "update", working, [blocks, 1, 1], args))
}

/// To f32, exactly.
pub fn widen(from_dtype: Dtype, count: u64, from: Address, to: Address) -> Option<Launch<CastArgs>> {
    Launch::over_packs(Source::Optimizer, "widen", from_dtype, count, CastArgs { from, to, count })
}

/// From f32, rounded to nearest, ties to even.
pub fn narrow(to_dtype: Dtype, count: u64, from: Address, to: Address) -> Option<Launch<CastArgs>> {
    Launch::over_packs(Source::Optimizer, "narrow", to_dtype, count, CastArgs { from, to, count })
}

/// to += from, where `to` is f32.
pub fn add_to(from_dtype: Dtype, count: u64, from: Address, to: Address) -> Option<Launch<CastArgs>> {
    Launch::over_packs(Source::Optimizer, "add_to", from_dtype, count, CastArgs { from, to, count })
}

/// The same where gradients, f32 both, are rounded to a type when they are read.
pub fn add_travelled(
    count: u64,
    [from, to]: [Address; 2],
    [from_as, to_as]: [Dtype; 2],
) -> Option<Launch<AddTravelledArgs>> {
    let (from_travelled, to_travelled) = (from_as.number(), to_as.number());
    let args = AddTravelledArgs { from, to, count, from_travelled, to_travelled };
    let launch = Launch::over(Source::Optimizer, "", Dtype::F32, count, args)?;
    Some(Launch { entry: "add_travelled".into(), ..launch })
}
