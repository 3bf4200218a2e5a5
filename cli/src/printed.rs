//! Prints output and warnings of commands.

use std::io::Write;

use zero_config::Config;

/// Prints `text` to standard output. Ignores errors, because a reader such as `head` may have closed the pipe.
pub(crate) fn show(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// Prints the warnings of the configuration to standard error.
pub(crate) fn warn(config: &Config) {
    for warning in &config.warnings {
        eprintln!("{warning}");
    }
}
