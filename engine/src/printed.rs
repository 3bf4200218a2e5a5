//! Prints text and ignores errors, whereas `println!` and `eprintln!` would panic. If the reader of a pipe, such as
//! `head`, has exited, or the disk of a log file is full, training continues and the exit status stays correct.

use std::io::Write;

/// Returns whether the terminal does not understand escape sequences that redraw a line (`TERM=dumb`).
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
