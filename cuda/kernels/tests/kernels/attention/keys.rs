//! Attention to some of the keys, as in ring attention.

use std::ops::Range;

use zero_kernels::Dtype;
use zero_kernels::attention::{Geometry, Saved, backward, forward};

use super::{Case, SMALL};
use crate::{Memory, epsilon, on_device, rounded};

impl Case {
    /// Runs the kernels for the keys and the queries at some positions. No query is before the first key. If
    /// `over_more` is given, the backward takes from it the results and log-sums of these queries over more keys.
    /// Returns the result, log-sums and gradients.
    pub(super) fn of_keys(
        &self,
        keys: Range<u32>,
        queries: Range<u32>,
        over_more: Option<[&[f32]; 2]>,
    ) -> Option<[Vec<f32>; 5]> {
        let (dtype, Geometry { batch, time, heads, kv_heads, .. }) = (self.of.dtype, self.of);
        let (from, to) = (queries.start - keys.start, queries.end - keys.start);
        let (rows, count) = (to - from, keys.end - keys.start);
        // In a ring, only the entries of queries are set.
        let first = |sample: u32, at: u32| match over_more.is_none() || (from..to).contains(&at) {
            true => self.firsts[(sample * time + keys.start + at) as usize].clamp(keys.start, keys.end) - keys.start,
            false => 0,
        };
        let firsts: Vec<u32> = (0..batch).flat_map(|b| (0..to.max(count)).map(move |at| first(b, at))).collect();
        on_device(|device| {
            let mut firsts = Memory::integers(&firsts);
            let of = Geometry { firsts: firsts.address(), from, time: to, keys: count, ..self.of };
            let statistics = (batch * heads * rows * 4) as usize;
            let (mut log_sums, mut deltas) = (Memory::unwritten(statistics), Memory::unwritten(statistics));
            let mut q = Memory::floats(dtype, &self.rows(&self.qkv[0], queries.clone(), heads));
            let mut d_out = Memory::floats(dtype, &self.rows(&self.d_out, queries.clone(), heads));
            let of_part = |which: usize| Memory::floats(dtype, &self.rows(&self.qkv[which], keys.clone(), kv_heads));
            let [mut k, mut v] = [1, 2].map(of_part);
            let unwritten = vec![f32::NAN; (batch * rows * heads * of.size) as usize];
            let [mut out, mut dq] = [(); 2].map(|()| Memory::floats(dtype, &unwritten));
            // Keys that no query sees keep their zeros.
            let row = (kv_heads * of.size) as usize;
            let of_keys =
                [vec![f32::NAN; to.min(count) as usize * row], vec![0.0; count.saturating_sub(to) as usize * row]];
            let of_keys = of_keys.concat().repeat(batch as usize);
            let [mut dk, mut dv] = [(); 2].map(|()| Memory::floats(dtype, &of_keys));
            let qkv = [&mut q, &mut k, &mut v].map(Memory::address);
            device.run(&forward(&of, qkv, out.address(), log_sums.address()).unwrap());
            let mut over_more =
                over_more.map(|[out, log_sums]| [Memory::floats(dtype, out), Memory::floats(Dtype::F32, log_sums)]);
            let [of_out, of_log_sums] = match &mut over_more {
                Some(of_more) => of_more.each_mut().map(Memory::address),
                None => [out.address(), log_sums.address()],
            };
            let saved = Saved { qkv, out: of_out, log_sums: of_log_sums, d_out: d_out.address() };
            let gradients = [&mut dq, &mut dk, &mut dv].map(Memory::address);
            for launch in backward(&of, &saved, gradients, deltas.address()).unwrap() {
                device.run(&launch);
            }
            let [out, dq, dk, dv] = [out, dq, dk, dv].map(|memory| memory.to_floats(dtype));
            [out, log_sums.to_floats(Dtype::F32), dq, dk, dv]
        })
    }
}

