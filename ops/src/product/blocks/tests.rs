//! Tests of the sizes of blocks.

use super::super::room::{LEFT_LINES, RIGHT_LINES};
use super::*;
use crate::product::pack::left_panel;
use crate::product::terms::Wide;

/// With a larger block, a thread's buffers would exceed [`ROOM`], which memory plans include.
#[test]
fn blocks_fit_the_buffers() {
    let isa = Isa::current();
    for words in 1..=LONGEST {
        // For sums in f32, the right operand is packed one piece at a time, and the sums need no buffer.
        let Sizes { depth, width, height, .. } = Sizes::new::<Wide>(isa, words, To::F32(std::ptr::null_mut()), HEIGHT);
        let right = width.div_ceil(COLUMNS) * right_panel(depth);
        assert!(right <= 16 * RIGHT_LINES, "{words} words in f32: {right}");
        let left = height.div_ceil(Wide::rows(isa)) * left_panel(isa, depth);
        assert!(left <= 16 * LEFT_LINES, "{words} words in f32: {left}");
        let to = To::Bf16(std::ptr::null_mut());
        let Sizes { depth, width, height, .. } = Sizes::new::<Wide>(isa, words, to, HEIGHT);
        let pieces = (0..words).step_by(depth).map(|start| right_panel(depth.min(words - start)));
        let right = width.div_ceil(COLUMNS) * pieces.sum::<usize>();
        assert!(right <= 16 * RIGHT_LINES, "{words} words: {right}");
        let left = height.div_ceil(Wide::rows(isa)) * left_panel(isa, depth);
        assert!(left <= 16 * LEFT_LINES, "{words} words: {left}");
        assert!(height * width <= 16 * SUM_LINES, "{words} words");
    }
}
