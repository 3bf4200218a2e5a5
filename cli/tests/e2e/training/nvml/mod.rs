//! A mock of NVIDIA's management library (NVML), compiled from C.

use std::path::Path;
use std::process::Command;

/// Builds the mock as `libnvidia-ml.so.1` in a folder. Without a C compiler, prints a message and returns `false`.
pub(crate) fn mock(folder: &Path) -> bool {
    let compiler = std::env::var("CC").unwrap_or("cc".into());
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/e2e/training/nvml/nvml.c");
    let file = folder.join("libnvidia-ml.so.1");
    match Command::new(&compiler).args(["-shared", "-fPIC", "-O1", "-o"]).arg(file).arg(source).output() {
        Err(error) => {
            println!("skipped: no C compiler for a mock of NVML: {compiler}: {error}");
            false
        }
        Ok(output) => {
            // If a compiler exists, the code must compile.
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            true
        }
    }
}
