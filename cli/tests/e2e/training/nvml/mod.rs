//! A library that stands for NVIDIA's management library, compiled from C for a test.

use std::path::Path;
use std::process::Command;

/// Makes `libnvidia-ml.so.1` in a folder; without a C compiler it says so, and there is none.
#[allow(unreachable_pub)]
pub fn mock(folder: &Path) -> bool {
    let compiler = std::env::var("CC").unwrap_or("cc".into());
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/e2e/training/nvml/nvml.c");
    let file = folder.join("libnvidia-ml.so.1");
    match Command::new(&compiler).args(["-shared", "-fPIC", "-O1", "-o"]).arg(file).arg(source).output() {
        Err(error) => {
            println!("skipped: no C compiler for a mock of NVML: {compiler}: {error}");
            false
        }
        Ok(output) => {
            // A compiler that is there must like it.
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            true
        }
    }
}
