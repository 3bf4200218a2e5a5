//! Cross-entropy against f64.

use zero_kernels::Dtype;
use zero_kernels::cross_entropy::{Logits, backward, forward, loss_sum};
use zero_kernels::emulated::Memory;

use crate::{assert_near, numbers, on_device, rounded};

#[test]
fn losses_and_the_gradient_in_place() {
    for (rows, classes) in [(1, 1), (7, 50), (3, 3000)] {
        for dtype in Dtype::ALL {
            let count = (rows * classes) as usize;
            // A shift that only a largest element taken off can bear.
            let x: Vec<f32> = numbers(1, count).iter().map(|x| 8.0 * x + 200.0).collect();
            let x = rounded(dtype, &x);
            let targets: Vec<u32> = (0..rows).map(|row| (row * 37 + 5) % classes).collect();
            let factor = 1.0 / rows as f32;
            let Some((sum, dx)) = on_device(|device| {
                let (mut logits, mut indices) = (Memory::floats(dtype, &x), Memory::integers(&targets));
                let (mut statistics, mut sum) = (Memory::unwritten(rows as usize * 12), Memory::unwritten(8));
                let of = Logits { rows, classes, dtype, logits: logits.address(), targets: indices.address() };
                device.run(&forward(&of, statistics.address()));
                device.run(&loss_sum(rows, statistics.address(), sum.address(), false));
                device.run(&loss_sum(rows, statistics.address(), sum.address(), true));
                device.run(&backward(&of, statistics.address(), factor, of.logits));
                (sum.to_doubles()[0], logits.to_floats(dtype))
            }) else {
                return;
            };
            let (mut losses, mut want) = (0.0, vec![]);
            for (row, &target) in x.chunks(classes as usize).zip(&targets) {
                let largest = row.iter().fold(f64::MIN, |a, &x| a.max(f64::from(x)));
                let sum: f64 = row.iter().map(|&x| (f64::from(x) - largest).exp()).sum();
                losses += sum.ln() + largest - f64::from(row[target as usize]);
                want.extend(row.iter().enumerate().map(|(i, &x)| {
                    let one = if i == target as usize { 1.0 } else { 0.0 };
                    f64::from(factor) * ((f64::from(x) - largest).exp() / sum - one)
                }));
            }
            assert!((sum - 2.0 * losses).abs() <= 1e-5 * (1.0 + losses), "{sum} for twice {losses}");
            assert_near("gradient", dtype, &dx, &want, 8.0, f64::from(factor));
        }
    }
}
