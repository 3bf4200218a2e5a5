//! Building blocks of report pages. A report page is a single HTML file that makes no network requests.
//!
//! The sources of a page are plain HTML, CSS and JavaScript files next to the module that builds it, so each file can
//! be read and linted on its own. [`assemble`] merges them into one file, with the data as JSON. All pages share the
//! style and the scripts of this module: number formats, charts, and the timeline of a step.

use serde_json::Value;

/// The shared style sheet, for light and dark themes, narrow screens and print.
pub const STYLE: &str = include_str!("page.css");
/// Formats numbers and settings.
pub const WORDS: &str = include_str!("words.js");
/// Elements, scales, axes, legends and the readout of a chart; uses [`WORDS`].
pub const CHARTS: &str = include_str!("charts.js");
/// The timeline of one step; uses [`CHARTS`].
pub const TIMELINE: &str = include_str!("timeline.js");

/// Merges a page: replaces the markers `/*STYLE*/`, `/*SCRIPT*/` and `/*DATA*/null` of `html` by the styles, the
/// scripts and `data`. Styles and scripts keep their order.
///
/// No text in `data` can close the script element that holds it.
#[must_use]
pub fn assemble(html: &str, styles: &[&str], scripts: &[&str], data: &Value) -> String {
    let merged = |parts: &[&str]| parts.iter().map(|part| compact(part)).collect::<String>();
    let whole = html.replace("/*STYLE*/", &merged(styles)).replace("/*SCRIPT*/", &merged(scripts));
    // The data is inserted last, so that markers in it are not replaced.
    whole.replacen("/*DATA*/null", &embedded(data), 1)
}

/// Characters after which a line break may be removed, in scripts and styles.
const OPEN: [char; 4] = ['{', ';', ',', '('];

/// Removes indentation, comment lines and insignificant line breaks, together a fifth of the code. The code must not
/// contain multi-line strings.
#[must_use]
pub fn compact(code: &str) -> String {
    let lines = code.lines().map(str::trim_start).filter(|line| !line.is_empty() && !line.starts_with("//"));
    lines.flat_map(|line| [line, if line.ends_with(OPEN) { "" } else { "\n" }]).collect()
}

/// Escapes JSON for a `<script>` element: without `<`, neither an end tag nor a comment can begin. In JSON, `<` occurs
/// only inside strings.
fn embedded(data: &Value) -> String {
    data.to_string().replace('<', "\\u003c")
}

/// Checks that a page built from these styles and scripts is self-contained, and that [`compact`] does not change the
/// meaning of the styles and scripts.
///
/// # Panics
/// Panics if a check fails.
pub fn check_self_contained(page: &str, styles: &[&str], scripts: &[&str]) {
    for text in scripts.iter().chain(styles) {
        assert!(page.contains(&compact(text)));
        assert!(text.lines().all(|line| line.matches('`').count() % 2 == 0), "multi-line string");
        assert!(!text.lines().any(|line| line.contains(" // ") && line.ends_with(OPEN)), "comment swallows code");
        assert!(!text.contains("</") && !text.contains("<!--"), "would close the element that holds it");
    }
    // The SVG namespace is the only address, and it is never requested.
    assert_eq!(page.matches("://").count(), 1);
    assert_eq!(page.matches("http://www.w3.org/2000/svg").count(), 1);
    assert!(!page.contains("url(") || page.matches("url(").count() == page.matches("url(#").count());
}
