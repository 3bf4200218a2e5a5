//! A progress bar on one line of standard error.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use zero_engine::printed::tell_text;

/// Minimum time between two redraws.
const PAUSE: Duration = Duration::from_millis(100);
/// Maximum width of the bar in characters. In a narrow terminal, the bar is shorter, so that the text beside it fits.
const WIDTH: usize = 30;
/// Minimum width of the bar. If less space is left, only the text is shown.
const LEAST: usize = 5;
/// Moves the cursor to the start of the line and clears the line.
const CLEAR: &str = "\r\x1b[2K";
/// The first sequence makes the terminal truncate long lines, and the second makes it wrap them again.
const CUT: [&str; 2] = ["\x1b[?7l", "\x1b[?7h"];

/// A progress bar that can be redrawn after each step.
#[derive(Default)]
pub(crate) struct Bar {
    drawn: Cell<Option<Instant>>,
    shown: RefCell<String>,
    is_finished: Cell<bool>,
}

impl Bar {
    /// Shows that `step` of `steps` steps are complete, with `message` beside the bar.
    pub(crate) fn set(&self, step: u64, steps: u64, message: &str) {
        *self.shown.borrow_mut() = text(step, steps, message, columns());
        if self.drawn.get().is_none_or(|drawn| drawn.elapsed() >= PAUSE) {
            self.drawn.set(Some(Instant::now()));
            self.draw();
        }
    }

    /// Hides the bar while `print` writes to the terminal.
    pub(crate) fn suspend(&self, print: &dyn Fn()) {
        if self.is_finished.get() {
            return print();
        }
        tell_text(CLEAR);
        print();
        self.draw();
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        self.is_finished.set(true);
        tell_text(CLEAR);
    }

    fn draw(&self) {
        tell_text(&format!("{CLEAR}{}{}{}", CUT[0], self.shown.borrow(), CUT[1]));
    }
}

fn text(step: u64, steps: u64, message: &str, columns: usize) -> String {
    let text = format!("{step}/{steps}  {message}");
    // A space separates the bar from the text, and the last column stays free.
    let width = WIDTH.min(columns.saturating_sub(text.chars().count() + 2));
    if width < LEAST {
        return text;
    }
    let full = (width as u64 * step.min(steps) / steps.max(1)) as usize;
    format!("{}{} {text}", "█".repeat(full), "░".repeat(width - full))
}

/// Returns the width of the terminal, or a large number if the terminal does not report it.
fn columns() -> usize {
    let size = rustix::termios::tcgetwinsize(std::io::stderr());
    size.ok().map(|size| usize::from(size.ws_col)).filter(|&columns| columns > 0).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_progress_bar_fills() {
        let shown = |step| text(step, 60, "loss 1.0  eta 1m 15s", 80);
        assert_eq!(shown(30), format!("{}{} 30/60  loss 1.0  eta 1m 15s", "█".repeat(15), "░".repeat(15)));
        assert!(shown(60).starts_with(&"█".repeat(30)) && shown(61).starts_with(&"█".repeat(30)));
        assert!(text(0, 0, "", usize::MAX).starts_with('░'));
        // The bar shrinks, and disappears, so that the text fits.
        for (columns, width) in [(46, 17), (34, 5), (33, 0), (1, 0)] {
            let shown = text(30, 60, "loss 1.0  eta 1m 15s", columns);
            assert_eq!(shown.chars().filter(|c| "█░".contains(*c)).count(), width, "{columns}: {shown}");
            assert!(shown.ends_with("30/60  loss 1.0  eta 1m 15s"), "{shown}");
        }
    }
}
