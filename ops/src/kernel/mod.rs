//! The arithmetic of the operations, as pure functions over slices.
//!
//! Each kernel is one generic Rust function that is compiled three times: for the baseline instruction set (the
//! scalar oracle), for AVX2 with FMA, and for AVX-512. The results are bit-identical, since rustc neither reorders
//! nor contracts floating-point operations. Fused multiply-adds are written as `mul_add`, and sums run in sixteen
//! interleaved lanes that are added in a fixed tree.

pub(crate) mod activation;
pub(crate) mod decode;
mod f16;
mod half_float;
pub(crate) mod lanes;
pub(crate) mod math;
pub(crate) mod norm;
pub(crate) mod random;
pub(crate) mod rotary;
pub(crate) mod softmax;

pub(crate) use half_float::HalfFloat;
pub(crate) use lanes::vectorised;
pub use zero_isa::Isa;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Stream;

    fn normal(name: &str, len: usize) -> Vec<f32> {
        let mut values = vec![0.0; len];
        Stream::new(4, name, 0).fill_normal(0, &mut values);
        values.iter_mut().for_each(|v| *v *= 3.0);
        values
    }

    /// Runs `kernel` on each instruction set and compares the results. `outputs` are the sizes of its output buffers,
    /// which start with the same noise.
    fn same(name: &str, outputs: &[usize], kernel: impl Fn(Isa, &mut [Vec<f32>])) {
        let mut oracle: Option<Vec<Vec<f32>>> = None;
        for isa in Isa::available() {
            let mut got: Vec<Vec<f32>> = outputs.iter().map(|&len| normal("output", len)).collect();
            kernel(isa, &mut got);
            let oracle = oracle.get_or_insert_with(|| got.clone());
            for (got, want) in got.iter().flatten().zip(oracle.iter().flatten()) {
                assert_eq!(got.to_bits(), want.to_bits(), "{name} on {isa:?}: {got:e} for {want:e}");
            }
        }
    }

    #[test]
    fn every_instruction_set_gives_the_bits_of_the_baseline() {
        assert_eq!(Isa::available()[0], Isa::BASELINE);
        for n in [1, 2, 7, 15, 16, 17, 33, 100, 257] {
            let (x, dy, w, b) = (normal("x", 3 * n), normal("dy", 3 * n), normal("w", n), normal("b", n));
            type Forward = fn(Isa, &[f32], &mut [f32]);
            type Backward = fn(Isa, &[f32], &[f32], &mut [f32]);
            let elementwise: [(&str, Forward, Backward); 3] = [
                ("gelu", activation::gelu_tanh, activation::gelu_tanh_backward),
                ("gelu erf", activation::gelu_erf, activation::gelu_erf_backward),
                ("silu", activation::silu, activation::silu_backward),
            ];
            for (name, forward, backward) in elementwise {
                same(name, &[3 * n], |isa, out| forward(isa, &x, &mut out[0]));
                same(name, &[3 * n], |isa, out| backward(isa, &x, &dy, &mut out[0]));
            }
            same("swiglu", &[3 * n], |isa, out| activation::swiglu(isa, &x, &dy, &mut out[0]));
            same("swiglu backward", &[3 * n, 3 * n], |isa, out| {
                let [d_gate, d_up] = out else { panic!("two outputs") };
                activation::swiglu_backward(isa, &x, &dy, &x, d_gate, d_up);
            });
            same("geglu", &[3 * n], |isa, out| activation::geglu(isa, &x, &dy, &mut out[0]));
            same("geglu backward", &[3 * n, 3 * n], |isa, out| {
                let [d_gate, d_up] = out else { panic!("two outputs") };
                activation::geglu_backward(isa, &x, &dy, &x, d_gate, d_up);
            });
            same("layer norm", &[3 * n], |isa, out| norm::layer_norm(isa, &x, &w, &b, 1e-5, &mut out[0]));
            same("layer norm backward", &[3 * n, n, n], |isa, out| {
                let [dx, dw, db] = out else { panic!("three outputs") };
                norm::layer_norm_backward(isa, &x, &w, 1e-5, &dy, dx, dw, db);
            });
            same("rms norm", &[3 * n], |isa, out| norm::rms_norm(isa, &x, &w, 1e-5, &mut out[0]));
            same("rms norm backward", &[3 * n, n], |isa, out| {
                let [dx, dw] = out else { panic!("two outputs") };
                norm::rms_norm_backward(isa, &x, &w, 1e-5, &dy, dx, dw);
            });
            same("add rows", &[n], |isa, out| norm::add_rows(isa, &x, &mut out[0]));
            same("max and sum", &[2], |isa, out| {
                let (largest, sum) = softmax::max_and_sum(isa, &x);
                out[0] = vec![largest, sum];
            });
            same("softmax", &[3 * n], |isa, out| softmax::scaled_softmax(isa, &mut out[0], 2.0, 5.0, 0.7));
            // Three rows of scores, the last of which ends at the last column. The last two do not see the first
            // column.
            let position = if n >= 3 { n - 3 } else { continue };
            let width = n + softmax::SPARE;
            // In the second case, the keys end before the queries, and the last two rows see none.
            for (end, firsts) in [(position + 3, [0, 1, 1]), (n - 2, [0, n - 2, n - 2])] {
                let tile = softmax::Tile { width, origin: 0, position, end, firsts: &firsts };
                same("causal exp", &[3 * width, 3, 3], |isa, out| {
                    let [scores, sums, log_sums] = out else { panic!("three outputs") };
                    softmax::causal_exp(isa, tile, scores, 0.3, sums, log_sums);
                });
                same("causal backward", &[3 * width, 3 * width], |isa, out| {
                    let [scores, d_probs] = out else { panic!("two outputs") };
                    softmax::causal_backward(isa, tile, scores, d_probs, 0.3, &w[..3], &b[..3]);
                });
            }
            same("normalize", &[3 * n], |isa, out| softmax::normalize(isa, &mut out[0], n, &[0.7, 0.0, 3.0]));
            same("random normal", &[3 * n], |isa, out| random::normal(isa, 7, [1, 2], [3, 4], 0.5, 2.0, &mut out[0]));
            same("random uniform", &[3 * n], |isa, out| random::uniform(isa, 7, [1, 2], [3, 4], 0.5, 2.0, &mut out[0]));
            same("dropped", &[3 * n], |isa, out| {
                random::dropped(isa, 7, [1, 2], [3, 4], 1 << 31, 1.5, &x, &mut out[0])
            });
            same("dot", &[1], |isa, out| out[0] = vec![softmax::dot(isa, &x, &dy)]);
            same("scores", &[decode::BLOCK], |isa, out| {
                let keys = normal("keys", n * decode::BLOCK);
                decode::scores(isa, &x[..n], &keys, &mut out[0]);
            });
            same("weighted sum", &[n], |isa, out| decode::weighted_sum(isa, &b[..3.min(n)], &x, &mut out[0]));
            same("rotary", &[2 * n], |isa, out| rotary::rotate(isa, 2 * n, &x[..2 * n], &w, &b, &mut out[0]));
            same("rotary back", &[2 * n], |isa, out| rotary::rotate_back(isa, 2 * n, &x[..2 * n], &w, &b, &mut out[0]));
        }
    }
}
