//! Generates a trampoline for each symbol of NVIDIA's libraries, and a folder with stub libraries for the linker.
//!
//! The bindings link with `-lcuda`, `-lcublas` and so on, and use their symbols. The trampolines of
//! `src/trampolines.rs` define those symbols, so the libraries need not be installed. An empty linker script in place
//! of each library satisfies the linker on every machine, and the program does not depend on any of the libraries.

use std::fmt::Write;
use std::path::PathBuf;
use std::{env, fs};

/// The library names without `lib`; `symbols/` has a file for each. Indices match the discriminants of `Library` in
/// `src/libraries.rs`.
const LIBRARIES: [&str; 7] = ["cuda", "nccl", "cudart", "cublas", "cublasLt", "curand", "nvrtc"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=symbols");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo says where"));
    let folder = out.join("lib");
    fs::create_dir_all(&folder).expect("a folder of the build");
    let (mut trampolines, mut names) = (String::new(), String::new());
    let mut count = 0;
    for (library, name) in LIBRARIES.iter().enumerate() {
        fs::write(folder.join(format!("lib{name}.so")), "/* Its symbols are in the program: crate zero-cuda. */\n")
            .expect("a linker script");
        let list = fs::read_to_string(format!("symbols/{name}.txt")).expect("a list of symbols");
        for line in list.lines() {
            let (symbol, gives) = line.split_once(' ').unwrap_or((line, "status"));
            let gives = match gives {
                "status" => "Status",
                "text" => "Text",
                "number" => "Number",
                other => panic!("symbols/{name}.txt: `{symbol}` cannot give `{other}`"),
            };
            writeln!(trampolines, "trampoline!({symbol}, {count});").expect("a string grows");
            writeln!(names, "Symbol {{ library: {library}, name: c\"{symbol}\", gives: Gives::{gives} }},")
                .expect("a string grows");
            count += 1;
        }
    }
    fs::write(out.join("trampolines.rs"), trampolines).expect("a file of the build");
    let names = format!("const COUNT: usize = {count};\nstatic SYMBOLS: [Symbol; COUNT] = [\n{names}];\n");
    fs::write(out.join("symbols.rs"), names).expect("a file of the build");
    println!("cargo::rustc-link-search=native={}", folder.display());
}
