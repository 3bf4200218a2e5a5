//! Compares every instruction set with the scalar reference, bit by bit, and the reference with formulas in f64.

use proptest::prelude::*;

use super::*;

pub(crate) const OPTIMIZERS: [Optimizer; 16] = [
    Optimizer::AdamW(AdamW {
        betas: (0.9, 0.95),
        eps: 1e-8,
        weight_decay: 0.1,
        bias_correction: true,
        decoupled: true,
    }),
    Optimizer::AdamW(AdamW {
        betas: (0.9, 0.95),
        eps: 1e-8,
        weight_decay: 0.1,
        bias_correction: false,
        decoupled: true,
    }),
    Optimizer::AdamW(AdamW {
        betas: (0.9, 0.95),
        eps: 1e-8,
        weight_decay: 0.1,
        bias_correction: true,
        decoupled: false,
    }),
    Optimizer::Sgd(Sgd { momentum: 0.0, dampening: 0.0, nesterov: false, weight_decay: 0.1 }),
    Optimizer::Sgd(Sgd { momentum: 0.9, dampening: 0.2, nesterov: false, weight_decay: 0.1 }),
    Optimizer::Sgd(Sgd { momentum: 0.9, dampening: 0.0, nesterov: true, weight_decay: 0.1 }),
    Optimizer::Lion(Lion { betas: (0.9, 0.99), weight_decay: 0.1 }),
    Optimizer::Adagrad(Adagrad { eps: 1e-10, weight_decay: 0.1 }),
    Optimizer::RmsProp(RmsProp { alpha: 0.95, eps: 1e-8, weight_decay: 0.1, variant: RmsPropVariant::Plain }),
    Optimizer::RmsProp(RmsProp { alpha: 0.95, eps: 1e-8, weight_decay: 0.1, variant: RmsPropVariant::Momentum(0.9) }),
    Optimizer::RmsProp(RmsProp { alpha: 0.95, eps: 1e-8, weight_decay: 0.1, variant: RmsPropVariant::Centered }),
    Optimizer::NAdam(NAdam {
        betas: (0.9, 0.95),
        eps: 1e-8,
        weight_decay: 0.1,
        momentum_decay: 4e-3,
        decoupled: false,
    }),
    Optimizer::RAdam(RAdam { betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1, decoupled: false }),
    Optimizer::NAdam(NAdam { betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1, momentum_decay: 4e-3, decoupled: true }),
    Optimizer::RAdam(RAdam { betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1, decoupled: true }),
    Optimizer::ScheduleFree(ScheduleFree {
        betas: (0.9, 0.95),
        eps: 1e-8,
        weight_decay: 0.1,
        r: 0.0,
        weight_lr_power: 2.0,
        share: 0.3,
    }),
];

/// A parameter, its gradient and two states. Most values are of ordinary size: random bit patterns are mostly too large
/// or too small to interact in one sum.
fn element() -> impl Strategy<Value = [f32; 4]> {
    let any_bits = any::<u32>().prop_map(f32::from_bits);
    let special =
        prop::sample::select(vec![0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-45, -1e-40, f32::MAX]);
    let value = prop_oneof![1 => any_bits, 1 => special, 6 => -2.0f32..2.0];
    [value.clone(), value.clone(), value.clone(), value]
}

/// Returns parameters and states after one step on this instruction set. The slices start `offset` elements into their
/// allocations.
fn stepped(isa: Isa, optimizer: &Optimizer, step: &Step, elements: &[[f32; 4]], offset: usize) -> Vec<Vec<f32>> {
    let column = |c: usize| -> Vec<f32> {
        std::iter::repeat_n(7.0, offset).chain(elements.iter().map(|element| element[c])).collect()
    };
    let (mut params, grads, mut states) = (column(0), column(1), vec![column(2), column(3)]);
    states.truncate(optimizer.states().len());
    let mut views: Vec<&mut [f32]> = states.iter_mut().map(|state| &mut state[offset..]).collect();
    update_at(isa, optimizer, step, &mut params[offset..], &grads[offset..], &mut views).unwrap();
    states.insert(0, params);
    states
}

/// Returns whether two numbers have equal bits or are both NaN. Which of two NaNs an instruction returns depends on the
/// order of its operands.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

