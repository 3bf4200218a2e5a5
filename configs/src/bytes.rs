//! Parses sizes in bytes with units: `6GiB`, `800 MB`.

/// Decimal and binary units. `G` alone is rejected, because programs disagree on whether it is 10^9 or 2^30.
const UNITS: [(&str, u64); 9] = [
    ("b", 1),
    ("kb", 1000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
];

/// Parses a size such as `6GiB`, `1.5 GB` or `4096` and returns its bytes, rounded down. Units are
/// case-insensitive. Returns `None` if the text is not a size or exceeds 64 bits.
pub fn bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = (&text[..end], text[end..].trim_start());
    let unit = match unit {
        "" => 1,
        unit => UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit))?.1,
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(unit);
    }
    // The number is a fraction or has too many digits for 64 bits.
    let bytes = number.parse::<f64>().ok()? * unit as f64;
    // 2^64 is the first float that does not fit into a u64.
    (bytes < 18_446_744_073_709_551_616.0).then_some(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimal_and_binary_units() {
        let cases = [
            ("0", 0),
            ("4096", 4096),
            ("12 B", 12),
            ("6GiB", 6 << 30),
            ("6 gib", 6 << 30),
            ("800 MB", 800_000_000),
            ("1.5GiB", 3 << 29),
            (" 0.5kb ", 500),
            ("1.TB", 1_000_000_000_000),
            ("18446744073709551615", u64::MAX),
            ("16777215TiB", 16_777_215 << 40),
        ];
        for (text, expected) in cases {
            assert_eq!(bytes(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn invalid_sizes_are_none() {
        for text in [
            "", " ", "GiB", ".", ".GiB", "-1", "+1", "1e3", "6G", "6 Gi", "1.2.3 kB", "1_000", "1,5 GB", "nan", "６GiB",
        ] {
            assert_eq!(bytes(text), None, "{text}");
        }
        for text in ["18446744073709551616", "16777216TiB", "99999999999999999999999999999999999999", "2e9TB"] {
            assert_eq!(bytes(text), None, "{text}");
        }
    }
}
