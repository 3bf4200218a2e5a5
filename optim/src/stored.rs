//! The types in which an update reads and writes its values: f32 and bf16. An update computes bf16 values in f32 and
//! rounds each result once.

use half::bf16;

use crate::simd::LINE;

/// A type of parameters or states in memory: `f32` or `bf16`.
pub trait Stored: Copy + sealed::Convert {}

impl Stored for f32 {}
impl Stored for bf16 {}

pub(crate) mod sealed {
    /// Converts values between memory and registers. Implementations must be `#[inline(always)]`.
    pub trait Convert: Sized {
        /// Whether values are stored as f32.
        const IN_F32: bool;
        /// Returns the value, exactly.
        fn load(self) -> f32;
        /// Rounds a value to nearest, ties to even.
        fn rounded(value: f32) -> Self;
    }
}

impl sealed::Convert for f32 {
    const IN_F32: bool = true;

    #[inline(always)]
    fn load(self) -> f32 {
        self
    }

    #[inline(always)]
    fn rounded(value: f32) -> Self {
        value
    }
}

impl sealed::Convert for bf16 {
    const IN_F32: bool = false;

    #[inline(always)]
    fn load(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn rounded(value: f32) -> Self {
        let bits = value.to_bits();
        // Adds half of the last kept bit's unit, and 1 less if that bit is 0, so that ties go to even.
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet = (bits >> 16) | 0x0040;
        // One cast after the selection: selecting among u16 is slower with AVX2.
        bf16::from_bits(if value.is_nan() { quiet } else { rounded } as u16)
    }
}

#[inline(always)]
pub(crate) fn load_line<T: Stored>(line: &[T; LINE]) -> [f32; LINE] {
    std::array::from_fn(|k| line[k].load())
}

#[inline(always)]
pub(crate) fn store_line<T: Stored>(values: [f32; LINE], line: &mut [T; LINE]) {
    *line = values.map(T::rounded);
}

/// Loads a block.
#[inline(always)]
pub(crate) fn load<T: Stored, const BLOCK: usize>(block: &[T; BLOCK], values: &mut [f32; BLOCK]) {
    for (value, stored) in values.iter_mut().zip(block) {
        *value = stored.load();
    }
}

/// Stores a block, rounded.
#[inline(always)]
pub(crate) fn store<T: Stored, const BLOCK: usize>(values: &[f32; BLOCK], block: &mut [T; BLOCK]) {
    for (stored, value) in block.iter_mut().zip(values) {
        *stored = T::rounded(*value);
    }
}

#[cfg(test)]
mod tests {
    use zero_isa::Isa;

    use super::*;
    use crate::tests::OPTIMIZERS;
    use crate::{Optimizer, Step, rounded, update, update_at};

    fn wide(values: &[bf16]) -> Vec<f32> {
        values.iter().map(|value| value.to_f32()).collect()
    }

    /// An update in bf16 is bit-identical to an update in f32 whose results are rounded once. The test runs on every
    /// instruction set, and with lengths that are multiples of a block and lengths that are not.
    #[test]
    fn values_in_bf16_are_rounded_once() {
        for optimizer in &OPTIMIZERS {
            for n in [0, 5, 128, 128 * 3 + 37] {
                let values = |seed: usize| -> Vec<bf16> {
                    let of = |i: usize| ((i * i * 31 + i * 7 + seed * 113) % 1021) as f32 / 512.0 - 1.0;
                    rounded(&(0..n).map(of).collect::<Vec<_>>())
                };
                let grads = wide(&values(2));
                let step = Step { step: 7, lr: 1e-2, grad_scale: 0.7, grad_limit: 0.9, decay: true };
                let start: Vec<Vec<bf16>> = (0..optimizer.states().len())
                    .map(|state| values(3 + state).into_iter().map(|x| if x < bf16::ZERO { -x } else { x }).collect())
                    .collect();
                let (mut params, mut states) =
                    (wide(&values(1)), start.iter().map(|state| wide(state)).collect::<Vec<_>>());
                let mut slices: Vec<&mut [f32]> = states.iter_mut().map(Vec::as_mut_slice).collect();
                update(optimizer, &step, &mut params, &grads, &mut slices).unwrap();
                for isa in Isa::available() {
                    let (got, got_states) = narrow(isa, optimizer, &step, &values(1), &grads, &start);
                    assert_eq!(got, rounded::<bf16>(&params), "{optimizer:?}, {n}, {isa:?}: parameters");
                    for (got, want) in got_states.iter().zip(&states) {
                        assert_eq!(*got, rounded::<bf16>(want), "{optimizer:?}, {n}, {isa:?}: states");
                    }
                    let (mut half, mut half_states) = (wide(&values(1)), start.clone());
                    let mut slices: Vec<&mut [bf16]> = half_states.iter_mut().map(Vec::as_mut_slice).collect();
                    update_at(isa, optimizer, &step, &mut half, &grads, &mut slices).unwrap();
                    assert_eq!(
                        (half, half_states),
                        (params.clone(), got_states),
                        "{optimizer:?}, {n}, {isa:?}: parameters in f32"
                    );
                }
            }
        }
    }

    fn narrow(
        isa: Isa,
        optimizer: &Optimizer,
        step: &Step,
        params: &[bf16],
        grads: &[f32],
        states: &[Vec<bf16>],
    ) -> (Vec<bf16>, Vec<Vec<bf16>>) {
        let (mut params, mut states) = (params.to_vec(), states.to_vec());
        let mut slices: Vec<&mut [bf16]> = states.iter_mut().map(Vec::as_mut_slice).collect();
        update_at(isa, optimizer, step, &mut params, grads, &mut slices).unwrap();
        (params, states)
    }
}
