//! Loads a `ds.yaml` with overrides, separated by zero bytes. The result is either a configuration that round-trips
//! through YAML, or errors.
#![no_main]

use libfuzzer_sys::fuzz_target;
use zero_config::{Config, Source, load};

fuzz_target!(|data: &[u8]| {
    let mut parts = data.split(|byte| *byte == 0);
    let text = parts.next().unwrap_or_default();
    let overrides: Vec<String> = parts.map(|part| String::from_utf8_lossy(part).into_owned()).collect();
    let loaded = Source::from_bytes("fuzz", text.to_vec()).and_then(|source| load(source, &overrides));
    match loaded.and_then(|typed| typed.resolve(None)) {
        Ok(config) => {
            assert!(config.warnings.iter().all(|warning| !warning.to_string().is_empty()));
            let again =
                Config::parse("fuzz", config.to_yaml_with_origins()).unwrap_or_else(|errors| panic!("{errors}"));
            assert_eq!(again, config);
        }
        Err(errors) => assert!(errors.count() > 0 && errors.to_string().starts_with("error: ")),
    }
});
