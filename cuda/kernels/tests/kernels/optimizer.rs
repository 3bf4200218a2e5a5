//! Optimizer steps and roundings are bit-identical to those of the CPU.

use half::{bf16, f16};
use zero_kernels::Dtype;
use zero_kernels::gradient_norm::Verdict;
use zero_kernels::optimizer::{Updated, add_communicated, add_to, narrow, widen};
use zero_optim::{
    Adagrad, AdamW, Average, Lion, NAdam, Optimizer, RAdam, RmsProp, RmsPropVariant, ScheduleFree, Sgd, Step, average,
    update,
};

use crate::{Memory, numbers, on_device, rounded};

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Ranges of one launch. Their starts differ: the kernel accesses some ranges four elements at a time, with or without
/// a head and a tail, and others one element at a time.
const RANGES: [std::ops::Range<usize>; 5] = [0..1, 4..24, 27..5000, 5001..5004, 5008..6000];

const AVERAGE: Average = Average { decay: 0.9, start: 1 };

#[test]
fn an_update_is_bit_identical_to_the_cpus() {
    let count = 6000;
    let adamw = |decoupled| AdamW { weight_decay: 0.1, decoupled, ..AdamW::default() };
    let sgd = |momentum, nesterov| Sgd { momentum, dampening: 0.1, nesterov, weight_decay: 0.1 };
    let optimizers = [
        Optimizer::AdamW(adamw(true)),
        Optimizer::AdamW(adamw(false)),
        Optimizer::Sgd(sgd(0.0, false)),
        Optimizer::Sgd(sgd(0.9, false)),
        Optimizer::Sgd(sgd(0.9, true)),
        Optimizer::Lion(Lion { weight_decay: 0.1, ..Lion::default() }),
        Optimizer::Adagrad(Adagrad { weight_decay: 0.1, ..Adagrad::default() }),
        Optimizer::RmsProp(RmsProp { weight_decay: 0.1, variant: RmsPropVariant::Plain, ..RmsProp::default() }),
        Optimizer::RmsProp(RmsProp { weight_decay: 0.1, variant: RmsPropVariant::Momentum(0.9), ..RmsProp::default() }),
        Optimizer::RmsProp(RmsProp { weight_decay: 0.1, variant: RmsPropVariant::Centered, ..RmsProp::default() }),
        Optimizer::NAdam(NAdam { weight_decay: 0.1, ..NAdam::default() }),
        Optimizer::NAdam(NAdam { weight_decay: 0.1, decoupled: true, ..NAdam::default() }),
        Optimizer::ScheduleFree(ScheduleFree { weight_decay: 0.1, share: 0.3, ..ScheduleFree::default() }),
        Optimizer::RAdam(RAdam { weight_decay: 0.1, ..RAdam::default() }),
        Optimizer::RAdam(RAdam { weight_decay: 0.1, decoupled: true, ..RAdam::default() }),
    ];
    // RAdam leaves its warm-up at the sixth step.
    let grads: Vec<Vec<f32>> = (0..7)
        .map(|step| {
            // Gradients of many magnitudes, scaled by powers of two from 2⁻¹⁰ to 2⁹.
            let all = numbers(10 + step, count).into_iter().zip((-30..30).cycle());
            all.map(|(x, power)| x * 2f32.powi(power / 3)).collect()
        })
        .collect();
    let start = numbers(1, count);
    // Every other step clips gradients.
    let limits = [f32::INFINITY, 3.0];
    let step_of = |step: usize, decay| {
        let grad_limit = limits[step % 2];
        Step { step: step as u64 + 1, lr: 1e-2, grad_scale: 0.37, grad_limit, decay }
    };
    // Every second range has weight decay. The gradients of the last two ranges are unaligned.
    let decays = |range: usize| range.is_multiple_of(2);
    for (optimizer, dtype) in optimizers.iter().flat_map(|optimizer| Dtype::ALL.map(|dtype| (optimizer, dtype))) {
        let held = optimizer.states().len();
        // The gradients were sent in the type of the working parameters.
        let Some((params, states, working, averages)) = on_device(|device| {
            let mut params = Memory::floats(Dtype::F32, &start);
            let mut states: Vec<Memory> = (0..held).map(|_| Memory::floats(Dtype::F32, &vec![0.0; count])).collect();
            let mut working = Memory::floats(dtype, &vec![f32::NAN; count]);
            let mut averages = Memory::floats(Dtype::F32, &vec![0.0; count]);
            for (step, grads) in grads.iter().enumerate() {
                let moved: Vec<f32> = grads[..5002].iter().chain(&grads[5001..]).copied().collect();
                let mut grads = Memory::floats(Dtype::F32, &moved);
                let updated: Vec<Updated> = (0..RANGES.len())
                    .map(|range| {
                        let from = RANGES[range].start as u64;
                        let mut at = [0; 2];
                        at.iter_mut().zip(&mut states).for_each(|(at, state)| *at = state.address() + 4 * from);
                        Updated {
                            params: params.address() + 4 * from,
                            states: at,
                            grads: grads.address() + 4 * (from + u64::from(range > 2)),
                            communicated: dtype,
                            working: working.address() + from * if dtype == Dtype::F32 { 4 } else { 2 },
                            // The first range has no average.
                            averages: if range == 0 { 0 } else { averages.address() + 4 * from },
                            count: RANGES[range].len() as u64,
                            decay: decays(range),
                        }
                    })
                    .collect();
                let factors = [true, false].map(|decay| optimizer.factors(&step_of(step, decay)));
                let weight = AVERAGE.weight(step as u64 + 1);
                let launch = zero_kernels::optimizer::update(dtype, factors.each_ref(), &updated, weight, 0);
                device.run(&launch.unwrap());
            }
            let of = |memory: &Memory| bits(&memory.to_floats(Dtype::F32));
            let states: Vec<_> = states.iter().map(of).collect();
            (of(&params), states, bits(&working.to_floats(dtype)), of(&averages))
        }) else {
            return;
        };
        let (mut want, mut kept) = (start.clone(), vec![vec![0.0; count]; held]);
        let mut want_averages = vec![0.0; count];
        let mut want_working = vec![f32::NAN; count];
        for (step, grads) in grads.iter().enumerate() {
            let grads = rounded(dtype, grads);
            let number = step as u64 + 1;
            for (range, at) in RANGES.iter().enumerate() {
                let mut kept: Vec<&mut [f32]> = kept.iter_mut().map(|kept| &mut kept[at.clone()]).collect();
                let (step, values) = (step_of(step, decays(range)), &mut want[at.clone()]);
                update(optimizer, &step, values, &grads[at.clone()], &mut kept).unwrap();
                want_working[at.clone()].copy_from_slice(&rounded(dtype, values));
                if range > 0 {
                    average(AVERAGE.weight(number), values, &mut want_averages[at.clone()]).unwrap();
                }
            }
        }
        assert!(averages == bits(&want_averages), "averages, {dtype:?}, {optimizer:?}");
        assert!(params == bits(&want), "parameters, {dtype:?}, {optimizer:?}");
        assert!(states == kept.iter().map(|state| bits(state)).collect::<Vec<_>>(), "states, {dtype:?}, {optimizer:?}");
        let same = |(&got, want): (&u32, &f32)| got == want.to_bits() || f32::from_bits(got).is_nan() && want.is_nan();
        assert!(working.iter().zip(&want_working).all(same), "working parameters, {dtype:?}, {optimizer:?}");
    }
}

