//! Draws the progress bar of training on a terminal.

use indicatif::{ProgressBar, ProgressStyle};
use zero_train::train::Bar;

struct Drawn(ProgressBar);

/// Draws a bar of `steps` steps that starts at step `from`.
pub(crate) fn draw(from: u64, steps: u64) -> Box<dyn Bar> {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}  eta {eta}");
    let bar = ProgressBar::new(steps).with_position(from);
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.reset_eta();
    Box::new(Drawn(bar))
}

impl Bar for Drawn {
    fn set(&self, step: u64, message: String) {
        self.0.set_position(step);
        self.0.set_message(message);
    }

    fn suspend(&self, print: &dyn Fn()) {
        self.0.suspend(print);
    }

    fn is_finished(&self) -> bool {
        self.0.is_finished()
    }

    fn finish(&self) {
        self.0.finish_and_clear();
    }
}
