//! Products of two bf16 operands on processors with AMX, whose instructions multiply blocks of sixteen rows and columns
//! ("squares").
//!
//! `tdpbf16ps` adds 32 terms to each sum at a time. The result therefore differs from the chain of [`super`]. Of each
//! 32 terms, the even ones form one chain of fused multiply-adds from zero, and the odd ones another. The two results
//! are added, and their sum is added to the previous sum. As in products of pairs, numbers below 2⁻¹²⁶ count as zero. A
//! sum still depends only on its row, its column and its start, as long as the inner dimension is split only at
//! multiples of 32.

#[cfg(target_arch = "x86_64")]
use super::tile::COLUMNS;
use super::tile::Tile;

/// Rows and columns of a square.
pub(super) const SIDE: usize = 16;
/// Number of rows of a full tile. It has two by three squares, so that six sums are in flight at a time.
pub(super) const ROWS: usize = 2 * SIDE;
/// Number of words of a row that are multiplied at a time.
pub(super) const STEP: usize = 16;
/// Number of words of a packed square of the left operand.
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
/// Never called, since this architecture has no AMX.
#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn compute(_: Tile) {
    unreachable!("AMX is x86's");
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{COLUMNS, ROWS, SIDE, SQUARE, STEP, Tile};
    use crate::kernel::Isa;
    use std::arch::asm;

    /// The operand of `ldtilecfg`: eight registers of sixteen rows of 64 bytes.
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

    /// Sets up this thread's tile registers and runs `work`, which calls [`compute`]. Afterwards releases them, so
    /// that context switches need not save them.
    pub(in super::super) fn configured(work: impl FnOnce()) {
        struct Held;
        impl Drop for Held {
            fn drop(&mut self) {
                // SAFETY: no other code uses these registers.
                unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
            }
        }
        assert!(Isa::current().has_amx());
        // SAFETY: this path is chosen only if AMX is available, and the configuration is valid.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const SQUARES, options(readonly, nostack, preserves_flags)) };
        let _held = Held;
        work();
    }

    /// Computes a tile of at most [`ROWS`] rows whose operands were packed by [`super::squares`].
    ///
    /// # Safety
    /// The requirements of [`Tile::compute`] apply, but with at most [`ROWS`] rows, and the call must be inside
    /// [`configured`]. The left operand must be readable up to a multiple of [`SIDE`] rows, and the depth must be a
    /// multiple of [`STEP`].
    pub(in super::super) unsafe fn compute(t: Tile) {
        assert!(t.rows <= ROWS && t.columns <= COLUMNS && t.depth.is_multiple_of(STEP));
        if t.rows.is_multiple_of(SIDE) && t.columns == COLUMNS {
            // SAFETY: guaranteed by the caller; the tile is whole.
            return unsafe { whole(t) };
        }
        // Tiles at the edges are computed as whole tiles in a buffer.
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
        // SAFETY: guaranteed by the caller; the inner tile is in `sums`.
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
    /// The requirements of [`compute`] apply. The tile must also have `SIDE` or `2 * SIDE` rows, and [`COLUMNS`]
    /// columns.
    unsafe fn whole(t: Tile) {
        // SAFETY: guaranteed by the caller.
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
    /// The requirements of [`whole`] apply.
    unsafe fn start(t: Tile) {
        // SAFETY: guaranteed by the caller. A stride of zero reads the same row sixteen times.
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
    /// The requirements of [`whole`] apply.
    unsafe fn store(t: Tile) {
        // SAFETY: guaranteed by the caller.
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
    /// The requirements of [`whole`] apply, and the tile must have the rows of one square.
    unsafe fn one_row(t: Tile) {
        // SAFETY: guaranteed by the caller: both operands are read to the end of the last step and no further.
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
    /// The requirements of [`whole`] apply, and the tile must have the rows of two squares.
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

    /// Multiplies the contents of the tile registers. Returns the number of floating-point operations.
    pub(crate) fn squares_in_registers(rounds: usize) -> f64 {
        configured(|| {
            for _ in 0..rounds {
                // SAFETY: only registers are read and written.
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
