//! A counter-based random number generator, whose numbers do not depend on the layout of the run.
//!
//! Every number is a pure function of (seed, purpose, stream, index), so initialization, dropout and shuffling give
//! the same values on one rank or a hundred, whichever shard a rank holds. The generator is Philox4x32-10;
//! `kernel/random.rs` implements it.

use crate::kernel::Isa;
use crate::kernel::random::{dropped, dropped_in_place, halves, limit, normal, philox, uniform, unit};
use crate::parallel::{Output, split};

/// A sequence of random numbers with random access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    key: [u32; 2],
    /// Upper half of the 128-bit counter. The lower half is the index of a block of four words.
    high: u64,
}

impl Stream {
    /// Returns the stream of `seed` for `purpose` (for example `"init"`, `"dropout"`) and one tensor or sample.
    #[must_use]
    pub fn new(seed: u64, purpose: &str, tensor_or_sample: u64) -> Self {
        let key = mix(seed ^ hash(purpose));
        Self { key: split_words(key), high: tensor_or_sample }
    }

    /// Returns the stream of another tensor or sample for the same purpose.
    pub(crate) fn of(self, tensor_or_sample: u64) -> Self {
        Self { high: tensor_or_sample, ..self }
    }

    /// Returns the generator's key. The key and `tensor_or_sample` determine all numbers, so kernels can generate the
    /// same numbers.
    #[must_use]
    pub fn key(&self) -> [u32; 2] {
        self.key
    }

    /// Returns four random words for a block of four consecutive indices.
    #[must_use]
    pub fn words(&self, block: u64) -> [u32; 4] {
        let [h0, h1] = split_words(self.high);
        let [l0, l1] = split_words(block);
        philox([l0, l1, h0, h1], self.key)
    }

    /// Returns a uniform number in [0, 1): the upper 24 bits of word `index`.
    #[must_use]
    pub fn f32_at(&self, index: u64) -> f32 {
        unit(self.words(index / 4)[(index % 4) as usize])
    }

    /// Fills `out` with the standard normal numbers at the indices `start..`, by Box–Muller on pairs of words.
    pub fn fill_normal(&self, start: u64, out: &mut [f32]) {
        self.fill_scaled_normal(start, 0.0, 1.0, out);
    }

    /// Fills `out` with the uniform numbers in [0, 1) at the indices `start..`.
    pub fn fill_uniform(&self, start: u64, out: &mut [f32]) {
        self.fill_scaled_uniform(start, 0.0, 1.0, out);
    }

    /// Fills `out` with 16 random bits of each of the indices `start..`. Two neighbouring indices share the halves of
    /// one word. Runs on the calling thread.
    pub fn fill_bits(&self, start: u64, out: &mut [u16]) {
        let head = (start.next_multiple_of(8) - start).min(out.len() as u64) as usize;
        let (first, rest) = out.split_at_mut(head);
        let words = self.words(start / 8).into_iter().flat_map(|word| [word as u16, (word >> 16) as u16]);
        first.iter_mut().zip(words.skip((start % 8) as usize)).for_each(|(half, bits)| *half = bits);
        halves(Isa::current(), start.div_ceil(8), split_words(self.high), self.key, rest);
    }

    /// Computes y = `scale`·x, or 0 where the uniform number of [`Stream::fill_uniform`] is below `probability`. The
    /// numbers are those of indices `start..`. Runs on the calling thread.
    pub(crate) fn drop_out(&self, start: u64, probability: f32, scale: f32, x: &[f32], y: &mut [f32]) {
        let (high, isa, limit) = (split_words(self.high), Isa::current(), limit(probability));
        let head = (start.next_multiple_of(4) - start).min(x.len() as u64) as usize;
        let ((x_head, x), (y_head, y)) = (x.split_at(head), y.split_at_mut(head));
        for (index, (y, x)) in (start..).zip(y_head.iter_mut().zip(x_head)) {
            *y = if self.f32_at(index) < probability { 0.0 } else { x * scale };
        }
        dropped(isa, start.div_ceil(4), high, self.key, limit, scale, x, y);
    }

    /// Does the same as [`Stream::drop_out`] in place. `start` is a multiple of four.
    pub(crate) fn drop_out_in_place(&self, start: u64, probability: f32, scale: f32, x: &mut [f32]) {
        assert!(start.is_multiple_of(4));
        dropped_in_place(Isa::current(), start / 4, split_words(self.high), self.key, limit(probability), scale, x);
    }

