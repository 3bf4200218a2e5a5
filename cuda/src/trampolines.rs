//! Defines the symbols of NVIDIA's libraries as functions that jump to the libraries' functions.
//!
//! The bindings that candle uses link with these libraries, and a program that is linked with a library does not start
//! on a machine without it. This module therefore defines each symbol itself, as a function that jumps to an address in
//! a table. The table is empty at first. If the entry of a function is empty, its symbol jumps to `resolve`, which
//! saves all argument registers, finds the function in its library, and stores its address in the table. For a missing
//! function, it stores a function that returns an error code of the library.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::libraries::Library;

/// One function of a library.
struct Symbol {
    /// Index in [`Library::ALL`].
    library: usize,
    name: &'static CStr,
    gives: Gives,
}

/// The return value of a function.
enum Gives {
    /// A status code of its library, or nothing.
    Status,
    /// A pointer to text.
    Text,
    /// A number that is not a status, such as a version.
    Number,
}

include!(concat!(env!("OUT_DIR"), "/symbols.rs"));

/// Addresses of the functions that have been called.
static TABLE: [AtomicPtr<c_void>; COUNT] = [const { AtomicPtr::new(std::ptr::null_mut()) }; COUNT];

/// Looks up a function and stores its address in the table.
extern "C" fn find(index: usize) -> *const c_void {
    let symbol = &SYMBOLS[index];
    let library = Library::ALL[symbol.library];
    let found = library.symbol(symbol.name).unwrap_or_else(|| match symbol.gives {
        Gives::Status => absent(library),
        Gives::Text => text as *const c_void,
        Gives::Number => zero as *const c_void,
    });
    TABLE[index].store(found.cast_mut(), Ordering::Release);
    found
}

fn absent(library: Library) -> *const c_void {
    macro_rules! absent {
        ($($library:ident),+) => {
            match library {
                $(Library::$library => {
                    extern "C" fn code() -> i32 {
                        Library::$library.absent()
                    }
                    code as *const c_void
                })+
            }
        };
    }
    absent!(Cuda, Nccl, Cudart, Cublas, CublasLt, Curand, Nvrtc)
}

extern "C" fn text() -> *const c_char {
    c"the library is not installed, or lacks this function".as_ptr()
}

extern "C" fn zero() -> usize {
    0
}

/// Looks up the function whose index is in r11, and jumps to it with all argument registers restored.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
extern "C" fn resolve() {
    // At a function's entry the stack is 8 bytes off a multiple of 16; `rbp`, seven registers and 136 bytes align it.
    std::arch::naked_asm!(
        "push rbp", "mov rbp, rsp",
        "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
        "sub rsp, 136",
        "movups [rsp], xmm0", "movups [rsp + 16], xmm1", "movups [rsp + 32], xmm2", "movups [rsp + 48], xmm3",
        "movups [rsp + 64], xmm4", "movups [rsp + 80], xmm5", "movups [rsp + 96], xmm6", "movups [rsp + 112], xmm7",
        "mov rdi, r11",
        "call {find}",
        "mov r11, rax",
        "movups xmm0, [rsp]", "movups xmm1, [rsp + 16]", "movups xmm2, [rsp + 32]", "movups xmm3, [rsp + 48]",
        "movups xmm4, [rsp + 64]", "movups xmm5, [rsp + 80]", "movups xmm6, [rsp + 96]", "movups xmm7, [rsp + 112]",
        "add rsp, 136",
        "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
        "pop rbp",
        "jmp r11",
        find = sym find,
    )
}

/// Looks up the function whose index is in x16, and jumps to it with all argument registers restored.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
extern "C" fn resolve() {
    std::arch::naked_asm!(
        "stp x29, x30, [sp, #-224]!",
        "mov x29, sp",
        "stp x0, x1, [sp, #16]", "stp x2, x3, [sp, #32]", "stp x4, x5, [sp, #48]", "stp x6, x7, [sp, #64]",
        // x8 holds the address for a large result.
        "str x8, [sp, #80]",
        "stp q0, q1, [sp, #96]", "stp q2, q3, [sp, #128]", "stp q4, q5, [sp, #160]", "stp q6, q7, [sp, #192]",
        "mov x0, x16",
        "bl {find}",
        "mov x16, x0",
        "ldp q0, q1, [sp, #96]", "ldp q2, q3, [sp, #128]", "ldp q4, q5, [sp, #160]", "ldp q6, q7, [sp, #192]",
        "ldr x8, [sp, #80]",
        "ldp x0, x1, [sp, #16]", "ldp x2, x3, [sp, #32]", "ldp x4, x5, [sp, #48]", "ldp x6, x7, [sp, #64]",
        "ldp x29, x30, [sp], #224",
        "br x16",
        find = sym find,
    )
}

/// Defines a function with the name of a library's function and its index in the table.
#[cfg(target_arch = "x86_64")]
macro_rules! trampoline {
    ($name:ident, $index:literal) => {
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        extern "C" fn $name() {
            std::arch::naked_asm!(
                "mov r11, [rip + {table} + {offset}]",
                "test r11, r11",
                "jz 2f",
                "jmp r11",
                "2:",
                "mov r11d, {index}",
                "jmp {resolve}",
                table = sym TABLE,
                offset = const $index * size_of::<usize>(),
                index = const $index,
                resolve = sym resolve,
            )
        }
    };
}

// The table is read with `ldar`, which pairs with the release store in `find`. After a plain load, the processor could
// execute loads of the called function before the load of its address. These loads could miss data that was written by
// the thread that opened the library. x86-64 never reorders loads.
//
// `adrp` reaches the table by its page, and `b` must reach `resolve` directly: a linker veneer would clobber x16. The
// branch reaches 128 MB, so programs may have up to 128 MB of code.
#[cfg(target_arch = "aarch64")]
macro_rules! trampoline {
    ($name:ident, $index:literal) => {
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        extern "C" fn $name() {
            std::arch::naked_asm!(
                "adrp x16, {table} + {offset}",
                "add x16, x16, #:lo12:{table} + {offset}",
                "ldar x16, [x16]",
                "cbz x16, 2f",
                "br x16",
                "2:",
                "mov w16, #{index}",
                "b {resolve}",
                table = sym TABLE,
                offset = const $index * size_of::<usize>(),
                index = const $index,
                resolve = sym resolve,
            )
        }
    };
}

#[allow(non_snake_case)]
mod functions {
    use super::{TABLE, resolve};

    include!(concat!(env!("OUT_DIR"), "/trampolines.rs"));
}
