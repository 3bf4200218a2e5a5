//! What commands print.

use std::io::Write;

use zero_config::Config;

/// Prints; whoever reads may have gone, as `head` does.
pub(crate) fn show(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// Prints what the configuration warns of.
pub(crate) fn warn(config: &Config) {
    for warning in &config.warnings {
        eprintln!("{warning}");
    }
}
