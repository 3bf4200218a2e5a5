//! Compares cross-entropy with f64.

use zero_kernels::Dtype;
use zero_kernels::cross_entropy::{Counted, Logits, Upstream, backward, foreseen, forward, mean_loss, rescale};
use zero_kernels::indices::{Fault, NO_TARGET};

use crate::{Memory, assert_near, numbers, on_device, rounded};

#[test]
fn losses_and_in_place_gradients() {
    for ((rows, classes), z_loss) in [((1, 1), 0.0), ((7, 50), 0.0), ((7, 50), 3e-3), ((3, 3000), 1e-4)] {
        for dtype in Dtype::ALL {
            let count = (rows * classes) as usize;
            // The offset makes exponentials overflow unless the largest element is subtracted.
            let x: Vec<f32> = numbers(1, count).iter().map(|x| 8.0 * x + 200.0).collect();
            let x = rounded(dtype, &x);
            let targets: Vec<u32> = (0..rows).map(|row| (row * 37 + 5) % classes).collect();
            let factor = 0.5 / rows as f32;
            let Some(([loss, z], dx)) = on_device(|device| {
                let (mut logits, mut indices) = (Memory::floats(dtype, &x), Memory::integers(&targets));
                let (mut statistics, mut loss) = (Memory::unwritten(rows as usize * 12), Memory::unwritten(4));
                let mut z = Memory::floats(Dtype::F32, &[0.0]);
                let mut upstream = Memory::floats(Dtype::F32, &[0.5]);
                let (at, targets, stride) = (logits.address(), indices.address(), classes.into());
                let of = Logits { rows, classes, stride, dtype, logits: at, targets, z_loss };
                device.run(&forward(&of, statistics.address()));
                device.run(&mean_loss(
                    rows,
                    Counted::Known(rows),
                    statistics.address(),
                    z_loss,
                    [loss.address(), z.address()],
                ));
                let upstream = (Upstream::At(upstream.address()), Counted::Known(rows));
                device.run(&backward(&of, statistics.address(), upstream, (dtype, at)));
                ([loss, z].map(|x| f64::from(x.to_floats(Dtype::F32)[0])), logits.to_floats(dtype))
            }) else {
                return;
            };
            let z_loss = f64::from(z_loss);
            let (mut losses, mut z_losses, mut want) = (0.0, 0.0, vec![]);
            for (row, &target) in x.chunks(classes as usize).zip(&targets) {
                let largest = row.iter().fold(f64::MIN, |a, &x| a.max(f64::from(x)));
                let sum: f64 = row.iter().map(|&x| (f64::from(x) - largest).exp()).sum();
                let ln_z = sum.ln() + largest;
                z_losses += z_loss * ln_z * ln_z;
                losses += ln_z - f64::from(row[target as usize]);
                let slope = 1.0 + 2.0 * z_loss * ln_z;
                want.extend(row.iter().enumerate().map(|(i, &x)| {
                    let one = if i == target as usize { 1.0 } else { 0.0 };
                    f64::from(factor) * ((f64::from(x) - largest).exp() / sum * slope - one)
                }));
            }
            let [mean, mean_z] = [losses + z_losses, z_losses].map(|sum| sum / f64::from(rows));
            assert!((loss - mean).abs() <= 1e-5 * (1.0 + mean), "{loss} for {mean}");
            assert!((z - mean_z).abs() <= 1e-6 * mean_z, "{z} for {mean_z}");
            // With a z-loss, the gradient of a logit may be larger than the factor.
            assert_near("gradient", dtype, &dx, &want, 8.0, f64::from(factor) * (1.0 + 500.0 * z_loss));
        }
    }
}

