//! The report page of an autotuning run: a single file that makes no network requests.
//!
//! The page is plain HTML, CSS and JavaScript in the files beside this one, so that each can be read and linted on its
//! own. They are merged into one file here, with the results as JSON. The page's content security policy forbids all
//! requests.

use serde_json::Value;

const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");

/// In order of dependency. `page.js` shows the results; the others only define functions.
const SCRIPTS: [&str; 7] = [
    include_str!("words.js"),
    include_str!("results.js"),
    include_str!("charts.js"),
    include_str!("scatter.js"),
    include_str!("timeline.js"),
    include_str!("tables.js"),
    include_str!("page.js"),
];

/// Builds the page that shows `data`: an object with `rows`, `best`, `timeline` and so on, any of which may be null or
/// missing.
///
/// No text in `data` can close the script element that holds it.
pub(crate) fn page(data: &Value) -> String {
    let whole = PAGE.replace("/*STYLE*/", &compact(STYLE)).replace("/*SCRIPT*/", &SCRIPTS.map(compact).concat());
    // The results are inserted last, so that markers in them are not replaced.
    whole.replacen("/*DATA*/null", &embedded(data), 1)
}

/// Characters after which a line break may be removed, in scripts and styles.
const OPEN: [char; 4] = ['{', ';', ',', '('];

/// Removes indentation, comment lines and insignificant line breaks, a fifth of the code. The code must not contain
/// multi-line strings.
fn compact(code: &str) -> String {
    let lines = code.lines().map(str::trim_start).filter(|line| !line.is_empty() && !line.starts_with("//"));
    lines.flat_map(|line| [line, if line.ends_with(OPEN) { "" } else { "\n" }]).collect()
}

/// Escapes JSON for a `<script>` element: without `<`, neither an end tag nor a comment can begin. JSON has `<` only
/// inside strings.
fn embedded(data: &Value) -> String {
    data.to_string().replace('<', "\\u003c")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The text of the results element, as a browser reads it.
    fn results(page: &str) -> &str {
        let (_, after) = page.split_once(r#"<script type="application/json" id="data">"#).expect("the element");
        after.split("</script").next().unwrap_or_default()
    }

    #[test]
    fn embedded_data_is_read_back_unchanged() {
        let hostile = json!({
            "</script><script>alert(1)</script>": ["<!--", "<script>", "]]>", "/*SCRIPT*/", "/*STYLE*/", "/*DATA*/null", "\u{2028}"],
            "rows": [{"reason": "a < b && \"c\" > 'd' \\ </SCRIPT >"}], "ratio": 0.1, "none": null
        });
        let page = page(&hostile);
        assert_eq!(serde_json::from_str::<Value>(results(&page)).unwrap(), hostile);
        assert_eq!(page.matches("<script").count(), 2, "one for the results and one for the code");
        assert_eq!(page.matches("</script").count(), 2);
    }

    #[test]
    fn the_page_is_small_complete_and_self_contained() {
        let page = page(&Value::Null);
        assert_eq!(results(&page), "null");
        assert!(page.len() < 40 * 1024, "{} bytes", page.len());
        for text in SCRIPTS.into_iter().chain([STYLE]) {
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
}
