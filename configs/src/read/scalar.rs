//! Parses plain scalars by YAML 1.2's core schema, which contains JSON's.
//!
//! YAML 1.1 reads `yes` and `on` as booleans and `1_000` as a number; here they are strings. If a key expects a
//! boolean or a number, the error suggests the right form.

use crate::read::node::Value;

/// Returns the value of an unquoted scalar.
pub(crate) fn plain(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => Value::Null,
        "true" | "True" | "TRUE" => Value::Bool(true),
        "false" | "False" | "FALSE" => Value::Bool(false),
        ".nan" | ".NaN" | ".NAN" => Value::Float(f64::NAN),
        _ => number(text).unwrap_or_else(|| Value::Text(text.to_string())),
    }
}

fn number(text: &str) -> Option<Value> {
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    if matches!(unsigned, ".inf" | ".Inf" | ".INF") {
        return Some(Value::Float(if text.starts_with('-') { f64::NEG_INFINITY } else { f64::INFINITY }));
    }
    if let Some(digits) = text.strip_prefix("0x") {
        return based(digits, 16);
    }
    if let Some(digits) = text.strip_prefix("0o") {
        return based(digits, 8);
    }
    if !unsigned.is_empty() && unsigned.bytes().all(|byte| byte.is_ascii_digit()) {
        // An integer too large for i128 becomes a float, which the range check of every key rejects.
        return Some(text.parse().map(Value::Int).unwrap_or_else(|_| Value::Float(text.parse().unwrap_or(f64::NAN))));
    }
    // Rust's parser would also accept "infinity", "nan" and "e5".
    let numeric =
        unsigned.bytes().all(|byte| byte.is_ascii_digit() || matches!(byte, b'.' | b'e' | b'E' | b'-' | b'+'));
    let starts = unsigned.strip_prefix('.').unwrap_or(unsigned).starts_with(|c: char| c.is_ascii_digit());
    if numeric && starts { text.parse().ok().map(Value::Float) } else { None }
}

fn based(digits: &str, radix: u32) -> Option<Value> {
    let valid = !digits.is_empty() && digits.chars().all(|digit| digit.is_digit(radix));
    valid.then(|| i128::from_str_radix(digits, radix).map_or(Value::Float(f64::INFINITY), Value::Int))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_follow_the_yaml_core_schema() {
        let cases: [(&str, Value); 13] = [
            ("12", Value::Int(12)),
            ("-3", Value::Int(-3)),
            ("+7", Value::Int(7)),
            ("0x1F", Value::Int(31)),
            ("0o17", Value::Int(15)),
            ("5e8", Value::Float(5e8)),
            ("500000000.0", Value::Float(5e8)),
            (".5", Value::Float(0.5)),
            ("1.", Value::Float(1.0)),
            ("-1E-4", Value::Float(-1e-4)),
            ("1e999", Value::Float(f64::INFINITY)),
            ("-.inf", Value::Float(f64::NEG_INFINITY)),
            ("18446744073709551615", Value::Int(i128::from(u64::MAX))),
        ];
        for (text, value) in cases {
            assert_eq!(plain(text), value, "{text}");
        }
        assert!(matches!(plain(".nan"), Value::Float(value) if value.is_nan()));
        assert!(matches!(plain(&"9".repeat(400)), Value::Float(value) if value.is_infinite()));
    }

    #[test]
    fn similar_text_is_not_a_number() {
        for text in ["1_000", "e5", "1e", "--1", "+", "-", ".", "0x", "0xg", "inf", "nan", "infinity", "1.2.3", "12k"] {
            assert_eq!(plain(text), Value::Text(text.to_string()), "{text}");
        }
    }
}