/// Takes f32 logits in rows with gaps; computes their gradients as `dtype`, in place at the start of each row, and as
/// f32.
fn gradients(logits: &[Vec<f32>], stride: usize, targets: &[u32], dtype: Dtype) -> Option<(Vec<u32>, Vec<f32>, u32)> {
    let (rows, classes) = (logits.len(), logits[0].len());
    let mut spread = vec![-7.0; rows * stride];
    for (row, x) in logits.iter().enumerate() {
        spread[row * stride..][..classes].copy_from_slice(x);
    }
    on_device(|device| {
        let (mut x, mut indices) = (Memory::floats(Dtype::F32, &spread), Memory::integers(targets));
        let (mut statistics, mut loss) = (Memory::unwritten(rows * 12), Memory::unwritten(4));
        let (at, targets) = (x.address(), indices.address());
        let of = Logits {
            rows: rows as u32,
            classes: classes as u32,
            stride: stride as u64,
            dtype: Dtype::F32,
            logits: at,
            targets,
            z_loss: 0.0,
        };
        device.run(&forward(&of, statistics.address()));
        device.run(&mean_loss(of.rows, Counted::Known(of.rows), statistics.address(), 0.0, [loss.address(), 0]));
        // The mean is over 100 rows, of which this buffer has only some.
        let launch = backward(&of, statistics.address(), (Upstream::Known(2.0), Counted::Known(100)), (dtype, at));
        device.run(&launch);
        let narrow = x.to_floats(dtype);
        let stride = narrow.len() / rows;
        let gradients = narrow.chunks(stride).flat_map(|row| row[..classes].to_vec());
        let gaps: Vec<f32> = x.to_floats(Dtype::F32).chunks(stride).flat_map(|row| row[classes..].to_vec()).collect();
        let gaps = if dtype == Dtype::F32 { gaps } else { vec![] };
        (gradients.map(f32::to_bits).collect(), gaps, loss.to_floats(Dtype::F32)[0].to_bits())
    })
}

#[test]
fn gradients_of_strided_logits_are_narrowed_in_place() {
    // More classes than a block's threads process in one loop iteration, and not a multiple of that number.
    let (rows, classes, stride) = (3, 1300, 1304);
    let logits: Vec<Vec<f32>> = (0..rows).map(|row| numbers(row, classes).iter().map(|x| 3.0 * x).collect()).collect();
    let targets = [5, 1299, 0];
    let Some((wide, gaps, _)) = gradients(&logits, stride, &targets, Dtype::F32) else { return };
    assert!(gaps.iter().all(|&gap| gap == -7.0));
    let wide: Vec<f32> = wide.into_iter().map(f32::from_bits).collect();
    let target = f64::from(wide[5]);
    assert!(target < 0.0 && target > -0.02, "{target} for nearly −2/100");
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let Some((narrow, ..)) = gradients(&logits, stride, &targets, dtype) else { return };
        let want: Vec<u32> = rounded(dtype, &wide).into_iter().map(f32::to_bits).collect();
        assert!(narrow == want, "{dtype:?}");
    }
}

#[test]
fn a_target_out_of_range_makes_the_loss_and_its_row_nan() {
    let logits: Vec<Vec<f32>> = (0..3).map(|row| numbers(row, 9)).collect();
    for dtype in Dtype::ALL {
        let Some((good, _, loss)) = gradients(&logits, 9, &[1, 8, 3], dtype) else { return };
        assert!(f32::from_bits(loss).is_finite() && good.iter().all(|&x| f32::from_bits(x).is_finite()));
        let Some((bad, _, loss)) = gradients(&logits, 9, &[1, u32::MAX, 3], dtype) else { return };
        assert!(f32::from_bits(loss).is_nan());
        assert!(bad[9..18].iter().all(|&x| f32::from_bits(x).is_nan()));
        assert_eq!([&bad[..9], &bad[18..]], [&good[..9], &good[18..]]);
    }
}

