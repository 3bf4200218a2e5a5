//! The page of an autotuning run: one file that asks the network for nothing.
//!
//! The page is plain HTML, CSS and JavaScript in the files beside this one, so that each can be read and linted as what it is;
//! they are put into one here, and the results are put into it as JSON. Its content security policy lets it ask for nothing.

use serde_json::Value;

const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");

/// In the order in which they use each other. `page.js` runs on the results; the others only define.
const SCRIPTS: [&str; 7] = [
    include_str!("words.js"),
    include_str!("results.js"),
    include_str!("charts.js"),
    include_str!("scatter.js"),
    include_str!("timeline.js"),
    include_str!("tables.js"),
    include_str!("page.js"),
];

/// The page that shows `data`: an object with `rows`, `best`, `timeline` and so on, any of which may be null or missing.
///
/// No text in `data` can end the script that it stands in.
pub(crate) fn page(data: &Value) -> String {
    let whole = PAGE.replace("/*STYLE*/", &compact(STYLE)).replace("/*SCRIPT*/", &SCRIPTS.map(compact).concat());
    // The results go in last: what they contain is not looked at again.
    whole.replacen("/*DATA*/null", &embedded(data), 1)
}

/// What the next line may follow at once, in scripts and in styles.
const OPEN: [char; 4] = ['{', ';', ',', '('];

/// Code without indentation, lines of comment and ends of lines that mean nothing, a fifth of its length. It has no string of several lines.
fn compact(code: &str) -> String {
    let lines = code.lines().map(str::trim_start).filter(|line| !line.is_empty() && !line.starts_with("//"));
    lines.flat_map(|line| [line, if line.ends_with(OPEN) { "" } else { "\n" }]).collect()
}

/// JSON that may stand in a `<script>`: without `<`, neither its end nor a comment can begin. Outside of strings JSON has none.
fn embedded(data: &Value) -> String {
    data.to_string().replace('<', "\\u003c")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// What a browser takes for the text of the element with the results.
    fn results(page: &str) -> &str {
        let (_, after) = page.split_once(r#"<script type="application/json" id="data">"#).expect("the element");
        after.split("</script").next().unwrap_or_default()
    }

    #[test]
    fn what_was_put_in_is_read_back() {
        let hostile = json!({
            "</script><script>alert(1)</script>": ["<!--", "<script>", "]]>", "/*SCRIPT*/", "/*STYLE*/", "/*DATA*/null", "\u{2028}"],
            "rows": [{"reason": "a < b && \"c\" > 'd' \\ </SCRIPT >"}], "ratio": 0.1, "none": null
        });
        let page = page(&hostile);
        assert_eq!(serde_json::from_str::<Value>(results(&page)).unwrap(), hostile);
        assert_eq!(page.matches("<script").count(), 2, "one for the results and one that shows them");
        assert_eq!(page.matches("</script").count(), 2);
    }

    #[test]
    fn the_page_is_small_whole_and_alone() {
        let page = page(&Value::Null);
        assert_eq!(results(&page), "null");
        assert!(page.len() < 40 * 1024, "{} bytes", page.len());
        for text in SCRIPTS.into_iter().chain([STYLE]) {
            assert!(page.contains(&compact(text)));
            assert!(text.lines().all(|line| line.matches('`').count() % 2 == 0), "a string of several lines");
            assert!(!text.lines().any(|line| line.contains(" // ") && line.ends_with(OPEN)), "a comment would go on");
            assert!(!text.contains("</") && !text.contains("<!--"), "would end the element that it is put into");
        }
        // The name space of SVG is the only address, and is not asked for anything.
        assert_eq!(page.matches("://").count(), 1);
        assert_eq!(page.matches("http://www.w3.org/2000/svg").count(), 1);
        assert!(!page.contains("url(") || page.matches("url(").count() == page.matches("url(#").count());
    }
}
