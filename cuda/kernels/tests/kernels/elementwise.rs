//! Compares activations and rotary embedding with f64. Compares dropout, and the broadcast and sum of rows, bit by bit.
//! (`ops/tests/ops` compares their bits with the CPU's operations.)

use zero_kernels::Dtype;
use zero_kernels::activation::{self, Function};
use zero_kernels::dropout::{Mask, SampleLayout, dropout};
use zero_kernels::rotary::{Turn, rotary};
use zero_kernels::rows::{self, BLOCK, Onto};

use crate::{Memory, assert_near, epsilon, numbers, on_device, rounded};

/// Φ(x), by numerical integration of the density.
fn cdf(x: f64) -> f64 {
    // Simpson's rule.
    let (n, from) = (4000, -12.0);
    let h = (x - from) / f64::from(n);
    let density = |t: f64| (-0.5 * t * t).exp() / std::f64::consts::TAU.sqrt();
    let inner: f64 = (1..n).map(|i| density(from + h * f64::from(i)) * if i % 2 == 1 { 4.0 } else { 2.0 }).sum();
    h / 3.0 * (density(from) + inner + density(x))
}

fn exact(f: Function, x: f64) -> f64 {
    match f {
        Function::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x)).tanh())
        }
        Function::GeluErf => x * cdf(x),
        Function::Silu => x / (1.0 + (-x).exp()),
        Function::Relu => x.max(0.0),
    }
}

#[test]
fn activations_and_their_derivatives() {
    for dtype in Dtype::ALL {
        for f in Function::ALL {
            let count = 700;
            let x: Vec<f32> = rounded(dtype, &numbers(1, count).iter().map(|x| 4.0 * x).collect::<Vec<_>>());
            let dy = rounded(dtype, &numbers(2, count));
            let Some((y, dx)) = on_device(|device| {
                let (mut from, mut upstream) = (Memory::floats(dtype, &x), Memory::floats(dtype, &dy));
                let (mut y, mut dx) =
                    (Memory::floats(dtype, &vec![f32::NAN; count]), Memory::floats(dtype, &vec![f32::NAN; count]));
                let n = count as u64;
                device.run(&activation::forward(f, dtype, n, from.address(), y.address()).unwrap());
                let slope = activation::backward(f, dtype, n, from.address(), upstream.address(), dx.address());
                device.run(&slope.unwrap());
                (y.to_floats(dtype), dx.to_floats(dtype))
            }) else {
                return;
            };
            let want: Vec<f64> = x.iter().map(|&x| exact(f, f64::from(x))).collect();
            assert_near("y", dtype, &y, &want, 2.0, 2.0);
            let slope = |x: f64| (exact(f, x + 1e-5) - exact(f, x - 1e-5)) / 2e-5;
            let want: Vec<f64> = x.iter().zip(&dy).map(|(&x, &dy)| f64::from(dy) * slope(f64::from(x))).collect();
            assert_near("dx", dtype, &dx, &want, 2.0, 4.0);
        }
    }
}

#[test]
fn swiglu_and_its_gradients() {
    for dtype in Dtype::ALL {
        let count = 300;
        let [gate, up, dy] = [3, 4, 5].map(|seed| rounded(dtype, &numbers(seed, count)));
        let Some((y, d_gate, d_up)) = on_device(|device| {
            let [mut g, mut u, mut d] = [&gate, &up, &dy].map(|values| Memory::floats(dtype, values));
            let mut y = Memory::unwritten(count * 4);
            let n = count as u64;
            device.run(&activation::swiglu(dtype, n, [g.address(), u.address()], y.address()).unwrap());
            // The gradients overwrite gate and up.
            let (from, to) = ([g.address(), u.address()], [g.address(), u.address()]);
            device.run(&activation::swiglu_backward(dtype, n, from, d.address(), to).unwrap());
            (y.to_floats(dtype)[..count].to_vec(), g.to_floats(dtype), u.to_floats(dtype))
        }) else {
            return;
        };
        for i in 0..count {
            let (g, u, d) = (f64::from(gate[i]), f64::from(up[i]), f64::from(dy[i]));
            let s = 1.0 / (1.0 + (-g).exp());
            let near = |what, got: f32, want: f64| assert_near(what, dtype, &[got], &[want], 2.0, 1.0);
            near("y", y[i], g * s * u);
            near("gate", d_gate[i], d * u * (s + g * s * (1.0 - s)));
            near("up", d_up[i], d * g * s);
        }
    }
}

