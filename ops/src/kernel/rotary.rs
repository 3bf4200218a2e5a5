//! Rotation of pairs (`x[i], x[i + half]`) by an angle.

use super::vectorised;

vectorised! {
    /// Rotates each row of `x` (two halves, each as long as `cos`) by the angles whose cosine and sine are given.
    fn rotate(x: &[f32], cos: &[f32], sin: &[f32], y: &mut [f32]) {
        let half = cos.len();
        for (x, y) in x.chunks_exact(2 * half).zip(y.chunks_exact_mut(2 * half)) {
            let (x1, x2) = x.split_at(half);
            let (y1, y2) = y.split_at_mut(half);
            for i in 0..half {
                y1[i] = x1[i].mul_add(cos[i], -(x2[i] * sin[i]));
                y2[i] = x2[i].mul_add(cos[i], x1[i] * sin[i]);
            }
        }
    }
}

vectorised! {
    /// Rotates back, by the same angles with the other sign: the backward of [`rotate`].
    fn rotate_back(x: &[f32], cos: &[f32], sin: &[f32], y: &mut [f32]) {
        let half = cos.len();
        for (x, y) in x.chunks_exact(2 * half).zip(y.chunks_exact_mut(2 * half)) {
            let (x1, x2) = x.split_at(half);
            let (y1, y2) = y.split_at_mut(half);
            for i in 0..half {
                y1[i] = x1[i].mul_add(cos[i], x2[i] * sin[i]);
                y2[i] = x2[i].mul_add(cos[i], -(x1[i] * sin[i]));
            }
        }
    }
}
