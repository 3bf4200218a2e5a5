//! The loss scale for training in f16: a factor of the loss that keeps gradients from underflowing and overflowing.
//!
//! It is a state machine with one transition per step. The rules and names come from DeepSpeed's `DynamicLossScaler`
//! (`deepspeed/runtime/fp16/loss_scaler.py`), which DeepSpeed's ZeRO stages use; here they apply at every stage.

/// The options of a [`LossScaler`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LossScaling {
    /// A constant scale. A step that overflows is skipped, and the scale stays the same.
    Static(f64),
    /// A scale that adapts to overflows.
    Dynamic(DynamicLossScale),
}

/// The rules by which a dynamic scale adapts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DynamicLossScale {
    /// The scale of the first step.
    pub initial: f64,
    /// The scale doubles after each `window` steps without overflow. The first step of the run and the first step after
    /// an overflow do not count. At least 1.
    pub window: u64,
    /// The number of overflows after which the scale halves. Further overflows also halve it until the count is reset.
    /// At least 1.
    pub hysteresis: u64,
    /// Whether every step without overflow resets the count of overflows. If false, only a doubling of the scale resets
    /// it.
    pub consecutive: bool,
    /// The smallest scale. An overflow that would reduce the scale below it gives [`Exhausted`].
    pub min: f64,
}

/// The state that a [`LossScaler`] carries from one step to the next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScaleState {
    /// The scale of the next step.
    pub scale: f64,
    /// Number of steps so far, including skipped ones.
    pub steps: u64,
    /// Number of the last step that overflowed, counted from 1; 0 if none did.
    pub last_overflow: u64,
    /// Number of overflows left until the scale halves, including the one that halves it.
    pub hysteresis: u64,
}

/// Gradients overflowed at the smallest allowed scale.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("gradients overflow although the loss scale is {scale}, the smallest allowed")]
pub struct Exhausted {
    /// The current scale.
    pub scale: f64,
}

/// The loss scale over a run. Ranks that see the same overflows have the same scale.
///
/// ```
/// use zero_optim::{DynamicLossScale, LossScaler, LossScaling};
///
/// let options = DynamicLossScale { initial: 65536.0, window: 1000, hysteresis: 1, consecutive: false, min: 1.0 };
/// let mut scaler = LossScaler::new(LossScaling::Dynamic(options));
/// scaler.update(true)?;
/// assert_eq!(scaler.scale(), 32768.0);
/// # Ok::<(), zero_optim::loss_scale::Exhausted>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScaler {
    scaling: LossScaling,
    state: LossScaleState,
}

impl LossScaler {
    /// Creates a scaler for the first step.
    #[must_use]
    pub fn new(scaling: LossScaling) -> Self {
        let (scale, hysteresis) = match scaling {
            LossScaling::Static(scale) => (scale, 1),
            LossScaling::Dynamic(dynamic) => (dynamic.initial, dynamic.hysteresis),
        };
        Self { scaling, state: LossScaleState { scale, steps: 0, last_overflow: 0, hysteresis } }
    }

    /// Returns the factor for the loss of the next step.
    #[must_use]
    pub fn scale(&self) -> f64 {
        self.state.scale
    }

    /// Returns whether the scale adapts to overflows.
    #[must_use]
    pub fn is_dynamic(&self) -> bool {
        matches!(self.scaling, LossScaling::Dynamic(_))
    }

    /// Returns the state that a checkpoint stores.
    #[must_use]
    pub fn state(&self) -> LossScaleState {
        self.state
    }

    /// Restores the state from a checkpoint. Values that this scaler's options do not allow are adjusted: a static
    /// scale keeps its value, and a dynamic scale stays at or above its minimum.
    pub fn restore(&mut self, state: LossScaleState) {
        if let LossScaling::Dynamic(options) = self.scaling {
            let scale = if state.scale.is_finite() { state.scale.max(options.min) } else { options.initial };
            let hysteresis = state.hysteresis.clamp(1, options.hysteresis.max(1));
            self.state =
                LossScaleState { scale, hysteresis, last_overflow: state.last_overflow.min(state.steps), ..state };
        }
    }

