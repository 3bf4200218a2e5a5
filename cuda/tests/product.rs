//! Compares products with an epilogue with f64, and checks that unsupported products are rejected and that a shape
//! gives the same bits each time. Runs on the mock of cuBLASLt, or with `ZERO_TRAIN_CUDA_TESTS=1` on a GPU.
#![allow(unsafe_code)]

#[path = "../emulator/mock/mod.rs"]
mod mock;

use std::sync::Arc;

use zero_cuda::product::{CublasLt, Element, Epilogue, Factor, Product};
use zero_cuda::{Allocation, Device, Pinned, Stream};

/// Values around 0 that bf16 represents exactly; each seed gives another sequence.
fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_769).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 25) as f32 - 64.0) / 64.0
    };
    (0..count).map(|_| next()).collect()
}

fn bytes_of(element: Element, values: &[f32]) -> Vec<u8> {
    match element {
        Element::F32 => values.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect(),
        // Exact, since all values fit bf16.
        _ => values.iter().flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect(),
    }
}

fn values_of(element: Element, bytes: &[u8]) -> Vec<f64> {
    let of_bits = |bits: u32| f64::from(f32::from_bits(bits));
    match element {
        Element::F32 => bytes.chunks(4).map(|b| of_bits(u32::from_le_bytes(b.try_into().unwrap()))).collect(),
        _ => bytes.chunks(2).map(|b| of_bits(u32::from(u16::from_le_bytes(b.try_into().unwrap())) << 16)).collect(),
    }
}

struct Here {
    device: Arc<Device>,
    stream: Stream,
    blas: CublasLt,
}

impl Here {
    fn new() -> Option<Self> {
        if !mock::ready() {
            return None;
        }
        let device = Device::open(0).unwrap();
        let (stream, blas) = (Stream::new(&device).unwrap(), CublasLt::new(&device).unwrap());
        Some(Self { device, stream, blas })
    }

    fn upload(&self, bytes: &[u8]) -> Allocation {
        let mut pinned = Pinned::new(&self.device, bytes.len()).unwrap();
        pinned.copy_from_slice(bytes);
        let mut memory = Allocation::new(&self.device, bytes.len()).unwrap();
        // SAFETY: both buffers live until the stream is synchronized below.
        unsafe { memory.fill_from(&pinned, &self.stream) }.unwrap();
        self.stream.synchronize().unwrap();
        memory
    }

    fn multiply(&self, product: &Product) -> bool {
        // SAFETY: the tests below allocate all matrices with the product's sizes.
        unsafe { self.blas.multiply(product, &self.stream) }.unwrap()
    }

    fn download(&self, memory: &Allocation) -> Vec<u8> {
        let mut bytes = vec![0; memory.len()];
        memory.copy_to(&mut bytes, &self.stream).unwrap();
        bytes
    }
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x)).tanh())
}

fn slope_of_gelu(x: f64) -> f64 {
    (gelu(x + 1e-6) - gelu(x - 1e-6)) / 2e-6
}

/// The largest difference, relative to the expected value where that exceeds 1 in magnitude.
fn apart(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    got.iter()
        .zip(want)
        .map(|(a, b)| if a.is_nan() { f64::NAN } else { (a - b).abs() / b.abs().max(1.0) })
        .fold(0.0, |most, x| if x > most || x.is_nan() { x } else { most })
}

