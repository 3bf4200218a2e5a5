//! Compares the attention kernels with a reference in f64.

mod keys;

use std::ops::Range;

use zero_kernels::attention::{Geometry, Saved, backward, forward};
use zero_kernels::{Address, Dtype};

use crate::{Memory, epsilon, numbers, on_device, rounded};

/// The inputs of attention: q, k, v and the gradient of the result, [batch, time, heads, size] each.
struct Case {
    of: Geometry,
    qkv: [Vec<f32>; 3],
    d_out: Vec<f32>,
    firsts: Vec<u32>,
    /// Number of heads whose blocks are interleaved. `None` keeps the launch's own choice.
    together: Option<u32>,
}

impl Case {
    /// The keys have the positions of the queries.
    fn new(of: Geometry, documents: bool) -> Self {
        let of = Geometry { keys: of.time, ..of };
        let count = |heads| (of.batch * of.time * heads * of.size) as usize;
        let values = |seed, heads| rounded(of.dtype, &numbers(seed, count(heads)));
        let q: Vec<f32> = values(1, of.heads).iter().map(|x| 2.0 * x).collect();
        let position = |at: u32| at % of.time;
        // Documents have 41 positions, so that their ends do not match those of tiles.
        let first = |at: u32| if documents { position(at) / 41 * 41 } else { 0 };
        Self {
            of,
            qkv: [q, values(2, of.kv_heads), values(3, of.kv_heads)],
            d_out: values(4, of.heads),
            firsts: (0..of.batch * of.time).map(first).collect(),
            together: None,
        }
    }

    fn at(&self, heads: u32, sample: u32, position: u32, head: u32) -> usize {
        (((sample * self.of.time + position) * heads + head) * self.of.size) as usize
    }

