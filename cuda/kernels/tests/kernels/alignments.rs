//! Kernels that access 16 bytes at a time give the same bits for every alignment of their operands. Some numbers of
//! elements are multiples of a pack and some are not; some take one loop iteration of a launch's threads and some take
//! several.

use zero_kernels::activation::{self, Function};
use zero_kernels::cross_entropy::{self, Counted, Logits, Upstream, rescale};
use zero_kernels::dropout::{Mask, SampleLayout, dropout};
use zero_kernels::embedding::{Lookup, gather, keys, scatter, sort};
use zero_kernels::norm::{self, Parameter, Rows, Weights};
use zero_kernels::optimizer::{add_to, narrow, widen};
use zero_kernels::rotary::{Turn, rotary};
use zero_kernels::rows::{self, Onto};
use zero_kernels::{Address, Dtype, Launch};

use crate::memory::Device;
use crate::{Memory, numbers, on_device, rounded};

fn bytes(dtype: Dtype) -> usize {
    if dtype == Dtype::F32 { 4 } else { 2 }
}

/// Numbers that begin `behind` elements after a multiple of 16 bytes.
struct Placed {
    memory: Memory,
    dtype: Dtype,
    behind: usize,
}

impl Placed {
    fn new(dtype: Dtype, values: &[f32], behind: usize) -> Self {
        let all: Vec<f32> = std::iter::repeat_n(-7.0, behind).chain(values.iter().copied()).collect();
        Self { memory: Memory::floats(dtype, &all), dtype, behind }
    }

    fn address(&mut self) -> Address {
        self.memory.address() + (self.behind * bytes(self.dtype)) as Address
    }

    /// Returns the bits of the numbers. Panics if a kernel wrote before the first one.
    fn bits(&self) -> Vec<u32> {
        let all = self.memory.to_floats(self.dtype);
        assert!(all[..self.behind].iter().all(|&x| x == -7.0), "a write in front of memory");
        all[self.behind..].iter().map(|x| x.to_bits()).collect()
    }
}

/// The type and the numbers of each operand.
type Operands = Vec<(Dtype, Vec<f32>)>;

/// Checks that all operands hold the same numbers after `run` in each of these alignments: all operands at multiples of
/// 16 bytes, each one alone shifted, and all shifted.
fn check_all_alignments(what: &str, operands: &Operands, run: impl Fn(&Device, &[Address])) {
    let places = std::iter::once(vec![0; operands.len()])
        .chain((0..operands.len()).map(|odd| (0..operands.len()).map(|i| usize::from(i == odd)).collect()))
        .chain([vec![1; operands.len()], vec![3; operands.len()]]);
    let mut want = None;
    for behind in places {
        let Some(found) = on_device(|device| {
            let placed =
                operands.iter().zip(&behind).map(|((dtype, values), &behind)| Placed::new(*dtype, values, behind));
            let mut placed: Vec<Placed> = placed.collect();
            run(device, &placed.iter_mut().map(Placed::address).collect::<Vec<_>>());
            placed.iter().map(Placed::bits).collect::<Vec<_>>()
        }) else {
            return;
        };
        let want = want.get_or_insert_with(|| found.clone());
        for (i, (found, want)) in found.iter().zip(&*want).enumerate() {
            assert!(found == want, "{what}: operand {i} where operands begin {behind:?} behind a multiple");
        }
    }
}

fn operand(dtype: Dtype, seed: u32, count: usize) -> (Dtype, Vec<f32>) {
    (dtype, rounded(dtype, &numbers(seed, count)))
}

/// Runs a launch as it is, or with a single block, whose threads then take several loop iterations.
fn in_turns<A>(device: &Device, launch: Option<Launch<A>>, one: bool) {
    let launch = launch.unwrap();
    let grid = if one { [1, 1, 1] } else { launch.grid };
    device.run(&Launch { grid, ..launch });
}

