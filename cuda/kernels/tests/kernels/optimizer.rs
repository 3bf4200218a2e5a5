//! AdamW, squares and roundings: the CPU's bits.

use half::{bf16, f16};
use zero_kernels::Dtype;
use zero_kernels::emulated::Memory;
use zero_kernels::optimizer::{SQUARES, adam, add_to, narrow, square_sums, widen};
use zero_optim::norm::block_square_sums;
use zero_optim::{AdamW, Optimizer, Step, update};

use crate::{numbers, on_device, rounded};

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn an_update_has_the_bits_of_the_cpus() {
    let count = 3000;
    for decoupled in [true, false] {
        for dtype in Dtype::ALL {
            let rule = AdamW { weight_decay: 0.1, decoupled, ..AdamW::default() };
            let grads: Vec<Vec<f32>> = (0..3)
                .map(|step| {
                    // From squares that vanish in f32 to ones that pass its end.
                    let all = numbers(10 + step, count).into_iter().zip((-30..30).cycle());
                    rounded(dtype, &all.map(|(x, power)| x * 2f32.powi(power / 3)).collect::<Vec<_>>())
                })
                .collect();
            let (start, lr) = (numbers(1, count), 1e-2);
            let step_of = |step: usize| Step { step: step as u64 + 1, lr, grad_scale: 0.37, decay: true };
            let Some((params, exp_avg, exp_avg_sq, working)) = on_device(|device| {
                let mut params = Memory::floats(Dtype::F32, &start);
                let [mut m, mut v] = [(); 2].map(|()| Memory::floats(Dtype::F32, &vec![0.0; count]));
                let mut working = Memory::floats(dtype, &vec![f32::NAN; count]);
                for (step, grads) in grads.iter().enumerate() {
                    let mut grads = Memory::floats(dtype, grads);
                    let states = [params.address(), m.address(), v.address()];
                    let (count, to) = (count as u64, working.address());
                    let launch = adam(dtype, count, &rule, &step_of(step), states, grads.address(), to);
                    device.run(&launch.unwrap());
                }
                let of = |memory: &Memory| bits(&memory.to_floats(Dtype::F32));
                (of(&params), of(&m), of(&v), bits(&working.to_floats(dtype)))
            }) else {
                return;
            };
            let (mut want, mut m, mut v) = (start.clone(), vec![0.0; count], vec![0.0; count]);
            for (step, grads) in grads.iter().enumerate() {
                let optimizer = Optimizer::AdamW(rule);
                update(&optimizer, &step_of(step), &mut want, grads, &mut [&mut m, &mut v]).unwrap();
            }
            assert!(params == bits(&want), "parameters, {dtype:?}, decoupled {decoupled}");
            assert!(exp_avg == bits(&m) && exp_avg_sq == bits(&v), "moments, {dtype:?}, decoupled {decoupled}");
            assert!(working == bits(&rounded(dtype, &want)), "working parameters, {dtype:?}");
        }
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
            let (mut to, mut back) = (Memory::floats(dtype, &all), Memory::floats(Dtype::F32, &all));
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
