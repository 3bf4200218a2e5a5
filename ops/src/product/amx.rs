//! Products of two bf16 operands on processors with AMX, which multiply them in squares of sixteen rows and columns.
//!
//! `tdpbf16ps` takes 32 terms of each sum at a time. It is not the chain of [`super`]: of the 32, the even ones are one
//! chain of fused multiply-adds from zero and the odd ones another; the two are added, and their sum is added to what was
//! there. As with pairs, numbers below 2⁻¹²⁶ are zero. A sum still depends on its row, its column and what it starts from
//! alone, as long as what goes on from it does so after a multiple of 32 terms.

#[cfg(target_arch = "x86_64")]
use super::tile::COLUMNS;
use super::tile::Tile;

/// Rows of a square, and its columns.
pub(super) const SIDE: usize = 16;
/// Rows of a full tile: two squares by three, so that six sums are under way at a time.
pub(super) const ROWS: usize = 2 * SIDE;
/// Words of a row that are multiplied at a time.
pub(super) const STEP: usize = 16;
/// Words of a packed square of the left operand.
pub(super) const SQUARE: usize = SIDE * STEP;

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::squares_in_registers;
#[cfg(target_arch = "x86_64")]
pub(super) use x86::{compute, configured};

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn configured(work: impl FnOnce()) {
    work();
}