#[test]
fn rotary_embedding_and_its_inverse() {
    let shape @ [batch, time, heads, size] = [2u32, 5, 3, 8];
    let (count, half, positions) = ((batch * time * heads * size) as usize, size as usize / 2, 7);
    let angle = |at: usize| (at / half) as f64 * 100f64.powf(-((at % half) as f64) / half as f64);
    let tables =
        [f64::cos, f64::sin].map(|of| (0..positions * half).map(|at| of(angle(at)) as f32).collect::<Vec<_>>());
    for dtype in Dtype::ALL {
        let x = rounded(dtype, &numbers(6, count));
        let Some((y, back)) = on_device(|device| {
            let [mut cos, mut sin] = tables.each_ref().map(|table| Memory::floats(Dtype::F32, table));
            let mut memory = Memory::floats(dtype, &x);
            let (tables, at) = ([cos.address(), sin.address()], [memory.address(); 2]);
            device.run(&rotary(dtype, shape, tables, 0, at, Turn::Forth).unwrap());
            let y = memory.to_floats(dtype);
            device.run(&rotary(dtype, shape, tables, 0, at, Turn::Back).unwrap());
            (y, memory.to_floats(dtype))
        }) else {
            return;
        };
        let (size, row) = (size as usize, (heads * size) as usize);
        let turned = |at: usize| {
            let (position, i) = (at / row % time as usize, at % size);
            let angle = angle(position * half + i % half);
            let first = at - i + i % half;
            let (a, b) = (f64::from(x[first]), f64::from(x[first + half]));
            if i < half { a * angle.cos() - b * angle.sin() } else { b * angle.cos() + a * angle.sin() }
        };
        assert_near("y", dtype, &y, &(0..count).map(turned).collect::<Vec<_>>(), 1.0, 1.0);
        let x: Vec<f64> = x.into_iter().map(f64::from).collect();
        assert_near("back", dtype, &back, &x, 2.0, 2.0 * epsilon(dtype) / epsilon(Dtype::F32));
    }
}

/// Philox4x32-10 (Salmon et al., 2011).
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let [p, q] = [u64::from(counter[0]) * 0xd251_1f53, u64::from(counter[2]) * 0xcd9e_8d57];
        counter = [(q >> 32) as u32 ^ counter[1] ^ key[0], q as u32, (p >> 32) as u32 ^ counter[3] ^ key[1], p as u32];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    counter
}

#[test]
fn dropout_depends_only_on_an_elements_index() {
    // The first test vector that the authors published.
    assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
    let mask = Mask { key: [7, 9], first_sample: (1 << 32) - 1, probability: 0.3, scale: 1.0 / 0.7 };
    for [samples, size] in [[1u64, 1u64], [3, 10], [2, 1028]] {
        for dtype in Dtype::ALL {
            let x = rounded(dtype, &numbers(9, (samples * size) as usize));
            let Some(y) = on_device(|device| {
                let (mut from, mut y) = (Memory::floats(dtype, &x), Memory::floats(dtype, &vec![f32::NAN; x.len()]));
                device.run(
                    &dropout(dtype, &SampleLayout::whole([samples, size]), &mask, [from.address(), y.address()])
                        .unwrap(),
                );
                y.to_floats(dtype)
            }) else {
                return;
            };
            let want = x.iter().zip(0..).map(|(x, at)| {
                let (sample, column) = (mask.first_sample + at / size, at % size);
                let words = philox([(column / 4) as u32, 0, sample as u32, (sample >> 32) as u32], mask.key);
                let uniform = (words[column as usize % 4] >> 8) as f32 / 2f32.powi(24);
                if uniform < mask.probability { 0.0 } else { x * mask.scale }
            });
            assert_eq!(y, rounded(dtype, &want.collect::<Vec<_>>()), "{dtype:?} {samples}×{size}");
        }
    }
}

