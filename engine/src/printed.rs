//! Prints text. Errors are ignored, so that training continues, and the exit status stays right, after the reader of a
//! pipe, such as `head`, has exited or the disk of a log file has filled up. `println!` and `eprintln!` panic then.

use std::io::Write;

/// Prints text to standard output.
pub fn show(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// Prints a line to standard output.
pub fn show_line(line: &str) {
    show(&format!("{line}\n"));
}

/// Prints text to standard error.
pub fn tell_text(text: &str) {
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// Prints a line to standard error.
pub fn tell(line: &str) {
    tell_text(&format!("{line}\n"));
}
