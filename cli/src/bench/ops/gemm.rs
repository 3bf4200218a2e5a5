//! The product of the `gemm` crate, which candle's matmul calls. `zero-train bench ops` shows its speed next to the
//! speed of `zero-ops`'s product.
#![allow(unsafe_code)]

use gemm::Parallelism;
use zero_isa::Isa;
#[cfg(target_arch = "x86_64")]
use zero_isa::Vectors;

/// One f32 product by the `gemm` crate: its operands, and an output that every call overwrites.
#[derive(Debug)]
pub(super) struct Gemm {
    transposed: [bool; 2],
    shape: [usize; 3],
    left: Vec<f32>,
    right: Vec<f32>,
    out: Vec<f32>,
}

impl Gemm {
    /// Creates a product of `shape` (rows, columns and inner dimension). `transposed` says which of its operands are
    /// stored transposed; each stored matrix is row-major.
    ///
    /// # Panics
    /// Panics if an operand's number of elements differs from the shape.
    #[must_use]
    pub(super) fn new(transposed: [bool; 2], shape: [usize; 3], left: Vec<f32>, right: Vec<f32>) -> Self {
        let [m, n, k] = shape;
        assert_eq!((left.len(), right.len()), (m * k, k * n), "operands of a {m}x{n}x{k} product");
        Self { transposed, shape, left, right, out: vec![0.0; m * n] }
    }

    /// Computes the product with the arguments that candle passes.
    ///
    /// The crate always selects the widest instruction set that it knows. For a narrower set, this method calls the
    /// crate's loops with the kernels for that set.
    pub(super) fn run(&mut self, isa: Isa, threads: usize) {
        #[cfg(not(target_arch = "x86_64"))]
        let _ = isa;
        let [m, n, k] = self.shape;
        // Row and column strides.
        let strides = |transposed, rows, columns| if transposed { (1, rows as isize) } else { (columns as isize, 1) };
        let (left_rows, left_columns) = strides(self.transposed[0], m, k);
        let (right_rows, right_columns) = strides(self.transposed[1], k, n);
        let parallelism = if threads > 1 { Parallelism::Rayon(threads) } else { Parallelism::None };
        let (left, right, out) = (self.left.as_ptr(), self.right.as_ptr(), self.out.as_mut_ptr());
        // Calls the crate's loops with the kernels and registers of one instruction set. As the crate's entry point
        // does for contiguous output rows, computes the transpose of the product from the transposed operands.
        #[cfg(target_arch = "x86_64")]
        macro_rules! on {
            ($set:ident, $registers:ident, $lanes:literal) => {{
                use gemm_common::simd::{MixedSimd, $registers};
                use gemm_f32::microkernel::$set::f32 as kernels;
                if let Some(registers) = <$registers as MixedSimd<f32, f32, f32, f32>>::try_new() {
                    const ROWS: usize = kernels::MR_DIV_N * $lanes;
                    const HEIGHT: usize = kernels::MR_DIV_N;
                    // SAFETY: `new` checked that the operands have all the elements of their shapes and allocated an
                    // output of that size.
                    unsafe {
                        gemm_common::gemm::gemm_basic_generic::<
                            _,
                            f32,
                            $lanes,
                            ROWS,
                            { kernels::NR },
                            HEIGHT,
                            { kernels::H_M },
                            { kernels::H_N },
                        >(
                            registers,
                            n,
                            m,
                            k,
                            out,
                            n as isize,
                            1,
                            false,
                            right,
                            right_rows,
                            right_columns,
                            left,
                            left_rows,
                            left_columns,
                            0.0,
                            1.0,
                            false,
                            false,
                            false,
                            |a, b, c| a * b + c,
                            &kernels::UKR,
                            &kernels::H_UKR,
                            false,
                            parallelism,
                        );
                    }
                    return;
                }
            }};
        }
        #[cfg(target_arch = "x86_64")]
        match isa.vectors() {
            Vectors::Baseline => on!(scalar, Scalar, 1),
            Vectors::Avx2 => on!(fma, V3, 8),
            Vectors::Avx512 => {}
        }
        // SAFETY: as above.
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                out,
                1,
                n as isize,
                false,
                left,
                left_columns,
                left_rows,
                right,
                right_columns,
                right_rows,
                0.0,
                1.0,
                false,
                false,
                false,
                parallelism,
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operand_layout_gives_the_product() {
        for (shape, transposed) in
            [([5, 7, 3], [false, false]), ([33, 50, 17], [false, true]), ([48, 96, 64], [true, false])]
        {
            let [m, n, k] = shape;
            let filled = |len: usize, step: usize| (0..len).map(|i| ((i * step) % 11) as f32 - 5.0).collect::<Vec<_>>();
            let (left, right) = (filled(m * k, 7), filled(k * n, 5));
            let at = |i: usize, j: usize, rows: usize, columns: usize, t: bool| {
                if t { j * rows + i } else { i * columns + j }
            };
            let expected: Vec<f32> = (0..m * n)
                .map(|at_out| {
                    let (i, j) = (at_out / n, at_out % n);
                    let term = |p| left[at(i, p, m, k, transposed[0])] * right[at(p, j, k, n, transposed[1])];
                    (0..k).map(term).sum()
                })
                .collect();
            let mut product = Gemm::new(transposed, shape, left, right);
            for (isa, threads) in Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 2)]) {
                product.out.fill(f32::NAN);
                product.run(isa, threads);
                // Small integers, so that the order of the sums does not matter.
                assert_eq!(product.out, expected, "{shape:?}, {transposed:?}, {isa}, {threads} threads");
            }
        }
    }
}
