use super::*;
use crate::product::pack::left_panel;
use crate::product::terms::Wide;

/// A larger block would grow a thread's buffers beyond [`ROOM`], which plans of memory count.
#[test]
fn blocks_with_rounding_fit_the_buffers() {
    let isa = Isa::current();
    for words in 1..=LONGEST {
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