proptest! {
    #[test]
    fn all_instruction_sets_give_the_same_bits(
        elements in prop::collection::vec(element(), 0..200),
        offset in 0usize..17,
        step in prop::sample::select(vec![1u64, 2, 1000, 1 << 40]),
        grad_scale in prop::sample::select(vec![1.0f32, 0.3, 1.0 / 65536.0]),
        grad_limit in prop::sample::select(vec![f32::INFINITY, 0.5, 1e-30]),
        decay: bool,
    ) {
        let step = Step { step, lr: 3e-3, grad_scale, grad_limit, decay };
        for optimizer in &OPTIMIZERS {
            let oracle = stepped(Isa::BASELINE, optimizer, &step, &elements, 0);
            for isa in Isa::available() {
                let vector = stepped(isa, optimizer, &step, &elements, offset);
                for (vector, oracle) in vector.iter().zip(&oracle) {
                    prop_assert!(vector[..offset].iter().all(|&x| x == 7.0), "{:?} wrote outside its slice", optimizer);
                    for (a, b) in vector[offset..].iter().zip(oracle) {
                        prop_assert!(same(*a, *b), "{:?} {:?}: {} {}", isa, optimizer, a, b);
                    }
                }
            }
        }
    }

    #[test]
    fn a_limit_clips_gradients_before_they_are_scaled(
        elements in prop::collection::vec(element(), 1..100),
        limit in prop::sample::select(vec![0.25f32, 1.5, 1e20]),
    ) {
        let step = Step { step: 3, lr: 3e-3, grad_scale: 0.5, grad_limit: limit, decay: true };
        let clipped: Vec<[f32; 4]> = elements.iter().map(|&[p, g, a, b]| [p, g.clamp(-limit, limit), a, b]).collect();
        for optimizer in &OPTIMIZERS {
            let got = stepped(Isa::current(), optimizer, &step, &elements, 0);
            let unlimited = Step { grad_limit: f32::INFINITY, ..step };
            let want = stepped(Isa::current(), optimizer, &unlimited, &clipped, 0);
            for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
                prop_assert!(same(*got, *want), "{:?}: {} {}", optimizer, got, want);
            }
        }
        let (muon, of) = (Muon::default(), |elements: &[[f32; 4]]| elements.iter().map(|e| e[1]).collect::<Vec<_>>());
        let direction = |step: &Step, grads: &[f32]| {
            let mut momentum = vec![0.5; grads.len()];
            let direction = muon.direction(step, grads, &mut momentum).unwrap();
            [direction, momentum].concat()
        };
        let got = direction(&step, &of(&elements));
        let want = direction(&Step { grad_limit: f32::INFINITY, ..step }, &of(&clipped));
        prop_assert!(got.iter().zip(&want).all(|(&a, &b)| same(a, b)));
    }

    /// ZeRO relies on this: updating a shard is bit-identical to updating the same range of the whole.
    #[test]
    fn updating_a_shard_matches_updating_the_whole(elements in prop::collection::vec(element(), 1..200), cut in 0usize..200) {
        let cut = cut % elements.len();
        let step = Step { step: 5, lr: 3e-3, grad_scale: 1.0, grad_limit: f32::INFINITY, decay: true };
        for optimizer in &OPTIMIZERS {
            let whole = stepped(Isa::current(), optimizer, &step, &elements, 0);
            let left = stepped(Isa::current(), optimizer, &step, &elements[..cut], 0);
            let right = stepped(Isa::current(), optimizer, &step, &elements[cut..], 0);
            for ((whole, left), right) in whole.iter().zip(&left).zip(&right) {
                prop_assert!(whole.iter().zip(left.iter().chain(right)).all(|(&a, &b)| same(a, b)));
            }
        }
    }
}

