//! The gradient norm and its verdict are bit-identical to `zero_optim`.

use zero_kernels::Dtype;
use zero_kernels::gradient_norm::{SQUARES, Squared, Verdict, limbs, partials, square_sums, verdict};
use zero_optim::ExactSum;
use zero_optim::exact_sum::LIMBS;
use zero_optim::norm::{Limits, block_square_sums};

use crate::{Device, Memory, numbers, on_device, rounded};

#[test]
fn sums_of_squares_are_bit_identical_to_the_cpus() {
    let counts = [1, 15, 1024, 1025, 0, 70 * 1024 + 77, 3];
    // Three of the ranges are not aligned; one of them is empty.
    let starts: Vec<usize> =
        counts.iter().scan(0, |end, &count| Some(std::mem::replace(end, *end + count + 3))).collect();
    let all = numbers(7, starts.last().unwrap() + 3);
    assert_eq!(starts.iter().filter(|&start| start % 4 != 0).count(), 3);
    for dtype in Dtype::ALL {
        let want: Vec<u64> = starts
            .iter()
            .zip(counts)
            .flat_map(|(&start, count)| {
                block_square_sums(&rounded(dtype, &all[start..start + count])).map(f64::to_bits).collect::<Vec<_>>()
            })
            .collect();
        let Some(sums) = on_device(|device| {
            let (mut from, mut sums) = (Memory::floats(Dtype::F32, &all), Memory::unwritten(8 * want.len()));
            let squared: Vec<Squared> = starts
                .iter()
                .zip(counts)
                .map(|(&start, count)| Squared {
                    grads: from.address() + 4 * start as u64,
                    count: count as u64,
                    communicated: dtype,
                })
                .collect();
            device.run(&square_sums(&squared, sums.address()).unwrap());
            sums.to_integers()
        }) else {
            return;
        };
        assert_eq!(sums, want, "{dtype:?}");
    }
    assert_eq!(SQUARES, zero_optim::norm::BLOCK as u64);
}

/// Adds up the sums on the device. Returns the limbs of the total, and the verdict.
fn judged(device: &Device, sums: &[f64], limits: &Limits) -> (Vec<i64>, Verdict) {
    let words: Vec<u32> = sums.iter().flat_map(|x| [x.to_bits() as u32, (x.to_bits() >> 32) as u32]).collect();
    let (count, mut from) = (sums.len() as u64, Memory::integers(&words));
    let mut parts = Memory::unwritten(8 * partials(count));
    let [mut total, mut on_device, mut host] =
        [8 * LIMBS, size_of::<Verdict>(), size_of::<Verdict>()].map(Memory::unwritten);
    if let Some(launch) = limbs(count, from.address(), parts.address()) {
        device.run(&launch);
    }
    device.run(&verdict(count, parts.address(), limits, total.address(), [on_device.address(), host.address()]));
    assert_eq!(on_device.bytes(), host.bytes());
    let [norm, clip, last] = host.to_integers()[..] else { panic!("three words") };
    let (scale, admitted) = (f32::from_bits(last as u32), (last >> 32) as u32);
    let made = Verdict { norm: f64::from_bits(norm), clip: f64::from_bits(clip), scale, admitted };
    (total.to_integers().into_iter().map(|limb| limb as i64).collect(), made)
}

#[test]
fn a_norm_and_its_clip_are_bit_identical_to_the_hosts() {
    let plain = Limits { loss_scale: 1.0, max_norm: 1.0, max_value: 0.0, limit: f64::INFINITY, skips_overflow: false };
    let fp16 = Limits { loss_scale: 1536.0, max_norm: 0.0, max_value: 0.0, limit: 1e3, skips_overflow: true };
    let many: Vec<f64> = (0..70_000u64).map(|i| f64::from_bits(i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 2)).collect();
    let (tiny, half_ulp) = (f64::from_bits(1), f64::EPSILON / 2.0);
    let cases: Vec<Vec<f64>> = vec![
        vec![],
        vec![0.0, 0.0],
        vec![tiny],
        vec![f64::MIN_POSITIVE, tiny, 1e-310],
        vec![0.3],
        // Ties, which round to even, and values just above a tie.
        vec![1.0, half_ulp],
        vec![1.0, half_ulp, tiny],
        vec![1.0 + f64::EPSILON, half_ulp],
        // A carry through the whole significand, and sums around the largest f64.
        vec![2.0 - f64::EPSILON, half_ulp],
        vec![f64::MAX, 2f64.powi(970)],
        vec![f64::MAX, 2f64.powi(969)],
        vec![f64::MAX; 3000],
        vec![1.0, f64::INFINITY],
        vec![f64::NAN, f64::INFINITY],
        vec![1.0 / 3.0; 1000],
        many.iter().map(|x| x % 1e9).collect(),
        many.into_iter().filter(|x| x.is_finite()).collect(),
    ];
    for (case, sums) in cases.iter().enumerate() {
        for limits in [plain, fp16] {
            let Some((limbs, got)) = on_device(|device| {
                let (limbs, made) = judged(device, sums, &limits);
                // Compared by bits, because NaN is not equal to itself.
                (limbs, (made.norm.to_bits(), made.clip.to_bits(), made.scale.to_bits(), made.admitted))
            }) else {
                return;
            };
            let mut sum = ExactSum::new();
            sums.iter().for_each(|&x| sum.add(x));
            let want = limits.judge(&sum);
            let admitted = u32::from(want.is_admitted);
            assert_eq!(got, (want.norm.to_bits(), want.clip.to_bits(), want.scale.to_bits(), admitted), "{case}");
            let total = ExactSum::from_limbs(&limbs).unwrap().to_f64();
            assert_eq!(total.to_bits(), sum.to_f64().to_bits(), "{case}");
        }
    }
}
