//! Prints output and warnings of commands.

use std::io::Write;

use zero_config::Config;

/// Prints `text` to standard output. Ignores errors, because a reader such as `head` may have closed the
/// pipe, or the disk of a log file may be full.
pub(crate) fn show(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// Prints a line to standard output.
pub(crate) fn show_line(line: &str) {
    show(&format!("{line}\n"));
}

/// Prints a line to standard error. Ignores errors, so that the exit status stays right after the disk of a log file has
/// filled up.
pub(crate) fn tell(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Prints the warnings of the configuration to standard error.
pub(crate) fn warn(config: &Config) {
    for warning in &config.warnings {
        tell(&warning.to_string());
    }
}
