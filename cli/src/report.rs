//! `zero-train report`: one HTML page of one or several runs.

use clap::CommandFactory;
use clap::error::ErrorKind;
use zero_train::{Error, replace_file, report_page};

use crate::arguments::{Cli, ReportArgs};
use crate::printed::show;

/// Writes the page and prints its path; returns the exit status.
///
/// # Errors
/// Fails if a run cannot be read, or the page cannot be written.
pub(crate) fn report(args: &ReportArgs) -> anyhow::Result<u8> {
    let out = match (&args.out, args.runs.as_slice()) {
        (Some(out), _) => out.clone(),
        (None, [run]) => run.join("report.html"),
        (None, runs) => {
            let told = format!("a report of {} runs needs --out FILE", runs.len());
            let mut command = Cli::command();
            command.build();
            let error = command
                .find_subcommand_mut("report")
                .map(|report| report.error(ErrorKind::MissingRequiredArgument, &told));
            error.unwrap_or_else(|| Cli::command().error(ErrorKind::MissingRequiredArgument, &told)).exit()
        }
    };
    let page = report_page(&args.runs)?;
    // At once, so that a browser never reads half a page.
    replace_file(&out, page).map_err(|source| {
        Error::Io { path: out.clone(), source }.named("--out", "name a file in an existing folder")
    })?;
    show(&format!("report  {}\n", out.display()));
    Ok(0)
}