/// The scale of the verdict replaces the scale of the step. A verdict that does not admit the step leaves everything
/// unchanged.
#[test]
fn the_norm_verdict_scales_or_skips_an_update() {
    let (count, start, grads) = (100, numbers(1, 100), numbers(2, 100));
    let sgd = Optimizer::Sgd(Sgd::default());
    let step = |grad_scale| Step { step: 1, lr: 0.5, grad_scale, grad_limit: f32::INFINITY, decay: false };
    for admitted in [0, 1] {
        let Some(params) = on_device(|device| {
            let [mut params, mut from] = [&start, &grads].map(|values| Memory::floats(Dtype::F32, values));
            let made = Verdict { norm: 3.0, clip: 0.25, scale: 0.25, admitted };
            let mut verdict = Memory::integers(&[0, 0, 0, 0, made.scale.to_bits(), made.admitted]);
            let (params_at, grads_at) = (params.address(), from.address());
            let updated = Updated {
                params: params_at,
                states: [0; 2],
                grads: grads_at,
                communicated: Dtype::F32,
                working: 0,
                averages: 0,
                count,
                decay: false,
            };
            let factors = sgd.factors(&step(1.0));
            let launch = zero_kernels::optimizer::update(Dtype::F32, [&factors; 2], &[updated], 0.0, verdict.address());
            device.run(&launch.unwrap());
            bits(&params.to_floats(Dtype::F32))
        }) else {
            return;
        };
        let mut want = start.clone();
        if admitted == 1 {
            update::<_, f32>(&sgd, &step(0.25), &mut want, &grads, &mut []).unwrap();
        }
        assert!(params == bits(&want), "{admitted}");
    }
}

