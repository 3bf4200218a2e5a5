//! The resident memory of this process as the kernel counts it, for comparison with the bytes that the rank's ledger
//! tracks.

use std::fs;

/// Returns the proportional set size (PSS) of this process in bytes: the size of each page is divided by the number of
/// processes that share it. Returns `None` if the kernel does not report it.
#[must_use]
pub fn proportional() -> Option<u64> {
    kilobytes(&fs::read_to_string("/proc/self/smaps_rollup").ok()?, "Pss:")
}

/// Returns the peak resident set size of this process in bytes. Shared pages count in full, so the sum over several
/// processes may exceed the memory in use.
#[must_use]
pub fn peak() -> Option<u64> {
    kilobytes(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

/// Parses a line such as `name:  12 kB` and returns its value in bytes.
pub(crate) fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB"))?;
    Some(value.trim().parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_lines_are_found_by_their_full_name() {
        let text = "Rss:   3 kB\nPss:        1234 kB\nPss_Dirty:   7 kB\nVmHWM:\t  8 kB\n";
        assert_eq!(kilobytes(text, "Pss:"), Some(1234 * 1024));
        assert_eq!(kilobytes(text, "VmHWM:"), Some(8 * 1024));
        assert_eq!(kilobytes(text, "Swap:"), None);
    }
}
