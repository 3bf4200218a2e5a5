//! Prints lines. Errors are ignored, so that training continues after the reader of a pipe, such as `head`, has exited,
//! or after the disk of a log file has filled up. `println!` and `eprintln!` panic in these cases.

use std::io::Write;

/// Prints a line to standard output.
pub(crate) fn show(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Prints a line to standard error.
pub(crate) fn tell(line: &str) {
    tell_text(&format!("{line}\n"));
}

/// Prints text to standard error.
pub(crate) fn tell_text(text: &str) {
    let _ = std::io::stderr().write_all(text.as_bytes());
}
