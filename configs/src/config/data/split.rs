//! The splits of a data set and slices of them, in the notation of Hugging Face's `datasets`: `train[:90%]+validation`.

use std::ops::Range;

/// A split, or a slice of its records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SplitPart {
    /// The name of the split.
    pub name: String,
    from: Option<i64>,
    to: Option<i64>,
    unit: Unit,
}

/// The unit of a slice's bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unit {
    Records,
    /// Percent of the records, rounded to the nearest record.
    Percent,
    /// Multiples of a hundredth of the records, rounded down.
    Hundredths,
}

impl SplitPart {
    /// Reads a split, or several with `+` between them.
    ///
    /// # Errors
    /// A description of the mistake in the text.
    pub fn parse(text: &str) -> Result<Vec<Self>, String> {
        let last = text.matches('+').count();
        let parts = text.split('+').enumerate().map(|(index, part)| {
            // White space is allowed beside `+` only.
            let part = if index > 0 { part.trim_start() } else { part };
            Self::of(if index < last { part.trim_end() } else { part })
        });
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let is_mixed = |other: &Self| !matches!((parts[0].unit, other.unit), (Unit::Records, _) | (_, Unit::Records));
        match parts.iter().find(|other| is_mixed(other) && other.unit != parts[0].unit) {
            Some(_) => Err("all slices must use the same rounding mode".into()),
            None => Ok(parts),
        }
    }

    fn of(text: &str) -> Result<Self, String> {
        let (rest, rounding) = match text.strip_suffix(')').and_then(|text| text.split_once('(')) {
            Some((rest, rounding)) => (rest, Some(rounding)),
            None => (text, None),
        };
        let (name, slice) = match rest.strip_suffix(']').and_then(|rest| rest.split_once('[')) {
            Some((name, slice)) => (name, Some(slice)),
            None => (rest, None),
        };
        let is_word = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_alphanumeric() || c == '_');
        if !name.split('.').all(is_word) {
            return Err(format!("`{text}` is not a split such as `train`, `train[:90%]` or `train[1000:2000]`"));
        }
        let bounds = slice.map(|slice| slice.split_once(':').ok_or(slice)).transpose();
        let (from, to) =
            bounds.map_err(|slice| format!("`[{slice}]` is not a slice; use `[from:to]`"))?.unwrap_or_default();
        let is_percent = from.ends_with('%') || to.ends_with('%');
        let number = |text: &str| match text.strip_suffix('%').unwrap_or(text) {
            "" if text.is_empty() => Ok(None),
            digits => number(digits).map(Some).ok_or_else(|| format!("`{text}` is not an integer")),
        };
        let (from, to) = (number(from)?, number(to)?);
        if let Some(bound) = from.into_iter().chain(to).find(|bound| is_percent && !(-100..=100).contains(bound)) {
            return Err(format!("{bound} % is not between -100 % and 100 %"));
        }
        let unit = match (is_percent, rounding) {
            (false, None) => Unit::Records,
            (true, None | Some("closest")) => Unit::Percent,
            (true, Some("pct1_dropremainder")) => Unit::Hundredths,
            (true, Some(other)) => {
                return Err(format!("`({other})` is not a rounding mode; use `(closest)` or `(pct1_dropremainder)`"));
            }
            (false, Some(_)) => return Err("only a slice in percent accepts a rounding mode".into()),
        };
        Ok(Self { name: name.into(), from, to, unit })
    }

    /// Returns whether this is the whole split.
    pub fn is_whole(&self) -> bool {
        self.from.is_none() && self.to.is_none()
    }

    /// Returns the range of records that the slice selects from a split with `count` records.
    ///
    /// # Errors
    /// The reason why the slice selects no records.
    pub fn range(&self, count: u64) -> Result<Range<u64>, String> {
        let all = i64::try_from(count).unwrap_or(i64::MAX);
        if self.unit == Unit::Hundredths && count < 100 {
            return Err(format!(
                "1 % of {count} records is less than one record, so `pct1_dropremainder` selects nothing"
            ));
        }
        let records = |bound: i64| match self.unit {
            Unit::Records => bound,
            // As in Python, halves are rounded to even numbers.
            Unit::Percent => (bound as f64 * all as f64 / 100.0).round_ties_even() as i64,
            Unit::Hundredths => bound * (all / 100),
        };
        let place = |bound: Option<i64>, otherwise: i64| {
            let bound = bound.map_or(otherwise, records);
            (if bound < 0 { (all + bound).max(0) } else { bound.min(all) }) as u64
        };
        let (from, to) = (place(self.from, 0), place(self.to, all));
        if from >= to { Err(format!("the slice selects none of {count} records")) } else { Ok(from..to) }
    }
}

/// Reads a whole number as Python does: with a sign, and `_` between digits.
fn number(text: &str) -> Option<i64> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let is_number = !digits.is_empty()
        && digits.split('_').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()));
    is_number.then(|| text.replace('_', "").parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(text: &str, count: u64) -> Result<Range<u64>, String> {
        SplitPart::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))[0].range(count)
    }

    #[test]
    fn slices_match_those_of_hugging_face_datasets() {
        for (text, count, expected) in [
            ("train", 10, 0..10),
            ("train[:]", 10, 0..10),
            ("train[3:7]", 10, 3..7),
            ("train[-3:]", 10, 7..10),
            ("train[-30:-8]", 10, 0..2),
            ("train[1_0:1000]", 20, 10..20),
            ("train[:50%]", 5, 0..2), // 2.5 is rounded to an even number
            ("train[50%:]", 7, 4..7), // and so is 3.5
            ("train[10%:20]", 200, 20..40),
            ("train[-10%:]", 55, 49..55), // -5.5 is rounded to -6
            ("train[1%:2%](pct1_dropremainder)", 399, 3..6),
            ("train[33%:](closest)", 100, 33..100),
        ] {
            assert_eq!(range(text, count), Ok(expected), "{text}");
        }
        let parts = SplitPart::parse("train.a + test_2[5:]").unwrap();
        assert_eq!(parts.iter().map(|part| part.name.as_str()).collect::<Vec<_>>(), ["train.a", "test_2"]);
        assert_eq!(range("train[7:7]", 10), Err("the slice selects none of 10 records".into()));
        assert!(range("train[:1%](pct1_dropremainder)", 99).is_err());
    }

    #[test]
    fn invalid_slices_are_errors() {
        for text in [
            "",
            "+",
            "train+",
            " train",
            "train ",
            "train[",
            "train[]",
            "train[5]",
            "train[a:]",
            "train[:_1]",
            "train[:1__0]",
            "train[:101%]",
            "train[-101%:]",
            "train[:%]",
            "train[1:2:3]",
            "train[:5](closest)",
            "train(closest)",
            "train[:5%](up)",
            "train[:5%]()",
            "tra-in",
            "train..a",
            ".train",
            "a[:1%]+b[:1%](pct1_dropremainder)",
            "train[:99999999999999999999]",
        ] {
            assert!(SplitPart::parse(text).is_err(), "{text}");
        }
    }
}
