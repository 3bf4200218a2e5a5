//! Random numbers that do not depend on the layout: a counter-based generator.
//!
//! Every number is a pure function of (seed, purpose, stream, index), so initialisation, dropout and
//! shuffling give the same values on one rank or a hundred, whatever shard a rank holds.
//! The generator is Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as
//! 1, 2, 3", SC 2011.

const MULTIPLIER: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// A sequence of random numbers with random access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    key: [u32; 2],
    /// Upper half of the 128-bit counter; the lower half is the index.
    high: u64,
}

impl Stream {
    /// The stream of `seed` for `purpose` (for example `"init"`, `"dropout"`) and one tensor or sample.
    #[must_use]
    pub fn new(seed: u64, purpose: &str, tensor_or_sample: u64) -> Self {
        let key = mix(seed ^ hash(purpose));
        Self { key: split(key), high: tensor_or_sample }
    }

    /// Four random words for a block of four consecutive indices.
    #[must_use]
    pub fn words(&self, block: u64) -> [u32; 4] {
        let [h0, h1] = split(self.high);
        let [l0, l1] = split(block);
        philox([l0, l1, h0, h1], self.key)
    }

    /// Uniform in [0, 1): the upper 24 bits of word `index`.
    #[must_use]
    pub fn f32_at(&self, index: u64) -> f32 {
        unit(self.words(index / 4)[(index % 4) as usize])
    }

    /// Fills `out` with standard normal numbers of indices `start..`: Box–Muller on pairs of words.
    pub fn fill_normal(&self, start: u64, out: &mut [f32]) {
        self.fill(start, out, |words| {
            let (a, b) = normal_pair(words[0], words[1]);
            let (c, d) = normal_pair(words[2], words[3]);
            [a, b, c, d]
        });
    }

    /// Fills `out` with uniform numbers in [0, 1) of indices `start..`.
    pub fn fill_uniform(&self, start: u64, out: &mut [f32]) {
        self.fill(start, out, |words| words.map(unit));
    }

    fn fill(&self, start: u64, out: &mut [f32], numbers: impl Fn([u32; 4]) -> [f32; 4]) {
        let mut index = start;
        let mut rest = out;
        while !rest.is_empty() {
            let offset = (index % 4) as usize;
            let take = rest.len().min(4 - offset);
            let (now, later) = rest.split_at_mut(take);
            now.copy_from_slice(&numbers(self.words(index / 4))[offset..offset + take]);
            index += take as u64;
            rest = later;
        }
    }
}

/// A 64-bit name for a string: FNV-1a, the same on every machine.
#[must_use]
pub fn hash(text: &str) -> u64 {
    text.bytes().fold(0xCBF2_9CE4_8422_2325, |h, byte| (h ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3))
}

/// Uniform in [0, 1) with 24 bits, so that 1.0 cannot come out of the rounding.
fn unit(word: u32) -> f32 {
    (word >> 8) as f32 * (1.0 / 16_777_216.0)
}

/// Two standard normal numbers. `libm` and not the platform's, so that bits are the same everywhere.
fn normal_pair(a: u32, b: u32) -> (f32, f32) {
    let u = ((a >> 8) as f32 + 1.0) * (1.0 / 16_777_216.0); // (0, 1]
    let radius = libm::sqrtf(-2.0 * libm::logf(u));
    let (sin, cos) = libm::sincosf(std::f32::consts::TAU * unit(b));
    (radius * cos, radius * sin)
}

fn split(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

/// The finaliser of SplitMix64: spreads neighbouring seeds over the whole key space.
fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let p0 = u64::from(MULTIPLIER[0]) * u64::from(counter[0]);
        let p1 = u64::from(MULTIPLIER[1]) * u64::from(counter[2]);
        let [lo0, hi0] = split(p0);
        let [lo1, hi1] = split(p1);
        counter = [hi1 ^ counter[1] ^ key[0], lo1, hi0 ^ counter[3] ^ key[1], lo0];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
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
    fn any_cut_gives_the_same_numbers() {
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
    }

    #[test]
    fn moments_of_the_normal() {
        let mut x = vec![0.0f32; 200_000];
        Stream::new(1, "init", 0).fill_normal(0, &mut x);
        let n = x.len() as f64;
        let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
        let variance = x.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n;
        let kurtosis = x.iter().map(|&v| (f64::from(v) - mean).powi(4)).sum::<f64>() / n / variance.powi(2);
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.01 && (kurtosis - 3.0).abs() < 0.05);
    }

    #[test]
    fn streams_differ() {
        let a = Stream::new(1, "init", 0).words(0);
        assert_ne!(a, Stream::new(2, "init", 0).words(0));
        assert_ne!(a, Stream::new(1, "dropout", 0).words(0));
        assert_ne!(a, Stream::new(1, "init", 1).words(0));
        assert_ne!(a, Stream::new(1, "init", 0).words(1));
    }
}