#[test]
fn elementwise_kernels_in_all_alignments() {
    for dtype in Dtype::ALL {
        // The largest count exceeds the elements that one block processes in one loop iteration.
        for (count, one) in [(1, false), (7, false), (8, false), (4099, false), (4099 * 2, true)] {
            let (n, what) = (count as u64, format!("{dtype:?} {count}"));
            let [a, b, c] = [1, 2, 3].map(|seed| operand(dtype, seed, count));
            let wide = operand(Dtype::F32, 4, count);
            let [y, z] = [(); 2].map(|()| (dtype, vec![f32::NAN; count]));
            check_all_alignments(&format!("gelu {what}"), &vec![a.clone(), y.clone()], |device, at| {
                in_turns(device, activation::forward(Function::GeluTanh, dtype, n, at[0], at[1]), one);
            });
            check_all_alignments(&format!("relu's {what}"), &vec![a.clone(), b.clone(), y.clone()], |device, at| {
                in_turns(device, activation::backward(Function::Relu, dtype, n, at[0], at[1], at[2]), one);
            });
            check_all_alignments(&format!("add {what}"), &vec![a.clone(), b.clone()], |device, at| {
                in_turns(device, activation::add(dtype, n, [at[0], at[1]], at[0]), one);
            });
            let all = vec![a.clone(), b.clone(), c, y, z];
            check_all_alignments(&format!("swiglu's {what}"), &all, |device, at| {
                in_turns(device, activation::swiglu_backward(dtype, n, [at[0], at[1]], at[2], [at[3], at[4]]), one);
            });
            check_all_alignments(&format!("add_to {what}"), &vec![a.clone(), wide.clone()], |device, at| {
                in_turns(device, add_to(dtype, n, at[0], at[1]), one);
            });
            check_all_alignments(&format!("widen and narrow {what}"), &vec![a.clone(), wide], |device, at| {
                in_turns(device, narrow(dtype, n, at[1], at[0]), one);
                in_turns(device, widen(dtype, n, at[0], at[1]), one);
            });
            for add in [false, true] {
                let all = vec![a.clone(), b.clone(), operand(Dtype::F32, 5, 1)];
                check_all_alignments(&format!("rescale {what}"), &all, |device, at| {
                    in_turns(device, rescale(dtype, n, [at[0], at[1]], (0.25, at[2]), add), one);
                });
            }
        }
    }
}

#[test]
fn add_gives_the_rounded_sum() {
    for dtype in Dtype::ALL {
        let (a, b) = (rounded(dtype, &numbers(1, 1000)), rounded(dtype, &numbers(2, 1000)));
        let Some(sum) = on_device(|device| {
            let [mut a, mut b] = [&a, &b].map(|values| Memory::floats(dtype, values));
            let mut y = Memory::unwritten(1000 * bytes(dtype));
            device.run(&activation::add(dtype, 1000, [a.address(), b.address()], y.address()).unwrap());
            y.to_floats(dtype)
        }) else {
            return;
        };
        assert_eq!(sum, rounded(dtype, &a.iter().zip(&b).map(|(a, b)| a + b).collect::<Vec<_>>()));
    }
}

#[test]
fn norms_in_all_alignments() {
    for dtype in Dtype::ALL {
        // Rows of whole packs, rows of packs and a remainder, and rows that do not fit the threads' registers.
        for (rows, size) in [(9u32, 48u32), (9, 45), (2, 8208)] {
            let (of, count) = (Rows { rows, size, dtype, eps: 1e-5 }, (rows * size) as usize);
            let [x, other] = [1, 2].map(|seed| operand(dtype, seed, count));
            let [weight, bias] = [3, 4].map(|seed| operand(dtype, seed, size as usize));
            let [y, total] = [(); 2].map(|()| (dtype, vec![f32::NAN; count]));
            let what = format!("{dtype:?} {rows} × {size}");
            let all = vec![x.clone(), other.clone(), weight.clone(), bias.clone(), y.clone(), total];
            check_all_alignments(&format!("forward {what}"), &all, |device, at| {
                let weights = Weights::Layer { weight: at[2], bias: at[3] };
                device.run(&norm::forward_residual(&of, weights, [at[0], at[1]], [at[5], at[4]]));
            });
            let partials = (Dtype::F32, vec![f32::NAN; of.partials(Weights::Layer { weight: 0, bias: 0 })]);
            let sums = (Dtype::F32, vec![f32::NAN; size as usize]);
            let all = vec![x, other.clone(), weight, other, y, partials, sums];
            check_all_alignments(&format!("backward {what}"), &all, |device, at| {
                let weights = Weights::Layer { weight: at[2], bias: 0 };
                device.run(&norm::backward(&of, weights, [at[0], at[1], at[3]], [at[4], at[5]]));
                device.run(&norm::sums(&of, weights, Parameter::Bias, [at[5], at[6]], false));
            });
        }
    }
}

