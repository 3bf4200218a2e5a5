//! What the tests ask Python: the one that `ZERO_TRAIN_PYTHON` names, or `python3`. A test is skipped where packages are missing.
#![allow(dead_code, unreachable_pub)] // each test file uses a part

use std::process::Command;

/// What a Python script prints, or nothing where a package is missing, which is said.
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
