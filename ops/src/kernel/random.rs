//! Random numbers, thirty-two blocks of a counter-based generator at a time, and dropout, which compares the random
//! words with a limit.
//!
//! The generator is Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC
//! 2011. Normal numbers use Box–Muller with the arithmetic of `libm`'s `logf` and `sincosf` (which come from musl),
//! written without branches so that it runs in every lane of a register. A test compares all 2²⁴ arguments of each
//! function.

use super::math::ln;
use super::vectorised;

/// Returns the four words for one counter and one key.
#[inline(always)]
pub(crate) fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let mut state = (counter.map(u64::from), key);
    for _ in 0..10 {
        state = round(state);
    }
    state.0.map(|word| word as u32)
}

/// Computes one round: the next counter and key. Only the lower 32 bits of each number of the counter are
/// significant; the upper ones are arbitrary. x86's `pmuludq` multiplies the lower halves of 64-bit lanes, so every
/// result is already in the lane where the next round reads it.
#[inline(always)]
fn round((c, key): ([u64; 4], [u32; 2])) -> ([u64; 4], [u32; 2]) {
    let p0 = 0xD251_1F53 * (c[0] & 0xFFFF_FFFF);
    let p1 = 0xCD9E_8D57 * (c[2] & 0xFFFF_FFFF);
    let c = [(p1 >> 32) ^ c[1] ^ u64::from(key[0]), p1, (p0 >> 32) ^ c[3] ^ u64::from(key[1]), p0];
    (c, [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)])
}

/// Converts a word to a uniform number in [0, 1). It has 24 bits, so rounding cannot produce 1.0.
#[inline(always)]
pub(crate) fn unit(word: u32) -> f32 {
    (word >> 8) as f32 * (1.0 / 16_777_216.0)
}

/// Converts two words to two standard normal numbers by Box–Muller.
#[inline(always)]
pub(crate) fn normal_pair(a: u32, b: u32) -> (f32, f32) {
    let u = ((a >> 8) as f32 + 1.0) * (1.0 / 16_777_216.0); // (0, 1]
    let radius = (-2.0 * ln(u)).sqrt();
    let (sin, cos) = sin_cos(std::f32::consts::TAU * unit(b));
    (radius * cos, radius * sin)
}

/// Computes `libm::sincosf` of a number in [0, 9π/4). The nearest multiple of a quarter turn is subtracted in f64.
#[inline(always)]
fn sin_cos(x: f32) -> (f32, f32) {
    let bits = x.to_bits();
    let quarters =
        [0x3F49_0FDA, 0x4016_CBE3, 0x407B_53D1, 0x40AF_EDDF].map(|limit| i32::from(bits > limit)).iter().sum::<i32>();
    let y = f64::from(x) - f64::from(quarters) * std::f64::consts::FRAC_PI_2;
    let z = y * y;
    let w = z * z;
    let s = z * y;
    let sin = ((y + s * (-0.166_666_666_416_265_24 + z * 0.008_333_329_385_889_463))
        + s * w * (-0.000_198_393_348_360_966_32 + z * 0.000_002_718_311_493_989_822)) as f32;
    let cos = (((1.0 + z * -0.499_999_997_251_031) + w * 0.041_666_623_323_739_06)
        + (w * z) * (-0.001_388_676_377_460_993 + z * 0.000_024_390_448_796_277_41)) as f32;
    let swaps = quarters & 1 != 0;
    let sign = |negative: bool, x: f32| f32::from_bits(x.to_bits() ^ (u32::from(negative) << 31));
    (
        sign(quarters & 2 != 0, if swaps { cos } else { sin }),
        sign(quarters == 1 || quarters == 2, if swaps { sin } else { cos }),
    )
}

/// Number of blocks that are generated at a time.
const BLOCKS: usize = 32;

/// Counters between the rounds, and the resulting words in the order of their index. Aligned, because storing a
/// vector across two cache lines takes twice as long.
#[repr(align(64))]
struct Room {
    counters: [[u64; BLOCKS]; 4],
    words: [[u32; 4]; BLOCKS],
}

impl Room {
    fn new() -> Self {
        Self { counters: [[0; BLOCKS]; 4], words: [[0; 4]; BLOCKS] }
    }

    /// Returns the words of consecutive blocks. Each loop runs two rounds instead of ten, because a round waits for
    /// the multiplications of the previous one: the processor's schedulers hold two rounds of several vectors, but
    /// hardly ten rounds of one.
    #[inline(always)]
    fn words(&mut self, first: u64, high: [u32; 2], key: [u32; 2]) -> &[u32] {
        let [c0, c1, c2, c3] = &mut self.counters;
        for (lane, (((c0, c1), c2), c3)) in c0.iter_mut().zip(c1).zip(c2).zip(c3).enumerate() {
            let block = first.wrapping_add(lane as u64);
            let counter = [block, block >> 32, u64::from(high[0]), u64::from(high[1])];
            [*c0, *c1, *c2, *c3] = round(round((counter, key))).0;
        }
        let mut key = after_two(key);
        for _ in 0..3 {
            let [c0, c1, c2, c3] = &mut self.counters;
            for (((c0, c1), c2), c3) in c0.iter_mut().zip(c1).zip(c2).zip(c3) {
                [*c0, *c1, *c2, *c3] = round(round(([*c0, *c1, *c2, *c3], key))).0;
            }
            key = after_two(key);
        }
        let [c0, c1, c2, c3] = &self.counters;
        for ((((words, c0), c1), c2), c3) in self.words.iter_mut().zip(c0).zip(c1).zip(c2).zip(c3) {
            *words = round(round(([*c0, *c1, *c2, *c3], key))).0.map(|word| word as u32);
        }
        self.words.as_flattened()
    }
}