/// Computes one step in f64, as written in the papers.
fn textbook(optimizer: &Optimizer, step: &Step, p: f64, g: f64, s: [f64; 2]) -> (f64, [f64; 2]) {
    let lr = step.lr;
    let g = g * f64::from(step.grad_scale);
    let on = |weight_decay: f64| if step.decay { weight_decay } else { 0.0 };
    match *optimizer {
        Optimizer::Muon(_) | Optimizer::Lamb(_) | Optimizer::Adafactor(_) | Optimizer::Custom(_) => {
            unreachable!("it has tests in a file of its own")
        }
        Optimizer::AdamW(AdamW { betas: (b1, b2), eps, weight_decay, bias_correction, decoupled }) => {
            let (p, g) = if decoupled { (p - lr * on(weight_decay) * p, g) } else { (p, g + on(weight_decay) * p) };
            let (m, v) = (b1 * s[0] + (1.0 - b1) * g, b2 * s[1] + (1.0 - b2) * g * g);
            let t = step.step as i32;
            let (m_hat, v_hat) =
                if bias_correction { (m / (1.0 - b1.powi(t)), v / (1.0 - b2.powi(t))) } else { (m, v) };
            (p - lr * m_hat / (v_hat.sqrt() + eps), [m, v])
        }
        Optimizer::Sgd(Sgd { momentum, dampening, nesterov, weight_decay }) => {
            let g = g + on(weight_decay) * p;
            let b = if step.step == 1 { g } else { momentum * s[0] + (1.0 - dampening) * g };
            let direction = if momentum == 0.0 {
                g
            } else if nesterov {
                g + momentum * b
            } else {
                b
            };
            (p - lr * direction, [b, 0.0])
        }
        Optimizer::Lion(Lion { betas: (b1, b2), weight_decay }) => {
            let direction = (b1 * s[0] + (1.0 - b1) * g).signum();
            (p - lr * on(weight_decay) * p - lr * direction, [b2 * s[0] + (1.0 - b2) * g, 0.0])
        }
        Optimizer::ScheduleFree(ScheduleFree { betas: (b1, b2), eps, weight_decay, share, .. }) => {
            let x = p + s[0];
            let z = (p - b1 * x) / (1.0 - b1);
            let v = b2 * s[1] + (1.0 - b2) * g * g;
            let direction = g / ((v / (1.0 - b2.powi(step.step as i32))).sqrt() + eps) + on(weight_decay) * p;
            let z = z - lr * direction;
            let x = (1.0 - share) * x + share * z;
            let y = (1.0 - b1) * z + b1 * x;
            (y, [x - y, v])
        }
        Optimizer::Adagrad(Adagrad { eps, weight_decay }) => {
            let g = g + on(weight_decay) * p;
            let sum = s[0] + g * g;
            (p - lr * g / (sum.sqrt() + eps), [sum, 0.0])
        }
        Optimizer::RmsProp(RmsProp { alpha, eps, weight_decay, variant }) => {
            let g = g + on(weight_decay) * p;
            let mean = alpha * s[0] + (1.0 - alpha) * g * g;
            match variant {
                RmsPropVariant::Plain => (p - lr * g / (mean.sqrt() + eps), [mean, 0.0]),
                RmsPropVariant::Momentum(momentum) => {
                    let buffer = momentum * s[1] + g / (mean.sqrt() + eps);
                    (p - lr * buffer, [mean, buffer])
                }
                RmsPropVariant::Centered => {
                    let average = alpha * s[1] + (1.0 - alpha) * g;
                    (p - lr * g / ((mean - average * average).sqrt() + eps), [mean, average])
                }
            }
        }
        Optimizer::NAdam(NAdam { betas: (b1, b2), eps, weight_decay, momentum_decay, decoupled }) => {
            let (p, g) = if decoupled { (p - lr * on(weight_decay) * p, g) } else { (p, g + on(weight_decay) * p) };
            let (m, v) = (b1 * s[0] + (1.0 - b1) * g, b2 * s[1] + (1.0 - b2) * g * g);
            let mu = |t: u64| b1 * (1.0 - 0.5 * 0.96f64.powf(t as f64 * momentum_decay));
            let product = |last: u64| (1..=last).map(mu).product::<f64>();
            let t = step.step;
            let look = (1.0 - mu(t)) / (1.0 - product(t)) * g + mu(t + 1) / (1.0 - product(t + 1)) * m;
            (p - lr * look / ((v / (1.0 - b2.powi(t as i32))).sqrt() + eps), [m, v])
        }
        Optimizer::RAdam(RAdam { betas: (b1, b2), eps, weight_decay, decoupled }) => {
            let (p, g) = if decoupled { (p - lr * on(weight_decay) * p, g) } else { (p, g + on(weight_decay) * p) };
            let (m, v) = (b1 * s[0] + (1.0 - b1) * g, b2 * s[1] + (1.0 - b2) * g * g);
            let t = step.step as i32;
            let m_hat = m / (1.0 - b1.powi(t));
            let whole = 2.0 / (1.0 - b2) - 1.0;
            let length = whole - 2.0 * f64::from(t) * b2.powi(t) / (1.0 - b2.powi(t));
            let adapted = if length > 5.0 {
                let r = ((length - 4.0) * (length - 2.0) * whole / ((whole - 4.0) * (whole - 2.0) * length)).sqrt();
                r * (1.0 - b2.powi(t)).sqrt() / (v.sqrt() + eps)
            } else {
                1.0
            };
            (p - lr * m_hat * adapted, [m, v])
        }
    }
}

