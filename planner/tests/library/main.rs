//! Tests the searches with a program that stands in for `zero-train`, and the report page. One file per subject.

mod autotune;
mod planted;
mod report_page;
mod sweep;
