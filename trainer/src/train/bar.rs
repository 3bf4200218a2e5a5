//! A progress bar on one line of standard error, for programs that do not draw their own.

use std::cell::{Cell, RefCell};
use std::io::Write;
use std::time::{Duration, Instant};

use super::progress::{Bar, seconds};

/// Minimum time between two redraws.
const PAUSE: Duration = Duration::from_millis(100);
/// Width of the bar in characters.
const WIDTH: u64 = 30;
/// Moves the cursor to the start of the line and clears the line.
const CLEAR: &str = "\r\x1b[2K";

struct Line {
    from: u64,
    steps: u64,
    started: Instant,
    drawn: Cell<Option<Instant>>,
    shown: RefCell<String>,
    is_finished: Cell<bool>,
}

/// Draws a bar over `steps` steps, starting at step `from`.
pub(crate) fn draw(from: u64, steps: u64) -> Box<dyn Bar> {
    let (started, drawn, shown) = (Instant::now(), Cell::new(None), RefCell::default());
    Box::new(Line { from, steps, started, drawn, shown, is_finished: Cell::new(false) })
}

impl Bar for Line {
    fn set(&self, step: u64, message: String) {
        let done = step.saturating_sub(self.from).max(1);
        let left = self.started.elapsed().mul_f64(self.steps.saturating_sub(step) as f64 / done as f64);
        *self.shown.borrow_mut() = text(step, self.steps, &message, left);
        if self.drawn.get().is_none_or(|drawn| drawn.elapsed() >= PAUSE) {
            self.drawn.set(Some(Instant::now()));
            write(&format!("{CLEAR}{}", self.shown.borrow()));
        }
    }

    fn suspend(&self, print: &dyn Fn()) {
        write(CLEAR);
        print();
        if !self.is_finished.get() {
            write(&self.shown.borrow());
        }
    }

    fn is_finished(&self) -> bool {
        self.is_finished.get()
    }

    fn finish(&self) {
        self.is_finished.set(true);
        write(CLEAR);
    }
}

fn text(step: u64, steps: u64, message: &str, left: Duration) -> String {
    let full = (WIDTH * step.min(steps) / steps.max(1)) as usize;
    let bar = "█".repeat(full) + &"░".repeat(WIDTH as usize - full);
    format!("{bar} {step}/{steps}  {message}  eta {}", seconds(left))
}

/// Writes to standard error. Errors are ignored, because a closed terminal must not end the run.
fn write(text: &str) {
    let mut errors = std::io::stderr().lock();
    let _ = errors.write_all(text.as_bytes()).and_then(|()| errors.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_fills() {
        let shown = |step| text(step, 60, "loss 1.0", Duration::from_secs(75));
        assert_eq!(shown(30), format!("{}{} 30/60  loss 1.0  eta 1m 15s", "█".repeat(15), "░".repeat(15)));
        assert!(shown(60).starts_with(&"█".repeat(30)) && shown(61).starts_with(&"█".repeat(30)));
        assert!(text(0, 0, "", Duration::ZERO).starts_with('░'));
    }
}