/// The results for parts of the keys, combined by their log-sums, equal the results for all keys. The gradients for
/// parts of the keys, computed with the results and log-sums for all keys, add up to the gradients for all keys.
#[test]
fn parts_of_the_keys_add_up() {
    for (dtype, size, time, ends) in [
        (Dtype::F32, 24, 70, [0, 13, 32, 70].as_slice()),
        (Dtype::F32, 128, 70, &[0, 40, 70]),
        (Dtype::Bf16, 24, 150, &[0, 8, 70, 150]),
        (Dtype::F16, 64, 200, &[0, 64, 132, 200]),
        (Dtype::Bf16, 128, 100, &[0, 67, 100]),
    ] {
        for documents in [false, true] {
            let heads = if size == 24 { 2 } else { 1 };
            let of = Geometry { batch: if documents { 2 } else { 1 }, heads, time, size, dtype, ..SMALL };
            let (case, n) = (Case::new(of, documents), size as usize);
            let exact = case.exact();
            // Each query's result, and its ln Σ e^score.
            let mut whole: Vec<(Vec<f64>, f64)> = vec![(vec![0.0; n], f64::NEG_INFINITY); case.d_out.len() / n];
            // Returns for each query in a range of positions, in the order of the log-sums, its index among all queries
            // and its index among those in the range.
            let queries = |of_part: &Range<u32>| {
                let Range { start, end } = *of_part;
                let all = (0..of.batch).flat_map(move |b| (0..heads).map(move |h| (b, h)));
                let at = move |b, h, t, from: u32, to: u32| ((b * (to - from) + t - from) * heads + h) as usize;
                all.flat_map(move |(b, h)| (start..end).map(move |t| [at(b, h, t, 0, time), at(b, h, t, start, end)]))
            };
            // As in a ring, queries at the positions of the keys and queries after all keys run separately.
            let both = |part: &[u32]| [part[0]..part[1], part[1]..time].into_iter().filter(|part| !part.is_empty());
            let parts = || ends.windows(2).flat_map(|part| both(part).map(move |queries| (part, queries)));
            let run = |part: &[u32], of_part: &Range<u32>, whole: &[(Vec<f64>, f64)]| {
                let (mut out, mut log_sums) = (vec![0.0; queries(of_part).count() * n], vec![]);
                for [all, own] in queries(of_part) {
                    // A query without a result so far gets a finite log-sum, so that its gradients are not NaN.
                    log_sums.push(if whole[all].1.is_finite() { whole[all].1 as f32 } else { 0.0 });
                    out[own * n..(own + 1) * n].iter_mut().zip(&whole[all].0).for_each(|(to, &x)| *to = x as f32);
                }
                case.of_keys(part[0]..part[1], of_part.clone(), Some([&rounded(dtype, &out), &log_sums]))
            };
            for (part, of_part) in parts() {
                let Some([found, log_sums, ..]) = run(part, &of_part, &whole) else { return };
                for ([all, own], added) in queries(&of_part).zip(log_sums.into_iter().map(f64::from)) {
                    let (out, sum) = &mut whole[all];
                    let both = sum.max(added) + (-(*sum - added).abs()).exp().ln_1p();
                    let weights =
                        if added == f64::NEG_INFINITY { [1.0, 0.0] } else { [*sum, added].map(|x| (x - both).exp()) };
                    for (out, &found) in out.iter_mut().zip(&found[own * n..(own + 1) * n]) {
                        *out = weights[0] * *out + weights[1] * f64::from(found);
                    }
                    *sum = if added == f64::NEG_INFINITY { *sum } else { both };
                }
            }
            let mut found = [vec![], vec![0.0; case.d_out.len()], vec![], vec![]];
            found[0] = whole.iter().flat_map(|(out, _)| out.clone()).collect();
            found[2].resize(exact[2].len(), 0.0);
            found[3].resize(exact[3].len(), 0.0);
            for (part, of_part) in parts() {
                let [_, _, dq, dk, dv] = run(part, &of_part, &whole).unwrap();
                for [all, own] in queries(&of_part) {
                    (0..n).for_each(|e| found[1][all * n + e] += f64::from(dq[own * n + e]));
                }
                let (width, count) = ((of.kv_heads * size) as usize, (part[1] - part[0]) as usize);
                for (which, d) in [(2, dk), (3, dv)] {
                    for (sample, d) in d.chunks(count * width).enumerate() {
                        let begin = (sample * time as usize + part[0] as usize) * width;
                        found[which][begin..begin + d.len()].iter_mut().zip(d).for_each(|(to, &x)| *to += f64::from(x));
                    }
                }
            }
            let units = if dtype == Dtype::F32 { 32.0 } else { 6.0 };
            for ((name, found), want) in ["out", "dq", "dk", "dv"].into_iter().zip(&found).zip(&exact) {
                for (i, (&found, &[want, size])) in found.iter().zip(want).enumerate() {
                    let (error, bound) = ((found - want).abs(), units * epsilon(dtype) * size + 1e-4);
                    assert!(error <= bound, "{name}[{i}] of {of:?}: {found} for {want}: {error:e} over {bound:e}");
                }
            }
        }
    }
}