    /// Fills `out` with `stdev`·x + `mean` for the numbers x of [`Stream::fill_normal`], in the same pass over
    /// memory.
    pub(crate) fn fill_scaled_normal(&self, start: u64, mean: f32, stdev: f32, out: &mut [f32]) {
        let (high, isa) = (split_words(self.high), Isa::current());
        fill(start, out, |block, out| normal(isa, block, high, self.key, mean, stdev, out));
    }

    /// Fills `out` with `width`·x + `low` for the numbers x of [`Stream::fill_uniform`].
    pub(crate) fn fill_scaled_uniform(&self, start: u64, low: f32, width: f32, out: &mut [f32]) {
        let (high, isa) = (split_words(self.high), Isa::current());
        fill(start, out, |block, out| uniform(isa, block, high, self.key, low, width, out));
    }
}

/// Fills `out` starting at index `start`, split over the threads. `make` receives the index of a block of four numbers
/// and the part of `out` that begins with the block's first number.
fn fill(start: u64, out: &mut [f32], make: impl Fn(u64, &mut [f32]) + Sync) {
    /// Number of random numbers that a thread generates at a time.
    const UNIT: usize = 4096;
    // If the range begins inside a block, the whole block is generated.
    let head = (start.next_multiple_of(4) - start).min(out.len() as u64) as usize;
    let (first, rest) = out.split_at_mut(head);
    if head > 0 {
        let offset = (start % 4) as usize;
        let mut block = [0.0; 4];
        make(start / 4, &mut block);
        first.copy_from_slice(&block[offset..offset + head]);
    }
    let from = start.div_ceil(4);
    let units = rest.len().div_ceil(UNIT);
    split(units, UNIT, [Output { data: rest, floats: UNIT }], |range, [part]| {
        make(from + (range.start * UNIT / 4) as u64, part);
    });
}

/// Returns the 64-bit FNV-1a hash of a string, which is the same on every machine.
#[must_use]
pub fn hash(text: &str) -> u64 {
    text.bytes().fold(0xCBF2_9CE4_8422_2325, |h, byte| (h ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3))
}

fn split_words(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

/// Applies the finalizer of SplitMix64, which spreads neighbouring seeds over the whole key space.
fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_do_not_depend_on_the_range_requested() {
        let stream = Stream::new(7, "init", 3);
        let mut whole = vec![0.0; 1000];
        stream.fill_normal(0, &mut whole);
        for cut in [1, 2, 3, 5, 499, 998] {
            let mut parts = vec![0.0; 1000];
            let (a, b) = parts.split_at_mut(cut);
            stream.fill_normal(0, a);
            stream.fill_normal(cut as u64, b);
            assert_eq!(whole, parts);
        }
        let mut whole = vec![0; 1000];
        stream.fill_bits(0, &mut whole);
        for (word, halves) in (0..).zip(whole.chunks(2)) {
            let word = stream.words(word / 4)[(word % 4) as usize];
            assert_eq!(halves, [word as u16, (word >> 16) as u16]);
        }
        for cut in [1, 2, 7, 8, 9, 499, 998] {
            let mut parts = vec![0; 1000];
            let (a, b) = parts.split_at_mut(cut);
            stream.fill_bits(0, a);
            stream.fill_bits(cut as u64, b);
            assert_eq!(whole, parts);
        }
    }

    #[test]
    fn normal_numbers_have_the_right_moments() {
        let mut x = vec![0.0f32; 200_000];
        Stream::new(1, "init", 0).fill_normal(0, &mut x);
        let n = x.len() as f64;
        let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
        let variance = x.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n;
        let kurtosis = x.iter().map(|&v| (f64::from(v) - mean).powi(4)).sum::<f64>() / n / variance.powi(2);
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.01 && (kurtosis - 3.0).abs() < 0.05);
    }

    #[test]
    fn random_streams_differ() {
        let a = Stream::new(1, "init", 0).words(0);
        assert_ne!(a, Stream::new(2, "init", 0).words(0));
        assert_ne!(a, Stream::new(1, "dropout", 0).words(0));
        assert_ne!(a, Stream::new(1, "init", 1).words(0));
        assert_ne!(a, Stream::new(1, "init", 0).words(1));
    }
}
