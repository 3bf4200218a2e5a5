//! `zero-train data`: what a configuration trains on.

use console::style;
use zero_engine::{counted, format::grouped};
use zero_train::train::{ShownPart, ShownSample, show_data};

use crate::arguments::{ConfigArgs, ShowArgs};
use crate::input::load;
use crate::printed::{show, warn};

/// Prints samples; returns the exit status.
///
/// # Errors
/// Fails if the data cannot be opened.
pub(crate) fn show_samples(args: &ShowArgs) -> anyhow::Result<u8> {
    let source = ConfigArgs {
        config: args.config.clone(),
        num_processes: None,
        set: args.set.clone(),
        ignore_unknown_keys: false,
    };
    let config = load(&source, &args.set)?.0.resolve(None)?;
    warn(&config);
    let data = show_data(&config, args.eval, args.index, args.count as usize)?;
    let has_colors = console::colors_enabled();
    for sample in &data.shown {
        show(&text(sample, data.samples, has_colors));
    }
    show(&data.description.map_or(String::new(), |description| format!("\n{description}\n")));
    Ok(0)
}

/// Formats a sample: a line with its numbers, and its text. Trained parts are green, or in brackets without colors.
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