#[test]
fn rotary_in_all_alignments() {
    for dtype in Dtype::ALL {
        for shape @ [batch, time, heads, size] in [[2u32, 3, 2, 32], [1, 5, 3, 10], [1, 2, 70, 64], [2, 2, 1, 2]] {
            let (count, table) = ((batch * time * heads * size) as usize, (time * size / 2) as usize);
            let all = vec![
                operand(dtype, 1, count),
                (dtype, vec![f32::NAN; count]),
                operand(Dtype::F32, 2, table),
                operand(Dtype::F32, 3, table),
            ];
            check_all_alignments(&format!("rotary {dtype:?} {shape:?}"), &all, |device, at| {
                device.run(&rotary(dtype, shape, [at[2], at[3]], 0, [at[0], at[1]], Turn::Back).unwrap());
            });
        }
    }
}

#[test]
fn dropout_in_all_alignments() {
    let mask = Mask { key: [1, 2], first_sample: 1 << 40, probability: 0.3, scale: 1.0 / 0.7 };
    for dtype in Dtype::ALL {
        for [samples, size] in [[3u64, 40], [5, 13], [1, 5000]] {
            let count = (samples * size) as usize;
            let all = vec![operand(dtype, 1, count), (dtype, vec![f32::NAN; count])];
            for one in [false, true] {
                check_all_alignments(&format!("dropout {dtype:?} {samples} × {size}"), &all, |device, at| {
                    in_turns(device, dropout(dtype, &SampleLayout::whole([samples, size]), &mask, [at[0], at[1]]), one);
                });
            }
        }
    }
}

#[test]
fn embeddings_and_row_sums_in_all_alignments() {
    for dtype in Dtype::ALL {
        for size in [24u32, 9, 2080] {
            let (count, entries, what) = (30u32, 7u32, format!("{dtype:?} rows of {size}"));
            let ids: Vec<u32> = (0..count).map(|i| i * i % 9).collect();
            let of = Lookup { count, entries, size, dtype };
            let (table, dy) =
                (operand(dtype, 1, (entries * size) as usize), operand(dtype, 2, (count * size) as usize));
            let to = operand(Dtype::F32, 3, (entries * size) as usize);
            let all = vec![table, (dtype, vec![0.5; (count * size) as usize])];
            check_all_alignments(&format!("gather {what}"), &all, |device, at| {
                let mut ids = Memory::integers(&ids);
                in_turns(device, gather(&of, at[0], ids.address(), at[1]), size == 9);
            });
            check_all_alignments(&format!("scatter {what}"), &vec![dy.clone(), to], |device, at| {
                let (mut ids, mut room) = (Memory::integers(&ids), Memory::unwritten(8 * keys(count) as usize));
                sort(count, ids.address(), room.address()).for_each(|launch| device.run(&launch));
                device.run(&scatter(&of, at[0], room.address(), at[1], true).unwrap());
            });
            let all =
                vec![dy, (Dtype::F32, vec![f32::NAN; size as usize]), (Dtype::F32, vec![f32::NAN; size as usize])];
            check_all_alignments(&format!("sums {what}"), &all, |device, at| {
                device.run(&rows::sums(dtype, [count, size], at[0], at[1]));
                device.run(&rows::total([count, size], at[1], at[2], Onto::Nothing));
            });
        }
    }
}