/// Rows without a target have loss 0 and gradient 0, whatever their logits are. The mean is over the other rows.
#[test]
fn ignored_rows_do_not_contribute() {
    let (rows, classes) = (5u32, 1300usize);
    for dtype in Dtype::ALL {
        let mut logits = rounded(dtype, &numbers(3, rows as usize * classes));
        logits[classes] = f32::NAN;
        let masks = [vec![5, NO_TARGET, 1299, NO_TARGET, 0], vec![NO_TARGET; 5]];
        for targets in masks {
            let counted = targets.iter().filter(|&&target| target != NO_TARGET).count();
            let Some((loss, dx, others)) = on_device(|device| {
                let z_loss = 1e-2;
                let run = |targets: &[u32], x: &[f32], counted: u32| {
                    let (mut x, mut indices) = (Memory::floats(dtype, x), Memory::integers(targets));
                    let (rows, mut number) = (targets.len() as u32, Memory::integers(&[counted]));
                    let (mut statistics, mut loss) = (Memory::unwritten(12 * targets.len()), Memory::unwritten(4));
                    let (logits, targets, counted) = (x.address(), indices.address(), Counted::At(number.address()));
                    let (classes, stride) = (classes as u32, classes as u64);
                    let of = Logits { rows, classes, stride, dtype, logits, targets, z_loss };
                    device.run(&forward(&of, statistics.address()));
                    device.run(&mean_loss(rows, counted, statistics.address(), z_loss, [loss.address(), 0]));
                    device.run(&backward(&of, statistics.address(), (Upstream::Known(2.0), counted), (dtype, logits)));
                    (loss.to_floats(Dtype::F32)[0], x.to_floats(dtype))
                };
                let (loss, dx) = run(&targets, &logits, counted as u32);
                // Collects the rows with a target, to run them alone.
                let (mut some, mut x) = (vec![], vec![]);
                for (row, &target) in targets.iter().enumerate().filter(|(_, target)| **target != NO_TARGET) {
                    some.push(target);
                    x.extend_from_slice(&logits[row * classes..(row + 1) * classes]);
                }
                (loss, dx, (!some.is_empty()).then(|| run(&some, &x, counted as u32)))
            }) else {
                return;
            };
            let (want_loss, want_dx) = others.unwrap_or_default();
            assert!((loss - want_loss).abs() <= 1e-6 * want_loss, "{loss} for {want_loss}");
            assert_eq!(loss == 0.0, counted == 0);
            let mut want = want_dx.chunks(classes);
            for (row, target) in dx.chunks(classes).zip(&targets) {
                match *target {
                    NO_TARGET => assert!(row.iter().all(|x| x.to_bits() == 0), "{dtype:?}"),
                    _ => assert!(Some(row) == want.next(), "{dtype:?}"),
                }
            }
        }
    }
}

#[test]
fn gradients_are_rescaled_by_the_upstream_gradient() {
    for dtype in Dtype::ALL {
        let (x, before) = (rounded(dtype, &numbers(1, 300)), rounded(dtype, &numbers(2, 300)));
        for (upstream, add) in [(0.25f32, false), (0.25, true), (0.75, false), (0.75, true)] {
            let Some((y, fault)) = on_device(|device| {
                let (mut from, mut to) = (Memory::floats(dtype, &x), Memory::floats(dtype, &before));
                let (mut scalar, mut fault) = (Memory::floats(Dtype::F32, &[upstream]), Memory::integers(&[0; 8]));
                let at = [from.address(), to.address()];
                device.run(&rescale(dtype, 300, at, (0.25, scalar.address()), add).unwrap());
                device.run(&foreseen((0.25, scalar.address()), fault.address(), 9));
                (to.to_floats(dtype), fault.to_fault())
            }) else {
                return;
            };
            let scale = upstream / 0.25;
            let want = x.iter().zip(&before).map(|(x, before)| x * scale + if add { *before } else { 0.0 });
            assert_eq!(y, rounded(dtype, &want.collect::<Vec<_>>()), "{dtype:?}");
            let details = [upstream.to_bits().into(), 0.25f32.to_bits().into(), 0];
            let want = if scale == 1.0 { Fault::default() } else { Fault { what: 9, details } };
            assert_eq!(fault, want);
        }
    }
}