    /// Returns the result and the gradients of q, k and v in f64. Next to each number is the sum of the magnitudes of
    /// its terms.
    fn exact(&self) -> [Vec<[f64; 2]>; 4] {
        let Geometry { batch, time, heads, kv_heads, size, .. } = self.of;
        let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let [q, k, v] = self.qkv.each_ref().map(|values| wide(values));
        let d_out = wide(&self.d_out);
        let mut all = [&q, &q, &k, &k].map(|like| vec![[0.0; 2]; like.len()]);
        let (n, scale) = (size as usize, 1.0 / f64::from(size).sqrt());
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let dot_of_sizes = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum::<f64>();
        let add = |to: &mut [f64; 2], [a, a_size]: [f64; 2], b: f64| *to = [to[0] + a * b, to[1] + a_size * b.abs()];
        for (sample, head, t) in
            (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..time).map(move |t| (b, h, t))))
        {
            let query = self.at(heads, sample, t, head);
            let keys: Vec<usize> = (self.firsts[(sample * time + t) as usize]..=t)
                .map(|key| self.at(kv_heads, sample, key, head / (heads / kv_heads)))
                .collect();
            let (q, d) = (&q[query..query + n], &d_out[query..query + n]);
            let scores: Vec<f64> = keys.iter().map(|&key| scale * dot(q, &k[key..key + n])).collect();
            let largest = scores.iter().copied().fold(f64::MIN, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
            let p: Vec<f64> = scores.iter().map(|s| (s - largest).exp() / sum).collect();
            let dp: Vec<f64> = keys.iter().map(|&key| dot(d, &v[key..key + n])).collect();
            let dp_sizes: Vec<f64> = keys.iter().map(|&key| dot_of_sizes(d, &v[key..key + n])).collect();
            let (delta, delta_size) = (dot(&p, &dp), dot(&p, &dp_sizes));
            for (i, &key) in keys.iter().enumerate() {
                let ds = [dp[i] - delta, dp_sizes[i] + delta_size].map(|x| scale * p[i] * x);
                for e in 0..n {
                    add(&mut all[0][query + e], [p[i]; 2], v[key + e]);
                    add(&mut all[1][query + e], ds, k[key + e]);
                    add(&mut all[2][key + e], ds, q[e]);
                    add(&mut all[3][key + e], [p[i]; 2], d[e]);
                }
            }
        }
        all
    }

    /// Returns the result and the gradients of the kernels.
    fn found(&self) -> Option<[Vec<f32>; 4]> {
        let dtype = self.of.dtype;
        on_device(|device| {
            let mut firsts = Memory::integers(&self.firsts);
            let firsts = if self.firsts.iter().all(|&first| first == 0) { 0 } else { firsts.address() };
            let of = Geometry { firsts, ..self.of };
            let statistics = (of.batch * of.heads * of.time * 4) as usize;
            let (mut log_sums, mut deltas) = (Memory::unwritten(statistics), Memory::unwritten(statistics));
            let unwritten = |like: &Vec<f32>| Memory::floats(dtype, &vec![f32::NAN; like.len()]);
            let (mut out, mut d_out) = (unwritten(&self.d_out), Memory::floats(dtype, &self.d_out));
            let mut run = |qkv: [Address; 3], gradients: [Address; 3], out: &mut Memory| {
                let saved = Saved { qkv, out: out.address(), log_sums: log_sums.address(), d_out: d_out.address() };
                let forward = [forward(&of, qkv, saved.out, saved.log_sums).unwrap()];
                for launch in forward.into_iter().chain(backward(&of, &saved, gradients, deltas.address()).unwrap()) {
                    device.run(&match self.together {
                        Some(heads) => launch.with_heads_together(heads),
                        None => launch,
                    });
                }
            };
            if !of.packed {
                let mut memories = self.qkv.each_ref().map(|values| Memory::floats(dtype, values));
                let mut gradients = self.qkv.each_ref().map(unwritten);
                run(memories.each_mut().map(Memory::address), gradients.each_mut().map(Memory::address), &mut out);
                let [dq, dk, dv] = gradients.map(|memory| memory.to_floats(dtype));
                return [out.to_floats(dtype), dq, dk, dv];
            }
            // One buffer contains, for each position, q followed by k and v.
            let width = (of.heads * of.size) as usize;
            let all: Vec<f32> = (0..self.d_out.len() / width)
                .flat_map(|row| self.qkv.each_ref().map(|of| &of[row * width..(row + 1) * width]))
                .flatten()
                .copied()
                .collect();
            let (mut packed, mut gradients) = (Memory::floats(dtype, &all), unwritten(&all));
            let bytes = width as u64 * if dtype == Dtype::F32 { 4 } else { 2 };
            let parts = |begin: Address| [begin, begin + bytes, begin + 2 * bytes];
            run(parts(packed.address()), parts(gradients.address()), &mut out);
            let gradients = gradients.to_floats(dtype);
            let part = |i: usize| {
                let rows = gradients.chunks(3 * width);
                rows.flat_map(|row| row[i * width..(i + 1) * width].iter().copied()).collect::<Vec<_>>()
            };
            [out.to_floats(dtype), part(0), part(1), part(2)]
        })
    }

    /// Returns the rows of these positions of every sample.
    fn rows(&self, all: &[f32], positions: Range<u32>, heads: u32) -> Vec<f32> {
        let range = |sample| self.at(heads, sample, positions.start, 0)..self.at(heads, sample, positions.end, 0);
        (0..self.of.batch).flat_map(|sample| all[range(sample)].to_vec()).collect()
    }

    /// Checks that each number is as close to the exact one as rounding allows. For 16-bit types, the errors come from
    /// three roundings: of a probability or the gradient of a score; of `out` in Σ out·d_out; and of the number itself.
    /// `smallest` covers roundings to subnormal f16 numbers. For f32, scores reach 6 and have errors of 6 units, which
    /// e^score inherits.
    fn check(&self) {
        let Some(found) = self.found() else { return };
        let of = &self.of;
        let units = if of.dtype == Dtype::F32 { 16.0 } else { 3.0 };
        let smallest = f64::from(of.time * of.heads) * 2f64.powi(-24);
        for ((name, found), want) in ["out", "dq", "dk", "dv"].into_iter().zip(&found).zip(&self.exact()) {
            assert_eq!(found.len(), want.len());
            for (i, (&found, &[want, size])) in found.iter().zip(want).enumerate() {
                let (error, bound) = ((f64::from(found) - want).abs(), units * epsilon(of.dtype) * size + smallest);
                assert!(error <= bound, "{name}[{i}] of {of:?}: {found} for {want}: {error:e} over {bound:e}");
            }
        }
    }
}

const SMALL: Geometry = Geometry {
    batch: 2,
    time: 70,
    heads: 2,
    kv_heads: 1,
    size: 24,
    dtype: Dtype::F32,
    packed: false,
    firsts: 0,
    from: 0,
    keys: 70,
};

#[test]
fn every_dtype_and_head_size() {
    for dtype in Dtype::ALL {
        Case::new(Geometry { dtype, ..SMALL }, false).check();
    }
    let one = Geometry { batch: 1, heads: 1, ..SMALL };
    for (size, time) in [(1, 3), (32, 33), (40, 65), (64, 64), (96, 40), (128, 35)] {
        Case::new(Geometry { size, time, ..one }, false).check();
    }
    // These sizes cover tiles of 64 and of 128 rows, copies of 16 bytes (all rows are aligned) and smaller ones, and
    // tiles that every row sees or that some warps do not see.
    for (size, time) in [(1, 3), (17, 65), (64, 130), (64, 260), (100, 70), (128, 64), (128, 132)] {
        Case::new(Geometry { size, time, dtype: Dtype::Bf16, ..one }, false).check();
    }
    for size in [64, 128] {
        Case::new(Geometry { size, dtype: Dtype::F16, ..one }, false).check();
    }
}