#[test]
fn products_with_epilogues_match_f64() {
    let Some(here) = Here::new() else { return };
    for element in [Element::F32, Element::Bf16] {
        for [rows, columns, inner] in [[16, 8, 8], [40, 24, 72], [1, 16, 200], [130, 136, 64]] {
            for turned in [[false, false], [false, true], [true, false], [true, true]] {
                let [x, w, bias, at] = [(1, rows * inner), (2, inner * columns), (3, columns), (4, rows * columns)]
                    .map(|(s, n)| numbers(s, n));
                let left = |i: usize, p: usize| f64::from(if turned[0] { x[p * rows + i] } else { x[i * inner + p] });
                let right =
                    |p: usize, j: usize| f64::from(if turned[1] { w[j * inner + p] } else { w[p * columns + j] });
                let sums: Vec<f64> = (0..rows * columns)
                    .map(|at| (0..inner).map(|p| left(at / columns, p) * right(p, at % columns)).sum())
                    .collect();
                let with_bias: Vec<f64> =
                    sums.iter().enumerate().map(|(at, sum)| sum + f64::from(bias[at % columns])).collect();

                let [x, w, bias, slope_at] = [&x, &w, &bias, &at].map(|v| here.upload(&bytes_of(element, v)));
                let [y, sum] = [0; 2].map(|_| here.upload(&bytes_of(element, &vec![f32::NAN; rows * columns])));
                let factor = |of: &Allocation, is_turned, untouched, turned| Factor {
                    address: of.address(),
                    stride: if is_turned { turned } else { untouched },
                    is_turned,
                };
                let product = |epilogue| Product {
                    element,
                    rows,
                    columns,
                    inner,
                    left: factor(&x, turned[0], inner, rows),
                    right: factor(&w, turned[1], columns, inner),
                    to: y.address(),
                    epilogue,
                };
                // A transposed left factor is stored in rows of `rows` elements. It is rejected unless these rows are
                // multiples of 16 bytes.
                let fits = !turned[0] || (rows * if element == Element::F32 { 4 } else { 2 }) % 16 == 0;
                let near = |what: &str, from: &Allocation, want: &[f64]| {
                    let most = if element == Element::F32 { 2e-5 } else { 2f64.powi(-8) };
                    let apart = apart(&values_of(element, &here.download(from)), want);
                    assert!(apart <= most, "{what} of {element:?} {rows}x{columns}x{inner} {turned:?}: {apart}");
                };
                let (bias, at_sum) = (bias.address(), sum.address());
                let done = here.multiply(&product(Epilogue::Bias { bias }));
                assert_eq!(done, fits);
                if !done {
                    continue;
                }
                near("a bias", &y, &with_bias);
                let first = here.download(&y);
                assert!(here.multiply(&product(Epilogue::BiasGelu { bias, sum: at_sum })));
                near("GELU's operand", &sum, &with_bias);
                near("GELU", &y, &with_bias.iter().map(|&x| gelu(x)).collect::<Vec<_>>());
                assert!(here.multiply(&product(Epilogue::GeluSlope { sum: slope_at.address() })));
                let slopes = sums.iter().zip(&at).map(|(sum, &at)| sum * slope_of_gelu(f64::from(at)));
                near("GELU's slope", &y, &slopes.collect::<Vec<_>>());
                // The bits are the same each time.
                assert!(here.multiply(&product(Epilogue::Bias { bias })));
                assert!(here.download(&y) == first);
            }
        }
    }
}

#[test]
fn unaligned_products_are_rejected() {
    let Some(here) = Here::new() else { return };
    let memory = here.upload(&vec![0; 1 << 16]);
    let factor = |offset: u64, stride| Factor { address: memory.address() + offset, stride, is_turned: false };
    let bias = memory.address() + (1 << 14);
    let sum = memory.address() + (1 << 15);
    let good = Product {
        element: Element::Bf16,
        rows: 3,
        columns: 16,
        inner: 24,
        left: factor(0, 24),
        right: factor(1 << 12, 16),
        to: memory.address() + (1 << 13),
        epilogue: Epilogue::Bias { bias },
    };
    assert!(here.multiply(&good));
    for (what, product) in [
        ("the left factor", Product { left: factor(2, 24), ..good }),
        ("the right factor", Product { right: factor(8 + (1 << 12), 16), ..good }),
        ("the result", Product { to: good.to + 4, ..good }),
        ("a bias", Product { epilogue: Epilogue::Bias { bias: bias + 8 }, ..good }),
        ("a sum", Product { epilogue: Epilogue::BiasGelu { bias, sum: sum + 2 }, ..good }),
        ("rows of the left factor", Product { inner: 20, left: factor(0, 20), ..good }),
        ("rows that lie in each other", Product { left: factor(0, 16), ..good }),
        ("rows of the result", Product { columns: 12, right: factor(1 << 12, 16), ..good }),
        // Rows of 48 bytes, a multiple of 16, but of only 12 elements.
        (
            "rows of a sum",
            Product {
                element: Element::F32,
                columns: 12,
                right: factor(1 << 12, 12),
                epilogue: Epilogue::GeluSlope { sum },
                ..good
            },
        ),
    ] {
        assert!(!here.multiply(&product), "{what}");
    }
    here.stream.synchronize().unwrap();
}