/// # Safety
/// Never called: there is no AMX on this architecture.
#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn compute(_: Tile) {
    unreachable!("AMX is x86's");
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{COLUMNS, ROWS, SIDE, SQUARE, STEP, Tile};
    use crate::kernel::Isa;
    use std::arch::asm;

    /// What `ldtilecfg` reads: eight registers of sixteen rows of 64 bytes.
    #[repr(C, align(64))]
    struct Configuration {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        bytes: [u16; 16],
        rows: [u8; 16],
    }

    static SQUARES: Configuration = {
        let (mut bytes, mut rows, mut i) = ([0; 16], [0; 16], 0);
        while i < 8 {
            (bytes[i], rows[i]) = (4 * SIDE as u16, SIDE as u8);
            i += 1;
        }
        Configuration { palette: 1, start_row: 0, reserved: [0; 14], bytes, rows }
    };

    /// Runs what calls [`compute`], with this thread's tile registers set up; after it they need not be saved at a switch of
    /// threads.
    pub(in super::super) fn configured(work: impl FnOnce()) {
        struct Held;
        impl Drop for Held {
            fn drop(&mut self) {
                // SAFETY: nothing else uses these registers.
                unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
            }
        }
        debug_assert!(Isa::current().has_amx());
        // SAFETY: squares are chosen where AMX is available; the description is one that the processor takes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const SQUARES, options(readonly, nostack, preserves_flags)) };
        let _held = Held;
        work();
    }

    /// Computes a tile of at most [`ROWS`] rows whose operands were packed by [`super::squares`].
    ///
    /// # Safety
    /// As [`Tile::compute`]; within [`configured`]; the left operand has rows up to a multiple of [`SIDE`] that can be
    /// read, and the depth is a multiple of [`STEP`].
    pub(in super::super) unsafe fn compute(t: Tile) {
        debug_assert!(t.rows <= ROWS && t.columns <= COLUMNS && t.depth.is_multiple_of(STEP));
        if t.rows.is_multiple_of(SIDE) && t.columns == COLUMNS {
            // SAFETY: the caller's promise; the tile is whole.
            return unsafe { whole(t) };
        }
        // At the edges by way of a whole tile.
        let mut sums = [0f32; ROWS * COLUMNS];
        let place = sums.as_mut_ptr();
        let inner = Tile {
            rows: t.rows.next_multiple_of(SIDE),
            columns: COLUMNS,
            start: if t.start.is_null() { t.start } else { place.cast_const() },
            start_rows: COLUMNS,
            out: place,
            out_rows: COLUMNS,
            ..t
        };
        // SAFETY: the caller's promise; the inner tile lies in `sums`.
        unsafe {
            for r in (0..t.rows).take_while(|_| !t.start.is_null()) {
                inner.out.add(r * COLUMNS).copy_from_nonoverlapping(t.start.add(r * t.start_rows), t.columns);
            }
            whole(inner);
            for r in 0..t.rows {
                t.out.add(r * t.out_rows).copy_from_nonoverlapping(inner.out.add(r * COLUMNS), t.columns);
            }
        }
    }

    /// # Safety
    /// As [`compute`], and the tile has one or two squares' rows and all columns.
    unsafe fn whole(t: Tile) {
        // SAFETY: the caller's promise.
        unsafe {
            start(t);
            if t.rows == SIDE {
                one_row(t)
            } else {
                two_rows(t)
            }
            store(t);
        }
    }

    /// # Safety
    /// As [`whole`].
    unsafe fn start(t: Tile) {
        // SAFETY: the caller's promise. A stride of zero reads the same row sixteen times.
        unsafe {
            if t.start.is_null() {
                asm!(
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    "tilezero tmm4",
                    "tilezero tmm5",
                    options(nomem, nostack, preserves_flags)
                );
                return;
            }
            let stride = t.start_rows * size_of::<f32>();
            asm!(
                "tileloadd tmm0, [{at} + {stride}]",
                "tileloadd tmm1, [{at} + {stride} + 64]",
                "tileloadd tmm2, [{at} + {stride} + 128]",
                at = in(reg) t.start, stride = in(reg) stride,
                options(readonly, nostack, preserves_flags)
            );
            if t.rows > SIDE {
                asm!(
                    "tileloadd tmm3, [{at} + {stride}]",
                    "tileloadd tmm4, [{at} + {stride} + 64]",
                    "tileloadd tmm5, [{at} + {stride} + 128]",
                    at = in(reg) t.start.add(SIDE * t.start_rows), stride = in(reg) stride,
                    options(readonly, nostack, preserves_flags)
                );
            }
        }
    }

    /// # Safety
    /// As [`whole`].
    unsafe fn store(t: Tile) {
        // SAFETY: the caller's promise.
        unsafe {
            let stride = t.out_rows * size_of::<f32>();
            asm!(
                "tilestored [{at} + {stride}], tmm0",
                "tilestored [{at} + {stride} + 64], tmm1",
                "tilestored [{at} + {stride} + 128], tmm2",
                at = in(reg) t.out, stride = in(reg) stride,
                options(nostack, preserves_flags)
            );
            if t.rows > SIDE {
                asm!(
                    "tilestored [{at} + {stride}], tmm3",
                    "tilestored [{at} + {stride} + 64], tmm4",
                    "tilestored [{at} + {stride} + 128], tmm5",
                    at = in(reg) t.out.add(SIDE * t.out_rows), stride = in(reg) stride,
                    options(nostack, preserves_flags)
                );
            }
        }
    }

    /// # Safety
    /// As [`whole`], of one square's rows.
    unsafe fn one_row(t: Tile) {
        // SAFETY: the caller's promise: both operands are read to the end of the last step, and no further.
        unsafe {
            asm!(
                "test {steps}, {steps}",
                "jz 3f",
                "2:",
                "tileloadd tmm7, [{left} + {left_stride}]",
                "tileloadd tmm6, [{right} + {right_stride}]",
                "tdpbf16ps tmm0, tmm7, tmm6",
                "tileloadd tmm6, [{right} + {right_stride} + 64]",
                "tdpbf16ps tmm1, tmm7, tmm6",
                "tileloadd tmm6, [{right} + {right_stride} + 128]",
                "tdpbf16ps tmm2, tmm7, tmm6",
                "add {left}, {left_step}",
                "add {right}, {right_step}",
                "dec {steps}",
                "jnz 2b",
                "3:",
                steps = inout(reg) t.depth / STEP => _,
                left = inout(reg) t.left => _,
                right = inout(reg) t.right => _,
                left_stride = in(reg) STEP * size_of::<f32>(),
                right_stride = in(reg) COLUMNS * size_of::<f32>(),
                left_step = const SQUARE * size_of::<f32>(),
                right_step = const STEP * COLUMNS * size_of::<f32>(),
                options(readonly, nostack)
            );
        }
    }

    /// # Safety
    /// As [`whole`], of two squares' rows.
    unsafe fn two_rows(t: Tile) {
        // SAFETY: as in `one_row`.
        unsafe {
            asm!(
                "test {steps}, {steps}",
                "jz 3f",
                "2:",
                "tileloadd tmm6, [{right} + {right_stride}]",
                "tileloadd tmm7, [{left} + {left_stride}]",
                "tdpbf16ps tmm0, tmm7, tmm6",
                "tileloadd tmm7, [{lower} + {left_stride}]",
                "tdpbf16ps tmm3, tmm7, tmm6",
                "tileloadd tmm6, [{right} + {right_stride} + 64]",
                "tdpbf16ps tmm4, tmm7, tmm6",
                "tileloadd tmm7, [{left} + {left_stride}]",
                "tdpbf16ps tmm1, tmm7, tmm6",
                "tileloadd tmm6, [{right} + {right_stride} + 128]",
                "tdpbf16ps tmm2, tmm7, tmm6",
                "tileloadd tmm7, [{lower} + {left_stride}]",
                "tdpbf16ps tmm5, tmm7, tmm6",
                "add {left}, {left_step}",
                "add {lower}, {left_step}",
                "add {right}, {right_step}",
                "dec {steps}",
                "jnz 2b",
                "3:",
                steps = inout(reg) t.depth / STEP => _,
                left = inout(reg) t.left => _,
                lower = inout(reg) t.left.add(SIDE * t.depth) => _,
                right = inout(reg) t.right => _,
                left_stride = in(reg) STEP * size_of::<f32>(),
                right_stride = in(reg) COLUMNS * size_of::<f32>(),
                left_step = const SQUARE * size_of::<f32>(),
                right_step = const STEP * COLUMNS * size_of::<f32>(),
                options(readonly, nostack)
            );
        }
    }

    /// Multiplies what the tile registers hold; returns how many floating-point operations that was.
    pub(crate) fn squares_in_registers(rounds: usize) -> f64 {
        configured(|| {
            for _ in 0..rounds {
                // SAFETY: registers alone are read and written.
                unsafe {
                    asm!(
                        "tdpbf16ps tmm0, tmm7, tmm6",
                        "tdpbf16ps tmm1, tmm7, tmm6",
                        "tdpbf16ps tmm2, tmm7, tmm6",
                        "tdpbf16ps tmm3, tmm7, tmm6",
                        "tdpbf16ps tmm4, tmm7, tmm6",
                        "tdpbf16ps tmm5, tmm7, tmm6",
                        options(nomem, nostack, preserves_flags)
                    );
                }
            }
        });
        2.0 * (rounds * 6 * SIDE * SIDE * 2 * STEP) as f64
    }
}
