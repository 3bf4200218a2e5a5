//! Tests the report page in a real browser: in light and dark themes, on a phone and in print, with usual results and
//! with results that contain hostile strings.

#[allow(dead_code)] // its own tests use the rest
#[path = "../../src/autotune/report/mod.rs"]
mod report;

use std::path::Path;
use std::process::{Command, Output};

/// Runs `tests/report/NAME` with node; prints a message and returns `None` without node.
fn node(name: &str, folder: &Path) -> Option<Output> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/report").join(name);
    let output = Command::new("node").arg(script).arg(folder).output();
    output.inspect_err(|error| println!("skipped: node does not start: {error}")).ok()
}

#[test]
fn the_report_page_shows_the_results() {
    // The folder is kept after the test, so that its pages and pictures can be inspected.
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("report");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let Some(output) = node("samples.mjs", &folder) else { return };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut pages = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let results = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        std::fs::write(path.with_extension("html"), report::page(&results)).unwrap();
        pages += 1;
    }
    assert_eq!(pages, 7);
    let Some(output) = node("check.mjs", &folder) else { return };
    let said = String::from_utf8_lossy(&output.stdout);
    print!("{said}");
    // The script exits with 77 if no browser starts.
    let is_right = output.status.success() || output.status.code() == Some(77);
    assert!(is_right, "{said}{}", String::from_utf8_lossy(&output.stderr));
}