#[inline(always)]
fn after_two(key: [u32; 2]) -> [u32; 2] {
    round(round(([0; 4], key))).1
}

vectorised! {
    /// Writes mean + stdev·x for standard normal x, starting at the first number of block `first`.
    fn normal(first: u64, high: [u32; 2], key: [u32; 2], mean: f32, stdev: f32, out: &mut [f32]) {
        let mut room = Room::new();
        let mut numbers = [[0.0; 2]; 2 * BLOCKS];
        for (index, part) in out.chunks_mut(4 * BLOCKS).enumerate() {
            let words = room.words(first.wrapping_add((index * BLOCKS) as u64), high, key);
            for (numbers, words) in numbers.iter_mut().zip(words.as_chunks().0) {
                let &[a, b] = words;
                let (a, b) = normal_pair(a, b);
                *numbers = [a.mul_add(stdev, mean), b.mul_add(stdev, mean)];
            }
            part.copy_from_slice(&numbers.as_flattened()[..part.len()]);
        }
    }
}

vectorised! {
    /// Writes low + width·x for x uniform in [0, 1), starting at the first number of block `first`.
    fn uniform(first: u64, high: [u32; 2], key: [u32; 2], low: f32, width: f32, out: &mut [f32]) {
        let mut room = Room::new();
        for (index, part) in out.chunks_mut(4 * BLOCKS).enumerate() {
            let words = room.words(first.wrapping_add((index * BLOCKS) as u64), high, key);
            for (x, &word) in part.iter_mut().zip(words) {
                *x = unit(word).mul_add(width, low);
            }
        }
    }
}

vectorised! {
    /// Writes 16 random bits to each element: the halves of the words starting at the first word of block `first`. The
    /// lower half of a word comes first.
    fn halves(first: u64, high: [u32; 2], key: [u32; 2], out: &mut [u16]) {
        let mut room = Room::new();
        for (index, part) in out.chunks_mut(8 * BLOCKS).enumerate() {
            let words = room.words(first.wrapping_add((index * BLOCKS) as u64), high, key);
            for (halves, &word) in part.chunks_mut(2).zip(words) {
                for (half, bits) in halves.iter_mut().zip([word as u16, (word >> 16) as u16]) {
                    *half = bits;
                }
            }
        }
    }
}

/// Returns the smallest word whose [`unit`] is at least `probability`, which is in [0, 1). Comparing integers avoids
/// converting each word to a float.
pub(crate) fn limit(probability: f32) -> u32 {
    // The multiplication is exact: the factor is a power of two, and the product is in f64.
    ((f64::from(probability) * 16_777_216.0).ceil() as u32) << 8
}

vectorised! {
    /// y = x·scale, or 0 where the random number of [`uniform`] is below the probability from which [`limit`] computed
    /// `limit`. The numbers begin with the first one of block `first`.
    fn dropped(first: u64, high: [u32; 2], key: [u32; 2], limit: u32, scale: f32, x: &[f32], y: &mut [f32]) {
        let mut room = Room::new();
        for (index, (x, y)) in x.chunks(4 * BLOCKS).zip(y.chunks_mut(4 * BLOCKS)).enumerate() {
            let words = room.words(first.wrapping_add((index * BLOCKS) as u64), high, key);
            for ((y, &x), &word) in y.iter_mut().zip(x).zip(words) {
                // Always multiplies: the compiler would turn a branch into a masked load.
                let kept = x * scale;
                *y = if word < limit { 0.0 } else { kept };
            }
        }
    }
}

vectorised! {
    /// Does the same as [`dropped`] in place.
    fn dropped_in_place(first: u64, high: [u32; 2], key: [u32; 2], limit: u32, scale: f32, x: &mut [f32]) {
        let mut room = Room::new();
        for (index, x) in x.chunks_mut(4 * BLOCKS).enumerate() {
            let words = room.words(first.wrapping_add((index * BLOCKS) as u64), high, key);
            for (x, &word) in x.iter_mut().zip(words) {
                let kept = *x * scale;
                *x = if word < limit { 0.0 } else { kept };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of the Random123 distribution (`kat_vectors`).
    #[test]
    fn philox_known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]);
        assert_eq!(
            philox([0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344], [0xA409_3822, 0x299F_31D0]),
            [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1]
        );
    }

    #[test]
    fn the_dropout_threshold_matches_the_probability() {
        let below_one = 1.0 - f32::EPSILON / 2.0;
        for probability in [0.0, f32::MIN_POSITIVE, 1e-8, 0.1, 0.3, 0.5, 0.9, below_one] {
            let limit = limit(probability);
            for word in
                [0, 1, 255, 256, u32::MAX - 256, u32::MAX].into_iter().chain(limit.saturating_sub(2)..=limit + 2)
            {
                assert_eq!(word < limit, unit(word) < probability, "{word} at {probability}");
            }
        }
    }

    #[test]
    fn logarithm_and_sine_match_libm_for_all_arguments() {
        for number in 0..1u32 << 24 {
            let u = (number as f32 + 1.0) * (1.0 / 16_777_216.0);
            assert_eq!(ln(u).to_bits(), libm::logf(u).to_bits(), "ln {u:e}");
            let angle = std::f32::consts::TAU * unit(number << 8);
            let (sin, cos) = sin_cos(angle);
            let (want_sin, want_cos) = libm::sincosf(angle);
            assert_eq!([sin, cos].map(f32::to_bits), [want_sin, want_cos].map(f32::to_bits), "at {angle:e}");
        }
    }
}
