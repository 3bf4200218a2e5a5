//! Optimizers, squares and roundings: the CPU's bits.

use half::{bf16, f16};
use zero_kernels::Dtype;
use zero_kernels::optimizer::{SQUARES, add_to, narrow, square_sums, widen};
use zero_optim::norm::block_square_sums;
use zero_optim::{Adagrad, AdamW, Lion, Optimizer, Sgd, Step, update};

use crate::{Memory, numbers, on_device, rounded};

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn an_update_has_the_bits_of_the_cpus() {
    let count = 3000;
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
    ];
    let grads: Vec<Vec<f32>> = (0..3)
        .map(|step| {
            // From squares that vanish in f32 to ones that pass its end.
            let all = numbers(10 + step, count).into_iter().zip((-30..30).cycle());
            all.map(|(x, power)| x * 2f32.powi(power / 3)).collect()
        })
        .collect();
    let start = numbers(1, count);
    let step_of = |step: usize| Step { step: step as u64 + 1, lr: 1e-2, grad_scale: 0.37, decay: true };
    for (optimizer, dtype) in optimizers.iter().flat_map(|optimizer| Dtype::ALL.map(|dtype| (optimizer, dtype))) {
        let held = optimizer.states().len();
        let Some((params, states, working)) = on_device(|device| {
            let mut params = Memory::floats(Dtype::F32, &start);
            let mut states: Vec<Memory> = (0..held).map(|_| Memory::floats(Dtype::F32, &vec![0.0; count])).collect();
            let mut working = Memory::floats(dtype, &vec![f32::NAN; count]);
            for (step, grads) in grads.iter().enumerate() {
                let mut grads = Memory::floats(Dtype::F32, grads);
                let mut at = [0; 2];
                at.iter_mut().zip(&mut states).for_each(|(at, state)| *at = state.address());
                let (factors, to) = (optimizer.factors(&step_of(step)), working.address());
                let launch = zero_kernels::optimizer::update(
                    dtype,
                    count as u64,
                    &factors,
                    params.address(),
                    at,
                    grads.address(),
                    to,
                );
                device.run(&launch.unwrap());
            }
            let of = |memory: &Memory| bits(&memory.to_floats(Dtype::F32));
            (of(&params), states.iter().map(of).collect::<Vec<_>>(), bits(&working.to_floats(dtype)))
        }) else {
            return;
        };
        let (mut want, mut kept) = (start.clone(), vec![vec![0.0; count]; held]);
        for (step, grads) in grads.iter().enumerate() {
            let mut kept: Vec<&mut [f32]> = kept.iter_mut().map(Vec::as_mut_slice).collect();
            update(optimizer, &step_of(step), &mut want, grads, &mut kept).unwrap();
        }
        assert!(params == bits(&want), "parameters, {dtype:?}, {optimizer:?}");
        assert!(states == kept.iter().map(|state| bits(state)).collect::<Vec<_>>(), "states, {dtype:?}, {optimizer:?}");
        assert!(working == bits(&rounded(dtype, &want)), "working parameters, {dtype:?}, {optimizer:?}");
    }
}

#[test]
fn sums_of_squares_have_the_bits_of_the_cpus() {
    for count in [1, 15, 1024, 1025, 20 * 1024 + 77] {
        for dtype in Dtype::ALL {
            let grads = rounded(dtype, &numbers(7, count));
            let Some(sums) = on_device(|device| {
                let (mut from, blocks) = (Memory::floats(dtype, &grads), count.div_ceil(SQUARES as usize));
                let mut sums = Memory::unwritten(8 * blocks);
                device.run(&square_sums(dtype, count as u64, from.address(), sums.address()).unwrap());
                sums.to_integers()
            }) else {
                return;
            };
            let want: Vec<u64> = block_square_sums(&grads).map(f64::to_bits).collect();
            assert_eq!(sums, want, "{count} {dtype:?}");
        }
    }
}

/// All of the 65536 numbers of sixteen bits, and those between and beside them.
#[test]
fn numbers_are_rounded_to_nearest_even() {
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
