//! Data that is damaged between two hosts, although TCP's checksum is valid: all ranks name the sender, the operation and
//! its number, and the run ends in every layout of groups. Without root, `ip`, `python3` or TAP devices, the
//! test prints that it is skipped.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::case::Case;
use crate::launch::hosts::{LAYOUTS, start_both};
use crate::launch::namespaces::Hosts;
use crate::launch::ranks;

/// A cable between two namespaces, `cable.py`. Dropping it unplugs the cable.
pub(crate) struct Cable {
    program: Child,
    requests: ChildStdin,
    replies: BufReader<ChildStdout>,
}

impl Cable {
    pub(crate) fn start(namespaces: [&str; 2]) -> Result<Self, String> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/e2e/launch/cable.py");
        let mut command = Command::new("python3");
        command.arg(script).args(namespaces).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut program = command.spawn().map_err(|error| format!("python3: {error}"))?;
        let (requests, replies) = (program.stdin.take().unwrap(), BufReader::new(program.stdout.take().unwrap()));
        let mut cable = Self { program, requests, replies };
        if cable.reply() == "ready\n" {
            return Ok(cable);
        }
        let mut reason = String::new();
        cable.program.stderr.take().unwrap().read_to_string(&mut reason).unwrap();
        Err(reason.lines().last().unwrap_or("cable.py ended").to_string())
    }

    fn reply(&mut self) -> String {
        let mut line = String::new();
        self.replies.read_line(&mut line).unwrap();
        line
    }

    /// Damages the next frame that carries values. Returns once it has crossed the cable.
    fn damage(&mut self) {
        self.requests.write_all(b"\n").unwrap();
        assert_eq!(self.reply(), "damaged\n");
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

#[test]
fn damaged_data_ends_the_run_in_every_layout() {
    for layout in LAYOUTS {
        let Some((hosts, mut cable)) = Hosts::with_damaging_cable() else { return };
        let case = Case::new();
        let args = ["--out", "run", "--max-steps", "1000000", "--log-dir", "logs"];
        let launchers = start_both(&case, &hosts, &[&args[..], layout].concat());
        case.wait_for_steps("run", 3);
        cable.damage();
        let ends = launchers.map(|launcher| launcher.end());
        for (status, errors) in &ends {
            assert_eq!(*status, Some(4), "{errors}");
            assert!(errors.contains("the received data is damaged"), "{layout:?}: {errors}");
        }
        let named = ranks::named_by(&case, 0..4);
        assert!(named[0].is_some() && named == vec![named[0]; 4], "{layout:?}: {named:?}, {ends:?}");
    }
}
