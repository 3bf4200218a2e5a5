//! `zero-train report`: writes one HTML page about one or several runs.

use zero_engine::files::replace;
use zero_train::Error;
use zero_train::train::report_page;

use crate::arguments::{ReportArgs, refuse};
use crate::printed::show;

/// Writes the page and prints its path. Returns the exit status.
///
/// # Errors
/// Fails if a run cannot be read, or the page cannot be written.
pub(crate) fn report(args: &ReportArgs) -> anyhow::Result<u8> {
    let out = match (&args.out, args.runs.as_slice()) {
        (Some(out), _) => out.clone(),
        (None, [run]) => run.join("report.html"),
        (None, runs) => refuse(&format!("a report of {} runs needs --out FILE", runs.len())),
    };
    let page = report_page(&args.runs)?;
    // The file is replaced atomically, so that a browser never reads half a page.
    let named = |error: Error| error.named("--out", "give a file in an existing folder");
    replace(&out, page).map_err(Error::io(&out)).map_err(named)?;
    show(&format!("report  {}\n", out.display()));
    Ok(0)
}
