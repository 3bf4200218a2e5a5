//! The paths of keys, such as `zero_optimization.stage`, as constants.

/// Joins two constants into `section.name`.
macro_rules! joined_path {
    ($section:expr, $name:expr) => {{
        const PATH: [u8; $crate::path::length($section, $name)] = $crate::path::joined($section, $name);
        $crate::path::text(&PATH)
    }};
}

pub(crate) use joined_path as path;

/// Returns the path of a key of a section in a list of sections: `data.datasets.0.path`.
pub(crate) fn item_path(list: &str, index: usize, key: &'static str) -> String {
    format!("{list}.{index}.{}", last(key))
}

/// Returns the length of `section.name`.
pub(crate) const fn length(section: &str, name: &str) -> usize {
    if section.is_empty() { name.len() } else { section.len() + 1 + name.len() }
}

/// Returns the bytes of `section.name`.
pub(crate) const fn joined<const LENGTH: usize>(section: &str, name: &str) -> [u8; LENGTH] {
    let mut path = [b'.'; LENGTH];
    let (head, tail) = (section.as_bytes(), name.as_bytes());
    let mut index = 0;
    while index < head.len() {
        path[index] = head[index];
        index += 1;
    }
    index = 0;
    while index < tail.len() {
        path[LENGTH - tail.len() + index] = tail[index];
        index += 1;
    }
    path
}

/// Returns the text of these bytes.
pub(crate) const fn text(path: &'static [u8]) -> &'static str {
    match std::str::from_utf8(path) {
        Ok(path) => path,
        Err(_) => panic!("a path is UTF-8"),
    }
}

/// Returns the last key of a path.
pub(crate) const fn last(path: &'static str) -> &'static str {
    let mut start = path.len();
    while start > 0 && path.as_bytes()[start - 1] != b'.' {
        start -= 1;
    }
    path.split_at(start).1
}