#[test]
fn communicated_gradients_are_rounded_before_the_sum() {
    let (a, b) = (numbers(3, 303), numbers(4, 303));
    for [from, to] in [[Dtype::F32, Dtype::Bf16], [Dtype::Bf16, Dtype::F32], [Dtype::F16, Dtype::F16]] {
        let Some(sums) = on_device(|device| {
            let [mut a, mut b] = [&a, &b].map(|values| Memory::floats(Dtype::F32, values));
            device.run(&add_communicated(303, [a.address(), b.address()], [from, to]).unwrap());
            bits(&b.to_floats(Dtype::F32))
        }) else {
            return;
        };
        let pairs = rounded(from, &a).into_iter().zip(rounded(to, &b));
        assert_eq!(sums, pairs.map(|(a, b)| (b + a).to_bits()).collect::<Vec<_>>(), "{from:?} {to:?}");
    }
}

/// Covers all 65,536 16-bit values, values between them, and their f32 neighbors.
#[test]
fn conversions_round_to_nearest_even() {
    let close = |x: f32| [x.to_bits().wrapping_sub(1), x.to_bits(), x.to_bits().wrapping_add(1)].map(f32::from_bits);
    let all: Vec<f32> = (0..=u16::MAX)
        .flat_map(|bits| [f16::from_bits(bits).to_f32(), f32::from_bits(u32::from(bits) << 16 | 0x8000)])
        .flat_map(close)
        .chain([65519.996, 65520.0, 1e-8, 2.980_232_2e-8, f32::MAX, f32::MIN_POSITIVE])
        .collect();
    let count = all.len() as u64;
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let Some((stored, wide, doubled)) = on_device(|device| {
            let mut from = Memory::floats(Dtype::F32, &all);
            let (mut to, mut back) = (Memory::unwritten(2 * all.len()), Memory::unwritten(4 * all.len()));
            device.run(&narrow(dtype, count, from.address(), to.address()).unwrap());
            device.run(&widen(dtype, count, to.address(), back.address()).unwrap());
            let wide = bits(&back.to_floats(Dtype::F32));
            device.run(&add_to(dtype, count, to.address(), back.address()).unwrap());
            (to.bytes(), wide, bits(&back.to_floats(Dtype::F32)))
        }) else {
            return;
        };
        let bits_of = |x: f32| match dtype {
            Dtype::F16 => f16::from_f32(x).to_bits(),
            _ => bf16::from_f32(x).to_bits(),
        };
        for (i, &x) in all.iter().enumerate() {
            let got = u16::from_ne_bytes([stored[2 * i], stored[2 * i + 1]]);
            let wide = f32::from_bits(wide[i]);
            if x.is_nan() {
                assert!(wide.is_nan() && f32::from_bits(doubled[i]).is_nan(), "{dtype:?} {x}");
                continue;
            }
            assert_eq!(got, bits_of(x), "{dtype:?} {x:e}");
            assert_eq!(wide.to_bits(), rounded(dtype, &[x])[0].to_bits(), "{dtype:?} {x:e}");
            assert_eq!(f32::from_bits(doubled[i]), 2.0 * wide, "{dtype:?} {x:e}");
        }
    }
}

#[test]
fn conversions_to_f32_change_nothing() {
    let all = numbers(3, 1000);
    let Some((narrowed, widened, doubled)) = on_device(|device| {
        let mut from = Memory::floats(Dtype::F32, &all);
        let [mut to, mut back] = [(); 2].map(|()| Memory::unwritten(4 * all.len()));
        device.run(&narrow(Dtype::F32, 1000, from.address(), to.address()).unwrap());
        device.run(&widen(Dtype::F32, 1000, to.address(), back.address()).unwrap());
        let [narrowed, widened] = [&to, &back].map(|memory| bits(&memory.to_floats(Dtype::F32)));
        device.run(&add_to(Dtype::F32, 1000, to.address(), back.address()).unwrap());
        (narrowed, widened, bits(&back.to_floats(Dtype::F32)))
    }) else {
        return;
    };
    assert!(narrowed == bits(&all) && widened == bits(&all));
    assert!(doubled == bits(&all.iter().map(|x| x + x).collect::<Vec<_>>()));
}
