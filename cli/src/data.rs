//! `zero-train data`: shows, counts and verifies the data of a configuration, and fills the token cache.

use std::path::PathBuf;
use std::time::Instant;

use console::style;
use zero_config::Config;
use zero_engine::counted;
use zero_engine::format::{grouped, of_number};
use zero_train::train::{
    DataStats, Lengths, PreparedData, ShownPart, ShownSample, data_stats, prepare_data, show_data, verify_data,
};

use crate::arguments::{ConfigArgs, DataConfigArgs, ShowArgs};
use crate::input::load;
use crate::printed::{show, warn};

/// Prints samples. Returns the exit status.
///
/// # Errors
/// Fails if the data cannot be opened.
pub(crate) fn show_samples(args: &ShowArgs) -> anyhow::Result<u8> {
    let config = resolved(&args.config, &args.set)?;
    let data = show_data(&config, args.eval, args.index, args.count as usize)?;
    let has_colors = console::colors_enabled();
    for sample in &data.shown {
        show(&text(sample, data.samples, has_colors));
    }
    show(&data.description.map_or(String::new(), |description| format!("\n{description}\n")));
    Ok(0)
}

/// Tokenizes text into the cache. Returns the exit status.
///
/// # Errors
/// Fails if the data cannot be opened, or if the cache cannot be written.
pub(crate) fn prepare(args: &DataConfigArgs) -> anyhow::Result<u8> {
    let config = resolved(&args.config, &args.set)?;
    let started = Instant::now();
    let prepared = prepare_data(&config)?;
    prepared.iter().for_each(|data| show(&(prepared_text(data) + "\n")));
    if prepared.iter().any(|data| data.new > 0) {
        show(&format!("tokenized in {:.1} s\n", started.elapsed().as_secs_f64()));
    }
    Ok(0)
}

fn prepared_text(data: &PreparedData) -> String {
    let PreparedData { name, new, cached, in_memory, documents, tokens } = data;
    let files = |count: usize| counted(count, "file", "files");
    match (new + cached, *in_memory) {
        (0, 0) => format!("{name}: no text files to tokenize"),
        (0, small) => format!(
            "{name}: nothing to prepare: less than 4 MiB of text in {}, which each run tokenizes in memory",
            files(small)
        ),
        (all, _) => format!(
            "{name}: {}, {new} tokenized now, {cached} already in the cache; {}, {} tokens",
            files(all),
            format_args!("{} {}", grouped(*documents), of_number(*documents as usize, "document", "documents")),
            grouped(*tokens)
        ),
    }
}

/// Prints statistics of the data. Returns the exit status.
///
/// # Errors
/// Fails if the data cannot be opened or read.
pub(crate) fn stats(args: &DataConfigArgs) -> anyhow::Result<u8> {
    let config = resolved(&args.config, &args.set)?;
    for data in data_stats(&config)? {
        show(&(stats_text(&data) + "\n"));
    }
    Ok(0)
}

fn stats_text(data: &DataStats) -> String {
    let mut lines = vec![data.name.to_string()];
    let mut line = |name: &str, value: String| lines.push(format!("  {name:<11} {value}"));
    if let Some(lengths) = &data.documents {
        let Lengths { count, sum, min, median, p99, max } = lengths;
        line("documents", format!("{}, {} of them exact duplicates", grouped(*count), grouped(data.duplicates)));
        line("tokens", grouped(*sum));
        let mean = lengths.mean();
        let [min, median, p99, max] = [min, median, p99, max].map(|&length| grouped(length));
        line("lengths", format!("min {min}, median {median}, mean {mean:.1}, 99 % {p99}, max {max} tokens"));
    }
    let of = data.tokens_per_sample.map_or(String::new(), |tokens| format!(" of {} tokens", grouped(tokens as u64)));
    line("samples", format!("{}{of}", grouped(data.samples as u64)));
    if data.tokens_per_sample.is_some() {
        line("padding", format!("{:.1} % of positions", 100.0 * data.padding));
    }
    if let Some(description) = &data.description {
        line("summary", description.clone());
    }
    lines.join("\n")
}

/// Reads and checks all data. Returns the exit status.
///
/// # Errors
/// Fails at the first problem and reports its position.
pub(crate) fn verify(args: &DataConfigArgs) -> anyhow::Result<u8> {
    let config = resolved(&args.config, &args.set)?;
    for (name, samples) in verify_data(&config)? {
        show(&format!("{name}: {}, no problem found\n", counted(samples, "sample", "samples")));
    }
    Ok(0)
}

fn resolved(config: &[PathBuf], set: &[String]) -> anyhow::Result<Config> {
    let source =
        ConfigArgs { config: config.to_vec(), num_processes: None, set: set.to_vec(), ignore_unknown_keys: false };
    let config = load(&source, set)?.0.resolve(None)?;
    warn(&config);
    Ok(config)
}

/// Formats a sample: a line with its numbers, followed by its text. Trained parts are green, or in brackets without
/// colors.
fn text(sample: &ShownSample, samples: usize, has_colors: bool) -> String {
    let part = |ShownPart { text, is_trained }: &ShownPart| match (is_trained, has_colors) {
        (false, _) => text.clone(),
        (true, true) => style(text).green().bold().force_styling(true).to_string(),
        (true, false) => format!("⟦{text}⟧"),
    };
    let conversations = match sample.conversations {
        1 => String::new(),
        several => format!("{several} conversations, "),
    };
    let title = format!(
        "sample {} of {}: {conversations}{}, {} trained, {} padding",
        sample.index,
        grouped(samples as u64),
        counted(sample.tokens, "token", "tokens"),
        grouped(sample.trained as u64),
        grouped(sample.padding as u64)
    );
    let title = if has_colors { style(title).bold().force_styling(true).to_string() } else { title };
    let text: String = sample.parts.iter().map(part).collect();
    format!("{title}\n{}\n", text.trim_end_matches('\n'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trained_parts_are_marked_with_and_without_colors() {
        let part = |text: &str, is_trained| ShownPart { text: text.into(), is_trained };
        let parts = vec![part("hi ", false), part("yes", true), part("\n", false)];
        let sample = ShownSample { index: 4, parts, conversations: 2, tokens: 5, trained: 1, padding: 1200 };
        let title = "sample 4 of 1,000: 2 conversations, 5 tokens, 1 trained, 1,200 padding";
        assert_eq!(text(&sample, 1000, false), format!("{title}\nhi ⟦yes⟧\n"));
        assert!(text(&sample, 1000, true).contains("hi \u{1b}[32m\u{1b}[1myes\u{1b}[0m"));
    }
}
