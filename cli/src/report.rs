//! `zero-train report`: one HTML page of one or several runs.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use clap::CommandFactory;
use clap::error::ErrorKind;
use zero_train::{Error, report_page};

use crate::arguments::{Cli, ReportArgs};
use crate::printed::show;

/// Writes the page and prints its path; returns the exit status.
///
/// # Errors
/// A run cannot be read, or the page cannot be written.
pub(crate) fn report(args: &ReportArgs) -> anyhow::Result<u8> {
    let out = match (&args.out, args.runs.as_slice()) {
        (Some(out), _) => out.clone(),
        (None, [run]) => run.join("report.html"),
        (None, runs) => {
            let told = format!("a page of {} runs needs --out FILE", runs.len());
            let mut command = Cli::command();
            command.build();
            let error = command
                .find_subcommand_mut("report")
                .map(|report| report.error(ErrorKind::MissingRequiredArgument, &told));
            error.unwrap_or_else(|| Cli::command().error(ErrorKind::MissingRequiredArgument, &told)).exit()
        }
    };
    let page = report_page(&args.runs)?;
    write(&out, &page).map_err(|error| error.named("--out", "name a file in a folder that exists"))?;
    show(&format!("report  {}\n", out.display()));
    Ok(0)
}

/// Replaces the file at once, so that a browser never reads half a page.
fn write(path: &Path, page: &str) -> Result<(), Error> {
    let failed = |source: io::Error| Error::Io { path: path.to_path_buf(), source };
    let Some(name) = path.file_name() else {
        return Err(failed(io::ErrorKind::IsADirectory.into()));
    };
    let temporary: PathBuf = path.with_file_name(format!(".{}", name.to_string_lossy()));
    fs::write(&temporary, page).map_err(failed)?;
    fs::rename(&temporary, path).map_err(|error| {
        let _ = fs::remove_file(&temporary);
        failed(error)
    })
}
