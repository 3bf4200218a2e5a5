//! Runs Python scripts for tests, with the interpreter that `ZERO_TRAIN_PYTHON` names or `python3`. Tests are skipped
//! if packages are missing.
#![allow(dead_code, unreachable_pub)] // each test file uses a part

use std::process::Command;

/// Returns a script's standard output. Prints why and returns `None` if the interpreter or a package is missing.
pub fn python(packages: &[&str], script: &str) -> Option<String> {
    let program = std::env::var_os("ZERO_TRAIN_PYTHON").unwrap_or_else(|| "python3".into());
    let run = |script: &str| Command::new(&program).args(["-W", "ignore", "-c", script]).output();
    match run(&format!("import {}", packages.join(", "))) {
        Err(error) => {
            println!("skipped: {} does not start: {error}", program.to_string_lossy());
            return None;
        }
        Ok(output) if !output.status.success() => {
            println!(
                "skipped: {} has not all of {packages:?}; ZERO_TRAIN_PYTHON names another",
                program.to_string_lossy()
            );
            return None;
        }
        Ok(_) => {}
    }
    let output = run(script).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}
