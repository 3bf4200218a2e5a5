//! The loss scale of training in f16: what the loss is multiplied by, so that its gradients neither vanish nor overflow.
//!
//! A state machine of one transition a step. Its rules and names are those of DeepSpeed's `DynamicLossScaler`
//! (`deepspeed/runtime/fp16/loss_scaler.py`), which its ZeRO stages use; here they hold at every stage.

/// What a [`LossScaler`] is told once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LossScaling {
    /// Always this scale; a step that overflows is skipped, and nothing changes.
    Static(f64),
    /// A scale that follows the gradients.
    Dynamic(DynamicLossScale),
}

/// How the scale follows the gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DynamicLossScale {
    /// The first scale.
    pub initial: f64,
    /// The scale doubles when this many steps beyond the first after an overflow went well, and after as many again. At
    /// least 1.
    pub window: u64,
    /// The overflow of this number halves the scale, and so do those that follow until the count begins anew. At least 1.
    pub hysteresis: u64,
    /// The count begins anew at every step that goes well, not only when the scale doubles.
    pub consecutive: bool,
    /// The scale does not go below; an overflow that would have it do so is [`Exhausted`].
    pub min: f64,
}

/// What is kept from one step to the next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScaleState {
    /// The scale of the next step.
    pub scale: f64,
    /// Steps so far, skipped ones included.
    pub steps: u64,
    /// The last step that overflowed, counted from 1; 0 if none did.
    pub last_overflow: u64,
    /// Overflows up to the one that halves the scale.
    pub hysteresis: u64,
}

/// Gradients overflowed though the scale was the smallest that is allowed.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("gradients overflow, and the loss scale is {scale} already, the smallest allowed")]
pub struct Exhausted {
    /// The scale.
    pub scale: f64,
}

/// The loss scale over a run; the same on every rank that is told of the same overflows.
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
    /// Before the first step.
    #[must_use]
    pub fn new(scaling: LossScaling) -> Self {
        let (scale, hysteresis) = match scaling {
            LossScaling::Static(scale) => (scale, 1),
            LossScaling::Dynamic(dynamic) => (dynamic.initial, dynamic.hysteresis),
        };
        Self { scaling, state: LossScaleState { scale, steps: 0, last_overflow: 0, hysteresis } }
    }

    /// What the next step's loss is multiplied by.
    #[must_use]
    pub fn scale(&self) -> f64 {
        self.state.scale
    }

    /// Whether the scale follows the gradients.
    #[must_use]
    pub fn is_dynamic(&self) -> bool {
        matches!(self.scaling, LossScaling::Dynamic(_))
    }

    /// What a checkpoint keeps.
    #[must_use]
    pub fn state(&self) -> LossScaleState {
        self.state
    }

    /// Goes on from a checkpoint. What this scaler's own options do not allow is brought within them: a static scale stays what it
    /// is, a dynamic one at or above its smallest.
    pub fn restore(&mut self, state: LossScaleState) {
        if let LossScaling::Dynamic(options) = self.scaling {
            let scale = if state.scale.is_finite() { state.scale.max(options.min) } else { options.initial };
            let hysteresis = state.hysteresis.clamp(1, options.hysteresis.max(1));
            self.state =
                LossScaleState { scale, hysteresis, last_overflow: state.last_overflow.min(state.steps), ..state };
        }
    }

    /// Takes note of a step: whether its gradients overflowed, and were thrown away.
    ///
    /// # Errors
    /// The scale would go below its smallest; nothing changed then.
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
                // The first step after an overflow does not count.
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

    /// The scale (as a power of 2) and the hysteresis after each step of a word: `o` overflows, `.` goes well.
    fn walk(scaler: &mut LossScaler, steps: &str) -> Vec<(f64, u64)> {
        let step = |scaler: &mut LossScaler, c| {
            scaler.update(c == 'o').unwrap();
            (scaler.scale().log2(), scaler.state().hysteresis)
        };
        steps.chars().map(|c| step(scaler, c)).collect()
    }

    /// Rows that `DynamicLossScaler` of DeepSpeed at commit edaa722 gave: `cur_scale`, as a power of 2, and `cur_hysteresis` after
    /// each `update_scale`.
    #[test]
    fn does_what_deepspeed_does() {
        type Row = (&'static str, u64, u64, bool, &'static [(i32, u64)]);
        let rows: [Row; 8] = [
            // The first window is one step longer: `stable_interval > 0`.
            ("....", 2, 1, false, &[(16, 1), (16, 1), (17, 1), (17, 1)]),
            (".....", 2, 1, false, &[(16, 1), (16, 1), (17, 1), (17, 1), (18, 1)]),
            (".o...", 2, 1, false, &[(16, 1), (15, 1), (15, 1), (15, 1), (16, 1)]),
            // Every good step but the first doubles.
            ("...", 1, 1, false, &[(16, 1), (17, 1), (18, 1)]),
            // The first overflow is forgiven, those after it are not.
            ("ooo.o", 4, 2, false, &[(16, 1), (15, 1), (14, 1), (14, 1), (13, 1)]),
            // Only a doubling forgives anew.
            ("o...oo", 2, 2, false, &[(16, 1), (16, 1), (16, 1), (17, 2), (17, 1), (16, 1)]),
            // Every good step does.
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
    fn the_floor_is_reached_before_it_is_an_error() {
        // DeepSpeed's raises "Current loss scale already at minimum" here.
        let mut scaler = scaler(2, 1000, 2, false, 1.0);
        assert_eq!(walk(&mut scaler, "ooo"), [(2.0, 1), (1.0, 1), (0.0, 1)]);
        let before = scaler.state();
        assert_eq!(scaler.update(true), Err(Exhausted { scale: 1.0 }));
        assert_eq!(scaler.state(), before);
        // At the floor, what hysteresis forgives is no error.
        assert_eq!(walk(&mut self::scaler(0, 1000, 2, false, 1.0), "o"), [(0.0, 1)]);
        // Halves do not pass a floor that is no power of 2.
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
        fn a_scaler_of_a_saved_state_goes_on_the_same(
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
        fn the_scale_stays_a_power_of_two_above_its_floor_and_moves_by_one(
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
        fn whatever_a_checkpoint_says_nothing_panics(
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