#[test]
fn cross_entropy_in_all_alignments() {
    for dtype in Dtype::ALL {
        // The gap after each row of 45 gives the next row another alignment. The last size takes more than one loop
        // iteration of a block's threads.
        for (classes, stride) in [(8u32, 8u64), (13, 13), (45, 48), (4 * 512 * 4 + 3, 4 * 512 * 4 + 3)] {
            let row = rounded(dtype, &numbers(1, classes as usize).iter().map(|x| 9.0 * x).collect::<Vec<_>>());
            // All rows have the same numbers.
            let logits = (0..3).flat_map(|_| {
                let gap = std::iter::repeat_n(-7.0, stride as usize - classes as usize);
                row.iter().copied().chain(gap)
            });
            let logits: Vec<f32> = logits.collect();
            let all =
                vec![(dtype, logits.clone()), (dtype, vec![f32::NAN; logits.len()]), (Dtype::F32, vec![f32::NAN; 9])];
            check_all_alignments(&format!("cross-entropy {dtype:?} {classes}"), &all, |device, at| {
                let mut targets = Memory::integers(&[3; 3]);
                let targets = targets.address();
                let of = Logits { rows: 3, classes, stride, dtype, logits: at[0], targets, z_loss: 0.0 };
                device.run(&cross_entropy::forward(&of, at[2]));
                device.run(&cross_entropy::backward(
                    &of,
                    at[2],
                    (Upstream::Known(2.0), Counted::Known(3)),
                    (dtype, at[1]),
                ));
            });
            // The results must not depend on where a row begins.
            let Some((statistics, gradient)) = on_device(|device| {
                let (mut x, mut targets) = (Placed::new(dtype, &logits, 1), Memory::integers(&[3; 3]));
                let mut statistics = Memory::unwritten(36);
                let (logits, targets) = (x.address(), targets.address());
                let of = Logits { rows: 3, classes, stride, dtype, logits, targets, z_loss: 0.0 };
                device.run(&cross_entropy::forward(&of, statistics.address()));
                let mean = (Upstream::Known(2.0), Counted::Known(3));
                device.run(&cross_entropy::backward(&of, statistics.address(), mean, (dtype, logits)));
                (statistics.to_integers(), x.bits())
            }) else {
                return;
            };
            let words: Vec<u32> = statistics.iter().flat_map(|&two| [two as u32, (two >> 32) as u32]).collect();
            assert!(words[..3] == words[3..6], "{dtype:?} {classes}");
            let mut rows = gradient.chunks(stride as usize);
            let first = rows.next().unwrap();
            assert!(rows.all(|row| row == first), "{dtype:?} {classes}");
        }
    }
}

/// Logits of −∞ contribute nothing, even if a thread reads no other logits in an iteration.
#[test]
fn logits_of_minus_infinity_do_not_contribute() {
    for dtype in Dtype::ALL {
        let (classes, some) = (5000u32, 4..9);
        let share = |x: f32| (x - 1.0).exp();
        let row: Vec<f32> =
            (0..classes).map(|i| if some.contains(&i) { i as f32 / 8.0 } else { f32::NEG_INFINITY }).collect();
        let Some(statistics) = on_device(|device| {
            let (mut x, mut targets) = (Memory::floats(dtype, &row), Memory::integers(&[5]));
            let mut statistics = Memory::unwritten(12);
            let (logits, targets) = (x.address(), targets.address());
            let of = Logits { rows: 1, classes, stride: classes.into(), dtype, logits, targets, z_loss: 0.0 };
            device.run(&cross_entropy::forward(&of, statistics.address()));
            statistics.to_floats(Dtype::F32)
        }) else {
            return;
        };
        let want: f32 = some.map(|i| share(i as f32 / 8.0)).sum();
        assert_eq!([statistics[0], statistics[2]], [1.0, 0.625], "{dtype:?}");
        assert!((statistics[1] - want).abs() < 1e-5, "{dtype:?}: {} for {want}", statistics[1]);
    }
}
