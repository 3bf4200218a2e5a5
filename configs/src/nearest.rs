//! What a mistyped key or value was meant to be.

use std::collections::HashMap;
use std::sync::LazyLock;

use crate::bytes::bytes;
use crate::config::PartitionMethod;
use crate::node::Value;
use crate::schema::{self, Key, Kind, Status};
use crate::value::leaf;

/// Longer names are not compared: no key is longer, and comparing costs the product of the lengths.
const LONGEST: usize = 64;

/// The candidate nearest to `name`, when one is near enough to be meant.
pub(crate) fn nearest<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    if name.is_empty() || name.len() > LONGEST {
        return None;
    }
    let name = name.to_ascii_lowercase();
    let mut best = None;
    for candidate in candidates {
        let other = candidate.to_ascii_lowercase();
        let typo = strsim::normalized_damerau_levenshtein(&name, &other);
        // `zero` for `zero_optimization`: a beginning counts more than the length left out.
        let beginning = strsim::jaro_winkler(&name, &other) - 0.1;
        let score = typo.max(beginning);
        if score > best.map_or(0.7, |(score, _)| score) {
            best = Some((score, candidate));
        }
    }
    best.map(|(_, candidate)| candidate)
}

/// More places than these are no help: every other section has an `enabled`.
const FEW: usize = 3;

/// Where keys of that name stand, when these are few places. Of several, those are told that can be written today.
pub(crate) fn elsewhere(name: &str) -> &'static [String] {
    /// Of one name: all places, and those of keys that do what they say.
    type Places = (Vec<String>, Vec<String>);
    static PLACES: LazyLock<HashMap<&'static str, Places>> = LazyLock::new(|| {
        let mut places = HashMap::<_, Places>::new();
        schema::walk("", schema::TOP.keys, &mut |path, key: &'static Key| {
            // A path through a variant is written without the variant's name.
            let plain = plain(path);
            let (all, today) = places.entry(key.name).or_default();
            if key.status == Status::Now && !today.contains(&plain) {
                today.push(plain.clone());
            }
            if !all.contains(&plain) {
                all.push(plain);
            }
        });
        places
    });
    match PLACES.get(name) {
        Some((all, _)) if all.len() == 1 => all,
        Some((_, today)) if today.len() <= FEW => today,
        _ => &[],
    }
}

/// `optimizer.params[AdamW].lr` without the brackets.
fn plain(path: &str) -> String {
    match (path.find('['), path.find(']')) {
        (Some(open), Some(close)) if open < close => format!("{}{}", &path[..open], &path[close + 1..]),
        _ => path.to_string(),
    }
}

/// Advice for a key that does not exist in the section at `path`, which has `keys` and those named in `beside`. The key that was
/// meant comes with it, when there is one.
pub(crate) fn unknown_key(
    path: &str,
    name: &str,
    keys: &[&'static [Key]],
    beside: &[&'static str],
) -> (Option<&'static str>, Option<String>) {
    if name == "<<" {
        return (None, Some("merge keys are not supported; write the keys out".to_string()));
    }
    if let Some(near) = nearest(
        name,
        names(keys, |status| status != Status::Removed && status != Status::Alias).chain(beside.iter().copied()),
    ) {
        return (Some(near), Some(format!("did you mean `{near}`?")));
    }
    let useful: Vec<&str> = beside.iter().copied().chain(names(keys, |status| status == Status::Now)).collect();
    let places = elsewhere(name);
    if places.contains(&schema::join(path, name)) {
        return (None, Some(format!("it belongs to another `type`; keys of this one are {}", list(&useful))));
    }
    if !places.is_empty() {
        let places: Vec<String> = places.iter().map(|place| format!("`{place}`")).collect();
        return (None, Some(format!("it belongs at {}", places.join(" or "))));
    }
    let help =
        (!path.is_empty() && (1..=16).contains(&useful.len())).then(|| format!("keys here are {}", list(&useful)));
    (None, help)
}

fn list(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

fn names(keys: &[&'static [Key]], status: impl Fn(Status) -> bool) -> impl Iterator<Item = &'static str> {
    keys.iter().flat_map(|keys| keys.iter()).filter(move |key| status(key.status)).map(|key| key.name)
}

/// Advice for a wrong value, beyond what is expected.
pub(crate) fn value(kind: &Kind, found: &Value) -> Option<String> {
    match (kind, found) {
        (Kind::Choice { names, .. }, Value::Text(text)) => {
            nearest(text, names.iter().copied()).map(|near| format!("did you mean `{near}`?"))
        }
        (Kind::Partition, Value::Text(text)) => PartitionMethod::parse(text).err().flatten(),
        (Kind::Bool, Value::Text(text)) => match text.to_ascii_lowercase().as_str() {
            "yes" | "on" | "y" => Some("write `true`".to_string()),
            "no" | "off" | "n" => Some("write `false`".to_string()),
            _ => None,
        },
        (Kind::Int { .. } | Kind::Multiple { .. } | Kind::Float(_), Value::Text(text)) => {
            let digits = text.replace(['_', ','], "");
            let number = matches!(crate::scalar::plain(&digits), Value::Int(_) | Value::Float(_));
            number.then(|| format!("write {digits}"))
        }
        (Kind::Multiple { of, .. }, Value::Int(number)) if *number > 0 => {
            let next = u64::try_from(*number).ok()?.checked_next_multiple_of(*of)?;
            leaf(kind, &Value::Int(next.into())).map(|_| format!("the next multiple is {next}"))
        }
        // `6G` is a thousand to some programs and 1024 to others.
        (Kind::Bytes { .. }, Value::Text(text)) => {
            let text = text.to_ascii_uppercase();
            bytes(&format!("{text}iB")).map(|_| format!("write `{text}iB` or `{text}B`"))
        }
        (Kind::Text | Kind::Path | Kind::Paths | Kind::Texts, Value::Bool(_) | Value::Int(_) | Value::Float(_)) => {
            Some("write it in quotes if it is a text".to_string())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_that_was_meant_is_found() {
        let keys = ["stage", "overlap_comm", "zero_optimization", "train_batch_size"];
        assert_eq!(nearest("stagee", keys.into_iter()), Some("stage"));
        assert_eq!(nearest("overlapcomm", keys.into_iter()), Some("overlap_comm"));
        assert_eq!(nearest("zero", keys.into_iter()), Some("zero_optimization"));
        assert_eq!(nearest("banana", keys.into_iter()), None);
        assert_eq!(nearest(&"stage".repeat(100), keys.into_iter()), None);
    }

    #[test]
    fn a_key_in_the_wrong_section_is_sent_to_the_right_one() {
        assert_eq!(elsewhere("n_embd"), ["model.n_embd"]);
        assert_eq!(elsewhere("lr"), ["optimizer.params.lr"]);
        assert!(elsewhere("enabled").is_empty() && elsewhere("banana").is_empty());
    }
}
