//! Child processes for tests that change process limits or are killed: the test runs itself again in a child.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Environment variable that names the child's folder.
const FOLDER: &str = "ZERO_TIER_TEST_FOLDER";

/// Returns the folder when called in a child.
pub(crate) fn given() -> Option<PathBuf> {
    std::env::var_os(FOLDER).map(PathBuf::from)
}

/// Returns a command that runs only this test in another process.
pub(crate) fn again(test: &str, folder: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", test, "--nocapture"]).env(FOLDER, folder);
    command
}

/// Runs `body` in a process with a disk of its own: a tmpfs of one megabyte in a mount namespace. Skips the test with a
/// message where the system does not permit that.
pub(crate) fn with_own_disk(test: &str, body: impl FnOnce(&Path, &dyn Fn())) {
    if let Some(disk) = given() {
        return body(&disk, &|| assert!(mount(&["-o".as_ref(), "remount,ro".as_ref(), disk.as_os_str()])));
    }
    let folder = tempfile::tempdir().expect("a folder");
    let child = again(test, folder.path());
    let unshare = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["-Urm", "sh", "-ec", script, "sh"]).arg(folder.path()).env(FOLDER, folder.path());
        command.arg(child.get_program()).args(child.get_args());
        command.output()
    };
    let mounted = "mount -t tmpfs -o size=1m none \"$1\"";
    if !unshare(mounted).is_ok_and(|output| output.status.success()) {
        println!("not tested: `unshare -Urm` with a tmpfs is not permitted here");
        return;
    }
    let output = unshare(&format!("{mounted}; shift; exec \"$@\"")).expect("unshare worked before");
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

fn mount(args: &[&OsStr]) -> bool {
    Command::new("mount").args(args).status().is_ok_and(|status| status.success())
}