/// A block finds its tile and its head for any order of blocks.
#[test]
fn interleaving_heads_changes_no_bits() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let of = Geometry { batch: 1, time: 132, heads: 4, kv_heads: 2, size: 8, dtype, ..SMALL };
        let found = |together| Case { together, ..Case::new(of, false) }.found();
        Case::new(of, false).check();
        let all = found(None);
        for heads in 1..4 {
            assert!(found(Some(heads)) == all, "{heads}");
        }
    }
}

#[test]
fn documents_are_masked_and_packed_qkv_has_the_same_bits() {
    Case::new(Geometry { time: 130, batch: 1, ..SMALL }, true).check();
    Case::new(Geometry { time: 204, batch: 1, heads: 1, size: 64, dtype: Dtype::F16, ..SMALL }, true).check();
    let of = Geometry { kv_heads: 2, dtype: Dtype::Bf16, ..SMALL };
    let (apart, packed) = (Case::new(of, true), Case::new(Geometry { packed: true, ..of }, true));
    assert!(apart.found() == packed.found());
    packed.check();
}

/// Neither earlier documents in a buffer nor other samples influence a row's bits.
#[test]
fn a_rows_bits_depend_only_on_the_keys_it_attends_to() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        bits_depend_on_what_is_seen(Geometry { batch: 2, time: 82, heads: 1, dtype, ..SMALL });
    }
}

fn bits_depend_on_what_is_seen(of: Geometry) {
    let whole = Case::new(of, true);
    let mut changed = Case::new(of, true);
    let row = of.size as usize;
    // Changes everything but the second document of the second sample.
    let kept = (82 + 41) * row..(82 + 82) * row;
    for values in changed.qkv.iter_mut().chain([&mut changed.d_out]) {
        values[..kept.start].iter_mut().for_each(|x| *x = 1.5 - *x);
        *values = rounded(of.dtype, values);
    }
    let (Some(whole), Some(changed)) = (whole.found(), changed.found()) else { return };
    for (whole, changed) in whole.iter().zip(&changed) {
        assert!(whole[kept.clone()] == changed[kept.clone()]);
        assert!(whole[..kept.start] != changed[..kept.start]);
    }
}

/// The results of queries at some positions are bit-identical to those of a run with all positions. The gradients of
/// keys and values, added over all parts, are equal to those of the full run.
#[test]
fn queries_at_some_positions_match_a_full_run() {
    for (dtype, size, time, ends) in [
        (Dtype::F32, 24, 70, [0, 13, 32, 70].as_slice()),
        (Dtype::F32, 128, 70, &[0, 40, 70]),
        (Dtype::Bf16, 24, 150, &[0, 8, 70, 150]),
        (Dtype::F16, 64, 200, &[0, 132, 200]),
        (Dtype::Bf16, 128, 100, &[0, 67, 100]),
    ] {
        for documents in [false, true] {
            let of = Geometry {
                batch: if documents { 2 } else { 1 },
                heads: if size == 24 { 2 } else { 1 },
                time,
                size,
                dtype,
                ..SMALL
            };
            let whole = Case::new(of, documents);
            let (Some(want), sizes) = (whole.found(), whole.exact()) else { return };
            let mut sums = [2, 3].map(|index: usize| vec![0.0; want[index].len()]);
            for part in ends.windows(2) {
                let [out, _, dq, dk, dv] = whole.of_keys(0..of.time, part[0]..part[1], None).unwrap();
                let found = [out, dq, dk, dv];
                for (index, which) in [(0, "out"), (1, "dq")] {
                    let expected = whole.rows(&want[index], part[0]..part[1], of.heads);
                    assert!(found[index] == expected, "{which} of {part:?} of {of:?}");
                }
                for (sum, found) in sums.iter_mut().zip(&found[2..]) {
                    sum.iter_mut().zip(found).for_each(|(sum, &part)| *sum += f64::from(part));
                }
            }
            for (index, sum) in [(2, &sums[0]), (3, &sums[1])] {
                for ((&sum, &want), &[_, size]) in sum.iter().zip(&want[index]).zip(&sizes[index]) {
                    let bound = 4.0 * epsilon(dtype) * size + 1e-4;
                    assert!((sum - f64::from(want)).abs() <= bound, "{sum} for {want} of {of:?}");
                }
            }
        }
    }
}

#[test]
fn unsupported_geometries_are_rejected() {
    let message = |of: Geometry| forward(&of, [0; 3], 0, 0).unwrap_err().to_string();
    let large = message(Geometry { size: 160, ..SMALL });
    assert_eq!(large, "attention on a GPU: a head must have 1 to 128 elements, got 160");
    let odd = message(Geometry { heads: 3, kv_heads: 2, ..SMALL });
    let packed = message(Geometry { from: 8, packed: true, ..SMALL });
    assert!(packed.contains("must be those of whole sequences"), "{packed}");
    assert_eq!(odd, "attention on a GPU: 3 heads are not a multiple of 2 key and value heads");
}
