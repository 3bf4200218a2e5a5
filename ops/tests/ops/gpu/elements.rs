//! Dropout is bit-identical to the CPU.

use super::{FLOATS, Into, both, gpu};
use crate::check::{normal, same_bits};
use zero_ops as ops;
use zero_ops::Pass;

#[test]
fn dropout_masks_are_identical_to_the_cpus() {
    let Some(gpu) = gpu() else { return };
    // The sample's index, which is a part of the generator's counter, exceeds 32 bits. Some samples do not consist of
    // whole blocks of 4 random numbers.
    let pass = Pass { training: true, seed: 7, step: 1, sample: (1 << 33) + 5, layer: 3 };
    for dtype in FLOATS {
        for dims in [&[3usize, 5, 7][..], &[1100], &[1, 64]] {
            let x = [normal("x", dims).to_dtype(dtype).unwrap()];
            let [got, want] = both(&gpu, &x, Into::Store, |x| ops::dropout(&x[0], 0.3, "here", &pass));
            same_bits("y", &got.0, &want.0);
            same_bits("dx", &got.1[0], &want.1[0]);
        }
        let x = [normal("x", &[6, 9]).to_dtype(dtype).unwrap()];
        let [got, want] = both(&gpu, &x, Into::Store, |x| ops::dropout(&x[0].t()?, 0.5, "there", &pass));
        same_bits("y of a view", &got.0, &want.0);
        same_bits("dx of a view", &got.1[0], &want.1[0]);
    }
}
