//! The rows of `zero-train bench optimizers` for the codes that collectives send with qwZ and qgZ.

use zero_optim::BlockCodes;

use super::arrays::grads;
use super::figures::{Comparison, spread, summary, timed};

/// Times writing codes and adding them to a sum, on one thread. Each alternates with its floor: a copy that reads and
/// writes the same number of bytes in total.
pub(super) fn codes(elements: usize, repeats: usize) {
    let values: Vec<f32> = grads(elements).collect();
    let mut sum = values.clone();
    for codes in BlockCodes::ALL {
        let mut bytes = vec![1; codes.bytes(elements)];
        let (written, added) = (4 * elements + bytes.len(), 8 * elements + bytes.len());
        let name = |what| format!("{codes:?}: {what}");
        show(&name("write codes"), elements, written, repeats, || {
            codes.quantize(&values, &mut bytes).expect("the lengths match");
        });
        show(&name("add to a sum"), elements, added, repeats, || {
            codes.add(&bytes, &mut sum).expect("the lengths match");
        });
    }
}

/// Prints one row. `work` moves `bytes` bytes.
fn show(name: &str, elements: usize, bytes: usize, repeats: usize, mut work: impl FnMut()) {
    let (from, mut to) = (vec![1u8; bytes / 2], vec![2u8; bytes / 2]);
    let mut run = || (timed(&mut work), timed(|| to.copy_from_slice(std::hint::black_box(&from))));
    run();
    let times: Comparison = (0..repeats).map(|_| run()).collect();
    let each = times.subject.iter().map(|time| time.as_secs_f64() * 1e9 / elements as f64).collect();
    println!(
        "  {name:<24} {}  {}  {}",
        spread(each, 3, "ns per element"),
        summary(&times.subject),
        spread(times.shares(1.0), 1, "%")
    );
}