    /// Records whether the gradients of a step overflowed, so that the step was skipped.
    ///
    /// # Errors
    /// Fails if the scale would fall below its minimum; the state is unchanged then.
    pub fn update(&mut self, overflow: bool) -> Result<(), Exhausted> {
        let LossScaling::Dynamic(options) = self.scaling else { return Ok(()) };
        let state = &mut self.state;
        match overflow {
            true if options.hysteresis <= 1 || state.hysteresis <= 1 => {
                if state.scale <= options.min {
                    return Err(Exhausted { scale: state.scale });
                }
                state.scale = (state.scale / 2.0).max(options.min);
                state.last_overflow = state.steps + 1;
            }
            true => {
                state.hysteresis -= 1;
                state.last_overflow = state.steps + 1;
            }
            false => {
                // The first step of the run and the first step after an overflow do not count.
                let stable = state.steps - state.last_overflow;
                let grows = stable > 0 && stable.is_multiple_of(options.window.max(1));
                if grows || options.consecutive {
                    state.hysteresis = options.hysteresis;
                }
                if grows {
                    state.scale *= 2.0;
                }
            }
        }
        state.steps += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn scaler(power: i32, window: u64, hysteresis: u64, consecutive: bool, min: f64) -> LossScaler {
        let initial = 2f64.powi(power);
        LossScaler::new(LossScaling::Dynamic(DynamicLossScale { initial, window, hysteresis, consecutive, min }))
    }

    /// Runs one step per character (`o` overflows, `.` does not) and returns the scale (as a power of 2) and the
    /// hysteresis after each.
    fn walk(scaler: &mut LossScaler, steps: &str) -> Vec<(f64, u64)> {
        let step = |scaler: &mut LossScaler, c| {
            scaler.update(c == 'o').unwrap();
            (scaler.scale().log2(), scaler.state().hysteresis)
        };
        steps.chars().map(|c| step(scaler, c)).collect()
    }

    /// Expected values recorded from DeepSpeed's `DynamicLossScaler` at commit edaa722: `cur_scale`, as a power of 2,
    /// and `cur_hysteresis` after each `update_scale`.
    #[test]
    fn matches_deepspeed() {
        type Row = (&'static str, u64, u64, bool, &'static [(i32, u64)]);
        let rows: [Row; 8] = [
            // The first window is one step longer: `stable_interval > 0`.
            ("....", 2, 1, false, &[(16, 1), (16, 1), (17, 1), (17, 1)]),
            (".....", 2, 1, false, &[(16, 1), (16, 1), (17, 1), (17, 1), (18, 1)]),
            (".o...", 2, 1, false, &[(16, 1), (15, 1), (15, 1), (15, 1), (16, 1)]),
            // Every step without overflow except the first doubles the scale.
            ("...", 1, 1, false, &[(16, 1), (17, 1), (18, 1)]),
            // Hysteresis absorbs the first overflow, but no later one.
            ("ooo.o", 4, 2, false, &[(16, 1), (15, 1), (14, 1), (14, 1), (13, 1)]),
            // Only a doubling resets the hysteresis.
            ("o...oo", 2, 2, false, &[(16, 1), (16, 1), (16, 1), (17, 2), (17, 1), (16, 1)]),
            // Every step without overflow resets the hysteresis.
            ("o.o.oo", 9, 2, true, &[(16, 1), (16, 2), (16, 1), (16, 2), (16, 1), (15, 1)]),
            ("oo.o", 9, 3, true, &[(16, 2), (16, 1), (16, 3), (16, 2)]),
        ];
        for (steps, window, hysteresis, consecutive, expected) in rows {
            let expected: Vec<(f64, u64)> = expected.iter().map(|&(power, left)| (f64::from(power), left)).collect();
            let mut scaler = scaler(16, window, hysteresis, consecutive, 1.0);
            assert_eq!(walk(&mut scaler, steps), expected, "{steps}, {window}, {hysteresis}, {consecutive}");
        }
    }

    #[test]
    fn an_overflow_at_the_minimum_is_an_error() {
        // At this point DeepSpeed's scaler raises "Current loss scale already at minimum".
        let mut scaler = scaler(2, 1000, 2, false, 1.0);
        assert_eq!(walk(&mut scaler, "ooo"), [(2.0, 1), (1.0, 1), (0.0, 1)]);
        let before = scaler.state();
        assert_eq!(scaler.update(true), Err(Exhausted { scale: 1.0 }));
        assert_eq!(scaler.state(), before);
        // At the minimum, an overflow that hysteresis absorbs is no error.
        assert_eq!(walk(&mut self::scaler(0, 1000, 2, false, 1.0), "o"), [(0.0, 1)]);
        // Halving stops at a minimum that is not a power of 2.
        let mut scaler = self::scaler(3, 1000, 1, false, 3.0);
        scaler.update(true).unwrap();
        scaler.update(true).unwrap();
        assert_eq!(scaler.scale(), 3.0);
        assert_eq!(scaler.update(true), Err(Exhausted { scale: 3.0 }));
    }

    #[test]
    fn a_static_scale_stays() {
        let mut scaler = LossScaler::new(LossScaling::Static(128.0));
        walk(&mut scaler, "oo.o..");
        scaler.restore(LossScaleState { scale: 4.0, steps: 3, last_overflow: 2, hysteresis: 7 });
        assert_eq!((scaler.scale(), scaler.is_dynamic()), (128.0, false));
    }

    proptest! {
        #[test]
        fn a_restored_scaler_continues_identically(
            steps in prop::collection::vec(any::<bool>(), 0..60), cut in 0usize..60, window in 1u64..6,
            hysteresis in 1u64..4, consecutive: bool,
        ) {
            let mut whole = scaler(40, window, hysteresis, consecutive, 0.5);
            let mut resumed = whole;
            for (index, &overflow) in steps.iter().enumerate() {
                if index == cut {
                    let state = whole.state();
                    resumed = scaler(40, window, hysteresis, consecutive, 0.5);
                    resumed.restore(state);
                }
                prop_assert_eq!(whole.update(overflow), resumed.update(overflow));
                prop_assert_eq!(whole, resumed);
            }
        }

        #[test]
        fn the_scale_stays_a_power_of_two_above_its_minimum_and_changes_by_one_power(
            steps in prop::collection::vec(any::<bool>(), 0..200), window in 1u64..8, hysteresis in 1u64..5,
            consecutive: bool,
        ) {
            let mut scaler = scaler(8, window, hysteresis, consecutive, 0.25);
            for overflow in steps {
                let before = scaler.scale();
                let result = scaler.update(overflow);
                let after = scaler.scale();
                prop_assert!(after.log2().fract() == 0.0 && after >= 0.25);
                match overflow {
                    true => prop_assert!(after == before || after == before / 2.0),
                    false => prop_assert!(after == before || after == before * 2.0),
                }
                prop_assert!(result.is_ok() || overflow && before == 0.25);
                prop_assert!((1..=hysteresis).contains(&scaler.state().hysteresis));
            }
        }

        #[test]
        fn restoring_any_state_does_not_panic(
            scale in prop::num::f64::ANY, steps: u32, last_overflow: u64, left: u64,
            next in prop::collection::vec(any::<bool>(), 0..9),
        ) {
            let mut scaler = scaler(8, 2, 2, false, 1.0);
            scaler.restore(LossScaleState { scale, steps: u64::from(steps), last_overflow, hysteresis: left });
            for overflow in next {
                prop_assert!(scaler.scale() >= 1.0);
                let _ = scaler.update(overflow);
            }
        }
    }
}