#[test]
fn fifty_steps_agree_with_the_textbook_in_f64() {
    let n = 40;
    let wave = |i: usize, t: u64| ((i as f32 * 1.7 + t as f32 * 0.9).sin() + 0.31) * 3.0;
    for optimizer in &OPTIMIZERS {
        for decay in [true, false] {
            let mut params: Vec<f32> = (0..n).map(|i| wave(i, 0)).collect();
            let mut states = vec![vec![0.0f32; n]; optimizer.states().len()];
            let mut reference: Vec<(f64, [f64; 2])> = params.iter().map(|&p| (f64::from(p), [0.0; 2])).collect();
            for t in 1..=50 {
                let step = Step { step: t, lr: 1e-2 / t as f64, grad_scale: 0.125, grad_limit: f32::INFINITY, decay };
                let grads: Vec<f32> = (0..n).map(|i| wave(i, t)).collect();
                let mut views: Vec<&mut [f32]> = states.iter_mut().map(Vec::as_mut_slice).collect();
                update(optimizer, &step, &mut params, &grads, &mut views).unwrap();
                for ((p, s), g) in reference.iter_mut().zip(&grads) {
                    (*p, *s) = textbook(optimizer, &step, *p, f64::from(*g), *s);
                }
            }
            for (i, (p, s)) in reference.iter().enumerate() {
                assert!((f64::from(params[i]) - p).abs() < 1e-6 * (1.0 + p.abs()), "{optimizer:?}: {} {p}", params[i]);
                for (state, expected) in states.iter().zip(s) {
                    assert!((f64::from(state[i]) - expected).abs() < 1e-5 * (1.0 + expected.abs()), "{optimizer:?}");
                }
            }
        }
    }
}

/// Tests an exact case: without decay and from zero moments, Adam's first step is lr·sign(g) for any magnitude of the
/// gradient.
#[test]
fn adams_first_step_is_the_learning_rate() {
    let adam = Optimizer::AdamW(AdamW { eps: 0.0, ..AdamW::default() });
    let step = Step { step: 1, lr: 0.25, grad_scale: 1.0, grad_limit: f32::INFINITY, decay: false };
    for gradient in [1e-18f32, -3.0, 1e18] {
        let (mut p, mut m, mut v) = ([1.0f32], [0.0f32], [0.0f32]);
        update(&adam, &step, &mut p, &[gradient], &mut [&mut m, &mut v]).unwrap();
        assert!((p[0] - (1.0 - 0.25 * gradient.signum())).abs() < 1e-6, "{gradient}: {}", p[0]);
    }
}

#[test]
fn a_nan_gradient_shows_in_the_parameter() {
    for optimizer in &OPTIMIZERS {
        let step = Step { step: 1, lr: 1e-3, grad_scale: 1.0, grad_limit: f32::INFINITY, decay: true };
        for column in stepped(Isa::current(), optimizer, &step, &[[1.0, f32::NAN, 0.0, 0.0]], 0) {
            assert!(column[0].is_nan(), "{optimizer:?}");
        }
    }
}

#[test]
fn wrong_lengths_are_errors_that_write_nothing() {
    let adam = Optimizer::AdamW(AdamW::default());
    let step = Step { step: 1, lr: 1.0, grad_scale: 1.0, grad_limit: f32::INFINITY, decay: true };
    let (mut p, mut m, mut v, mut short) = ([1.0f32; 3], [0.0f32; 3], [0.0f32; 3], [0.0f32; 2]);
    let mut attempt =
        |grads: &[f32], states: &mut [&mut [f32]]| update(&adam, &step, &mut p, grads, states).unwrap_err();

    assert_eq!(attempt(&[1.0; 2], &mut [&mut m, &mut v]), LengthError { what: "grads", expected: 3, found: 2 });
    assert_eq!(attempt(&[1.0; 3], &mut [&mut m]), LengthError { what: "states", expected: 2, found: 1 });
    let error = attempt(&[1.0; 3], &mut [&mut m, &mut short]);
    assert_eq!(error, LengthError { what: "exp_avg_sq", expected: 3, found: 2 });
    assert_eq!(error.to_string(), "exp_avg_sq: expected 3 elements, got 2");
    assert_eq!((p, m), ([1.0; 3], [0.0; 3]));
}

#[test]
fn multiply_add_reaches_every_array() {
    for count in 0..=2 {
        let (mut params, mut states) = (vec![1.0; 77], vec![vec![2.0; 77]; count]);
        multiply_add(3.0, &mut params, &[0.5; 77], &mut states);
        assert_eq!((params, states), (vec![2.5; 77], vec![vec![3.5; 77]; count]));
    }
}
