//! The searches over a program that stands in for `zero-train`, and the page that they write. A file is a subject.

mod autotune;
mod planted;
mod report_page;
mod sweep;
