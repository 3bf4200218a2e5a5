//! Block sizes of products for the caches of this machine.

use super::tile::COLUMNS;
use std::sync::LazyLock;

/// Number of words of the inner dimension in the largest block of the right operand.
pub(super) const DEPTH: usize = 512;
/// Number of columns of such a block, which takes 1.5 MiB.
pub(super) const WIDTH: usize = 768;
/// Limit on the rows of the left operand that are multiplied with a block, and packed, at a time.
pub(super) const HEIGHT: usize = 256;

/// Bytes of the caches that belong to one core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Caches {
    first: usize,
    second: usize,
}

/// Returns the words of the inner dimension and the rows of the left operand in a block whose tiles have `columns`
/// columns. A tile's columns of the right operand take half of the first-level cache, or three quarters if the inner
/// dimension then fits in one piece. The rows take half of the second-level cache.
pub(super) fn blocks(words: usize, columns: usize) -> (usize, usize) {
    CACHES.blocks(words, columns)
}

/// Returns how many columns of the right operand a block of this depth has, so that it takes at most three quarters of
/// the second-level cache, but has at least one panel.
pub(super) fn width(depth: usize) -> usize {
    CACHES.width(depth)
}

static CACHES: LazyLock<Caches> = LazyLock::new(Caches::of_machine);

impl Caches {
    /// Used on systems that do not report their caches: the caches of the smallest processors with AVX2 or NEON that
    /// are used for training.
    const USUAL: Caches = Caches { first: 32 << 10, second: 256 << 10 };

    /// Reads the cache sizes of the first core that Linux reports.
    fn of_machine() -> Self {
        let read = |index: usize, name: &str| {
            std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{name}"))
                .unwrap_or_default()
        };
        let mut caches = Self::USUAL;
        for index in 0..4 {
            let (level, kind, size) = (read(index, "level"), read(index, "type"), bytes(&read(index, "size")));
            match (level.trim(), kind.trim(), size) {
                ("1", "Data", Some(size)) => caches.first = size,
                ("2", "Data" | "Unified", Some(size)) => caches.second = size,
                _ => {}
            }
        }
        caches
    }

    fn blocks(self, words: usize, columns: usize) -> (usize, usize) {
        let row = columns * size_of::<f32>();
        let depth = if words * row <= self.first * 3 / 4 { words } else { self.first / 2 / row / 16 * 16 };
        let depth = depth.clamp(16, DEPTH);
        (depth, (self.second / 2 / (depth * size_of::<f32>())).clamp(16, HEIGHT))
    }

    fn width(self, depth: usize) -> usize {
        (self.second * 3 / 4 / (depth * size_of::<f32>()) / COLUMNS * COLUMNS).clamp(COLUMNS, WIDTH)
    }
}

/// Parses `48K` or `2M`.
fn bytes(size: &str) -> Option<usize> {
    let size = size.trim();
    let (digits, unit) = size.split_at(size.find(|c: char| !c.is_ascii_digit()).unwrap_or(size.len()));
    let factor = match unit {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        _ => return None,
    };
    digits.parse::<usize>().ok()?.checked_mul(factor).filter(|&bytes| bytes > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_sizes_are_parsed_as_linux_writes_them() {
        assert_eq!(
            [" 48K\n", "2M", "512", "", "K", "1G", "0K"].map(bytes),
            [Some(48 << 10), Some(2 << 20), Some(512), None, None, None, None]
        );
    }

    #[test]
    fn blocks_fit_their_caches_and_short_dimensions_stay_whole() {
        let zen3 = Caches { first: 32 << 10, second: 512 << 10 };
        assert_eq!(zen3.blocks(384, 16), (384, 170));
        assert_eq!(zen3.blocks(768, 16), (256, 256));
        assert_eq!(Caches { second: 256 << 10, ..zen3 }.blocks(768, 16), (256, 128));
        // Processors with AVX-512 have a second-level cache of 1 MiB or 2 MiB.
        assert_eq!([1 << 20, 2 << 20, 64 << 10].map(|second| Caches { second, ..zen3 }.width(512)), [384, 768, 48]);
        // With caches this large, the thread's buffers are the limit.
        assert_eq!(Caches { first: 1 << 20, second: 1 << 30 }.blocks(4096, 12), (DEPTH, HEIGHT));
    }
}
