//! Reads the configuration from the files in the arguments or from standard input.

use std::path::{Path, PathBuf};

use zero_config::{Errors, Source, Typed};

use crate::arguments::{ConfigArgs, refuse};

/// Reads the typed configuration. Also returns its text if it came from standard input.
pub(crate) fn load(args: &ConfigArgs, overrides: &[String]) -> anyhow::Result<(Typed, Option<String>)> {
    let sources = read(args)?;
    let text = standard_input(args, &sources);
    Ok((load_sources(args, sources, overrides)?, text))
}

/// Parses the configuration from its files, with the options in `args`.
pub(crate) fn load_sources(args: &ConfigArgs, sources: Vec<Source>, overrides: &[String]) -> Result<Typed, Errors> {
    let typed = zero_config::load_files(sources, overrides)?;
    Ok(if args.ignore_unknown_keys { typed.ignore_unknown_keys() } else { typed })
}

pub(crate) fn is_standard_input(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Returns the text from standard input, which can be read only once.
pub(crate) fn standard_input(args: &ConfigArgs, sources: &[Source]) -> Option<String> {
    let index = args.config.iter().position(|path| is_standard_input(path))?;
    sources.get(index).map(|source| source.text.clone())
}

/// Reads the files of the configuration. There must be at least one.
pub(crate) fn read(args: &ConfigArgs) -> anyhow::Result<Vec<Source>> {
    let paths = &args.config;
    if paths.is_empty() {
        refuse("--config <FILE> is missing")
    }
    if paths.iter().filter(|path| is_standard_input(path)).count() > 1 {
        refuse("standard input (-) can be given only once")
    }
    let read = |path: &PathBuf| if is_standard_input(path) { Source::from_stdin() } else { Source::from_path(path) };
    Ok(paths.iter().map(read).collect::<Result<_, _>>()?)
}
