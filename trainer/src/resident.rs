//! Bytes of memory that this process occupies, as the kernel counts them: what a rank's tracked bytes are held against.

use std::fs;

/// This process's share of the memory that it occupies now: pages that several processes share count a part for each.
/// `None` where the kernel does not tell.
#[must_use]
pub fn proportional() -> Option<u64> {
    kilobytes(&fs::read_to_string("/proc/self/smaps_rollup").ok()?, "Pss:")
}

/// The most that this process has occupied. Pages that it shares count in full, so those of several processes are more
/// together than the machine held.
#[must_use]
pub fn peak() -> Option<u64> {
    kilobytes(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

/// The value of a line `name  12 kB`, in bytes.
fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB"))?;
    Some(value.trim().parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_by_its_whole_name() {
        let text = "Rss:   3 kB\nPss:        1234 kB\nPss_Dirty:   7 kB\nVmHWM:\t  8 kB\n";
        assert_eq!(kilobytes(text, "Pss:"), Some(1234 * 1024));
        assert_eq!(kilobytes(text, "VmHWM:"), Some(8 * 1024));
        assert_eq!(kilobytes(text, "Swap:"), None);
    }
}
