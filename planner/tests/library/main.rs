//! Tests the report page, and tests the searches with a program that stands in for `zero-train`. One file per subject.

// `report_page` includes the source of the page, which refers to this module as `crate::page`.
use zero_planner::page;

mod autotune;
mod planted;
mod report_page;
mod sweep;
