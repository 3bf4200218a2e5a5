//! Suggests corrections for mistyped keys and values.

use std::collections::HashMap;
use std::sync::LazyLock;

use crate::bytes::bytes;
use crate::config::{Config, Mup, PartitionMethod};
use crate::nearest::nearest;
use crate::read::node::Value;
use crate::schema::{self, Key, Kind, Status};
use crate::value::leaf;

/// Maximum number of suggested sections. A longer list does not help: nearly every section has an `enabled`, for
/// example.
const MAX_SUGGESTIONS: usize = 3;

/// Returns the paths of the keys with that name, if there are only a few. If several keys have the name, returns only
/// the paths of implemented keys.
pub(crate) fn elsewhere(name: &str) -> &'static [String] {
    /// For one name: the paths of all keys, and the paths of implemented keys.
    type Places = (Vec<String>, Vec<String>);
    static PLACES: LazyLock<HashMap<&'static str, Places>> = LazyLock::new(|| {
        let mut places = HashMap::<_, Places>::new();
        schema::walk("", Config::SECTION.keys, &mut |path, key: &'static Key| {
            // `mup.base` repeats keys of `model`; suggest only the keys of `model`.
            if path.strip_prefix(Mup::base).is_some_and(|rest| rest.starts_with('.')) {
                return;
            }
            // Paths in a file do not contain the name of the variant.
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
        Some((_, today)) if today.len() <= MAX_SUGGESTIONS => today,
        _ => &[],
    }
}

/// Removes the brackets from a path such as `optimizer.params[AdamW].lr`.
fn plain(path: &str) -> String {
    match (path.find('['), path.find(']')) {
        (Some(open), Some(close)) if open < close => format!("{}{}", &path[..open], &path[close + 1..]),
        _ => path.to_string(),
    }
}

/// Returns advice for a key that does not exist in the section at `path`. The section's keys are `keys` and the names
/// in `beside`. Also returns the key that was probably meant, if there is one.
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
        return (None, Some(format!("it belongs to another `type`; the keys of this type are {}", list(&useful))));
    }
    if !places.is_empty() {
        let places: Vec<String> = places.iter().map(|place| format!("`{place}`")).collect();
        return (None, Some(format!("it belongs at {}", places.join(" or "))));
    }
    let help = (!path.is_empty() && (1..=16).contains(&useful.len()))
        .then(|| format!("the keys of this section are {}", list(&useful)));
    (None, help)
}

fn list(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

fn names(keys: &[&'static [Key]], status: impl Fn(Status) -> bool) -> impl Iterator<Item = &'static str> {
    keys.iter().flat_map(|keys| keys.iter()).filter(move |key| status(key.status)).map(|key| key.name)
}

/// Returns advice for an invalid value, in addition to the expected type.
pub(crate) fn value(kind: &Kind, found: &Value) -> Option<String> {
    match (kind, found) {
        (Kind::Choice { names, .. }, Value::Text(text)) => {
            nearest(text, names.iter().copied()).map(|near| format!("did you mean `{near}`?"))
        }
        (Kind::Partition, Value::Text(text)) => PartitionMethod::parse(text).err().flatten(),
        (Kind::Bool, Value::Text(text)) => match text.to_ascii_lowercase().as_str() {
            "yes" | "on" | "y" => Some("use `true`".to_string()),
            "no" | "off" | "n" => Some("use `false`".to_string()),
            _ => None,
        },
        (Kind::Int { .. } | Kind::Multiple { .. } | Kind::Float(_), Value::Text(text)) => {
            let digits = text.replace(['_', ','], "");
            let number = matches!(crate::read::scalar::plain(&digits), Value::Int(_) | Value::Float(_));
            number.then(|| format!("use {digits}"))
        }
        (Kind::Multiple { of, .. }, Value::Int(number)) if *number > 0 => {
            let next = u64::try_from(*number).ok()?.checked_next_multiple_of(*of)?;
            leaf(kind, &Value::Int(next.into())).map(|_| format!("the next multiple is {next}"))
        }
        // `6G` is ambiguous: programs read `G` as 10^9 or as 2^30.
        (Kind::Bytes { .. }, Value::Text(text)) => {
            let text = text.to_ascii_uppercase();
            bytes(&format!("{text}iB")).map(|_| format!("use `{text}iB` or `{text}B`"))
        }
        (
            Kind::Text | Kind::Path | Kind::Paths | Kind::Names | Kind::Texts,
            Value::Bool(_) | Value::Int(_) | Value::Float(_),
        ) => Some("put it in quotes if it is a string".to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_in_the_wrong_section_suggests_the_right_one() {
        assert_eq!(elsewhere("n_embd"), ["model.n_embd"]);
        assert_eq!(elsewhere("lr"), ["optimizer.params.lr"]);
        assert!(elsewhere("enabled").is_empty() && elsewhere("banana").is_empty());
    }
}
