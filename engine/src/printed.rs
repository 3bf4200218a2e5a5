//! Prints text. Errors are ignored, so that training continues, and the exit status stays right, after the reader of a
//! pipe, such as `head`, has exited or the disk of a log file has filled up. `println!` and `eprintln!` panic then.

use std::io::Write;

/// Returns whether the terminal prints the sequences that redraw a line as text (`TERM=dumb`).
#[must_use]
pub fn is_dumb_terminal() -> bool {
    std::env::var_os("TERM").is_some_and(|name| name == "dumb")
}

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
