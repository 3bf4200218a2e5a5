//! Texts of configurations, for the other tests: valid ones, and the only error of an invalid one.

use std::fmt::Debug;

use zero_config::{Config, Error, Errors, Source, Spot, load};

/// Returns the file `ds.yaml` with this text.
pub(crate) fn source(text: impl Into<String>) -> Source {
    Source { name: "ds.yaml".to_string(), text: text.into() }
}

/// Resolves a valid text.
#[track_caller]
pub(crate) fn valid(text: &str) -> Config {
    Config::parse("ds.yaml", text).unwrap_or_else(|errors| panic!("{text}\n{errors}"))
}

/// Does the same as [`valid`], and checks that the configuration is equal after it is written out and read again.
#[track_caller]
pub(crate) fn round_trip(text: &str) -> Config {
    let config = valid(text);
    assert_eq!(valid(&config.to_yaml()), config, "{text}");
    config
}

/// Resolves a text with overrides.
pub(crate) fn overridden(text: &str, sets: &[&str]) -> Result<Config, Errors> {
    let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
    load(source(text), &sets)?.resolve(None)
}

/// Returns the only error.
#[track_caller]
pub(crate) fn only_error<T: Debug>(parsed: Result<T, Errors>) -> Error {
    let errors = parsed.expect_err("the text must be rejected");
    assert_eq!(errors.count(), 1, "{errors}");
    errors.iter().next().expect("one error").clone()
}

/// Returns the paths of an error's keys.
pub(crate) fn paths(error: &Error) -> Vec<&str> {
    error.places.iter().map(|place| place.path.as_str()).collect()
}

/// Returns line and column of each location in the file.
pub(crate) fn spots(error: &Error) -> Vec<(usize, usize)> {
    let spot = |spot: &Spot| match spot {
        Spot::File { line, column, .. } => Some((*line, *column)),
        _ => None,
    };
    error.places.iter().filter_map(|place| spot(&place.spot)).collect()
}