/// Dropout of some rows and columns of larger samples gives the same elements as dropout of the whole samples.
#[test]
fn dropout_of_a_slice_uses_the_mask_of_the_whole_sample() {
    let mask = Mask { key: [3, 1], first_sample: 5, probability: 0.4, scale: 1.0 / 0.6 };
    for (all, first, rows, column, width) in
        [(40u64, 2u64, 3u64, 16u64, 8u64), (24, 1, 2, 3, 5), (16, 0, 4, 8, 7), (33, 2, 2, 0, 33)]
    {
        const ROWS: u64 = 6;
        let (samples, apart) = (2, all);
        for dtype in Dtype::ALL {
            let x = rounded(dtype, &numbers(9, (samples * ROWS * all) as usize));
            let part: Vec<f32> = (0..samples * rows)
                .flat_map(|row| {
                    let at = ((row / rows * ROWS + first + row % rows) * all + column) as usize;
                    x[at..at + width as usize].to_vec()
                })
                .collect();
            let Some((y, of_part)) = on_device(|device| {
                let run = |x: &[f32], place: SampleLayout| {
                    let mut x = Memory::floats(dtype, x);
                    device.run(&dropout(dtype, &place, &mask, [x.address(), x.address()]).unwrap());
                    x.to_floats(dtype)
                };
                let (stride, first) = (rows * width, first * all + column);
                let place = SampleLayout { samples, rows, width, stride, first, apart };
                (run(&x, SampleLayout::whole([samples, ROWS * all])), run(&part, place))
            }) else {
                return;
            };
            for (row, got) in (0..).zip(of_part.chunks(width as usize)) {
                let at = ((row / rows * ROWS + first + row % rows) * all + column) as usize;
                assert_eq!(got, &y[at..at + width as usize], "{dtype:?}, row {row} of {width} columns");
            }
        }
    }
}

#[test]
fn rows_are_broadcast_and_summed() {
    for [rows, size] in [[1u32, 1], [63, 5], [64, 300], [2 * BLOCK + 7, 33], [1030, 3], [17 * BLOCK + 21, 20], [3, 516]]
    {
        for dtype in Dtype::ALL {
            let (x, before) = (rounded(dtype, &numbers(7, (rows * size) as usize)), numbers(8, size as usize));
            // Sums blocks of rows in order, then the partial sums in order, to get the same bits.
            let mut partials = vec![vec![0f32; size as usize]; rows.div_ceil(BLOCK) as usize];
            for (row, x) in x.chunks(size as usize).enumerate() {
                partials[row / BLOCK as usize].iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
            }
            let onto = |start: f32, column: usize| partials.iter().fold(start, |sum, partial| sum + partial[column]);
            for onto_what in [Onto::Nothing, Onto::Sum, Onto::Start] {
                let Some((spread, sums)) = on_device(|device| {
                    let (mut at_x, mut to) = (Memory::floats(dtype, &x), Memory::floats(Dtype::F32, &before));
                    let mut partials = Memory::unwritten((rows.div_ceil(BLOCK) * size * 4) as usize);
                    device.run(&rows::sums(dtype, [rows, size], at_x.address(), partials.address()));
                    device.run(&rows::total([rows, size], partials.address(), to.address(), onto_what));
                    let mut all = Memory::floats(dtype, &vec![f32::NAN; (rows * size) as usize]);
                    device.run(&rows::spread(dtype, [rows, size], at_x.address(), all.address()).unwrap());
                    (all.to_floats(dtype), to.to_floats(Dtype::F32))
                }) else {
                    return;
                };
                assert!(spread.chunks(size as usize).all(|row| row == &x[..size as usize]));
                let want = |column: usize| match onto_what {
                    Onto::Nothing => onto(0.0, column),
                    Onto::Sum => before[column] + onto(0.0, column),
                    Onto::Start => onto(before[column], column),
                };
                assert_eq!(sums, (0..size as usize).map(want).collect::<Vec<_>>(), "{onto_what:?} {rows}x{size}");
            }
        }
    }
}
