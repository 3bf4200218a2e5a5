//! Rotation of pairs (`x[i], x[i + half]`) by an angle.

use super::lanes::LANES;
use super::vectorised;

/// Computes each pair of `y` from the pair of `x` and the cosine and sine of its angle.
///
/// Processes sixteen pairs at a time: heads are short, and a loop over a whole half would spend most of its time before
/// and after its vectorized part.
#[inline(always)]
fn turn(
    size: usize,
    x: &[f32],
    cos: &[f32],
    sin: &[f32],
    y: &mut [f32],
    pair: impl Fn([f32; 2], f32, f32) -> [f32; 2],
) {
    let half = cos.len();
    let ((cos, cos_rest), (sin, sin_rest)) = (cos.as_chunks::<LANES>(), sin[..half].as_chunks::<LANES>());
    for (x, y) in x.chunks_exact(size).zip(y.chunks_exact_mut(size)) {
        let ((x, x_rest), (y, y_rest)) = (x.split_at(2 * half), y.split_at_mut(2 * half));
        y_rest.copy_from_slice(x_rest);
        let ((x1, x2), (y1, y2)) = (x.split_at(half), y.split_at_mut(half));
        let ((x1, x1_rest), (x2, x2_rest)) = (x1.as_chunks::<LANES>(), x2.as_chunks::<LANES>());
        let ((y1, y1_rest), (y2, y2_rest)) = (y1.as_chunks_mut::<LANES>(), y2.as_chunks_mut::<LANES>());
        for (((((y1, y2), x1), x2), cos), sin) in y1.iter_mut().zip(y2).zip(x1).zip(x2).zip(cos).zip(sin) {
            let [mut a, mut b] = [[0.0; LANES]; 2];
            for lane in 0..LANES {
                [a[lane], b[lane]] = pair([x1[lane], x2[lane]], cos[lane], sin[lane]);
            }
            (*y1, *y2) = (a, b);
        }
        for i in 0..cos_rest.len() {
            [y1_rest[i], y2_rest[i]] = pair([x1_rest[i], x2_rest[i]], cos_rest[i], sin_rest[i]);
        }
    }
}

vectorised! {
    /// Rotates the first elements of each row of `x` by the angles with the given cosines and sines, and copies the
    /// others. A row has `size` elements. The rotated ones are two halves, each as long as `cos`.
    fn rotate(size: usize, x: &[f32], cos: &[f32], sin: &[f32], y: &mut [f32]) {
        turn(size, x, cos, sin, y, |[x1, x2], cos, sin| [x1.mul_add(cos, -(x2 * sin)), x2.mul_add(cos, x1 * sin)]);
    }
}

vectorised! {
    /// Rotates by the negative angles: the backward of [`rotate`].
    fn rotate_back(size: usize, x: &[f32], cos: &[f32], sin: &[f32], y: &mut [f32]) {
        turn(size, x, cos, sin, y, |[x1, x2], cos, sin| [x1.mul_add(cos, x2 * sin), x2.mul_add(cos, -(x1 * sin))]);
    }
}
