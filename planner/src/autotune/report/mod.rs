//! The report page of an autotuning run: a single file that makes no network requests.
//!
//! The parts of the page are in the files of this folder and in [`crate::page`]. The page's content security policy
//! forbids all requests.

use serde_json::Value;

use crate::page::{self, CHARTS, STYLE, TIMELINE, WORDS};

const PAGE: &str = include_str!("page.html");

/// The scripts of the page. Each script comes after the scripts that it uses. `page.js` shows the results; the others
/// only define functions.
const SCRIPTS: [&str; 7] = [
    WORDS,
    include_str!("results.js"),
    CHARTS,
    include_str!("scatter.js"),
    TIMELINE,
    include_str!("tables.js"),
    include_str!("page.js"),
];

/// Builds the page that shows `data`, an object with `rows`, `best`, `timeline` and so on. Any entry may be null or
/// missing.
///
/// No text in `data` can close the script element that holds it.
pub(crate) fn page(data: &Value) -> String {
    page::assemble(PAGE, &[STYLE], &SCRIPTS, data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Returns the text of the results element, as a browser reads it.
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
        let page = super::page(&hostile);
        assert_eq!(serde_json::from_str::<Value>(results(&page)).unwrap(), hostile);
        assert_eq!(page.matches("<script").count(), 2, "one for the results and one for the code");
        assert_eq!(page.matches("</script").count(), 2);
    }

    #[test]
    fn the_page_is_small_complete_and_self_contained() {
        let page = super::page(&Value::Null);
        assert_eq!(results(&page), "null");
        assert!(page.len() < 40 * 1024, "{} bytes", page.len());
        page::check_self_contained(&page, &[STYLE], &SCRIPTS);
    }
}
