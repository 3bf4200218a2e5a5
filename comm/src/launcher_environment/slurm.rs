//! Parses Slurm's two compressed lists: hosts as in `gpu[07-09,12],login` and tasks per node as in `4(x2),3`.

/// Returns the first host of a host list.
pub(super) fn first_host(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (prefix, rest) = list.split_at(end);
    if !rest.starts_with('[') {
        return (!prefix.is_empty()).then(|| prefix.to_string());
    }
    let (inside, suffix) = rest[1..].split_once(']')?;
    let first = inside.split([',', '-']).next().filter(|number| !number.is_empty())?;
    if !first.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    // The suffix may hold a second bracket, as in `rack[1-2]node[1-8]`; the host ends at the first comma outside
    // brackets.
    let suffix_end = suffix.find(',').filter(|comma| suffix.find('[').is_none_or(|bracket| *comma < bracket));
    match suffix_end.map(|end| &suffix[..end]).unwrap_or(suffix) {
        "" => Some(format!("{prefix}{first}")),
        more => Some(format!("{prefix}{first}{}", first_host(more)?)),
    }
}

/// Returns the number of tasks on the `node`-th node of the step.
pub(super) fn tasks_on_node(list: &str, node: usize) -> Option<usize> {
    let mut left = node;
    for part in list.split(',') {
        let (tasks, times) = match part.split_once("(x") {
            Some((tasks, times)) => (tasks, times.strip_suffix(')')?.parse().ok()?),
            None => (part, 1usize),
        };
        if left < times {
            return tasks.parse().ok();
        }
        left -= times;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_host_of_a_slurm_node_list() {
        for (list, host) in [
            ("n[1-2,7]", Some("n1")),
            ("gpu[007-009],login", Some("gpu007")),
            ("login,gpu[1-2]", Some("login")),
            ("alone", Some("alone")),
            ("a[3]-ib,b", Some("a3-ib")),
            ("rack[1-2]node[4-8]", Some("rack1node4")),
            ("", None),
            ("n[", None),
            ("n[x-2]", None),
        ] {
            assert_eq!(first_host(list).as_deref(), host, "{list}");
        }
    }

    #[test]
    fn tasks_per_node_are_parsed() {
        let tasks = |node| tasks_on_node("4(x2),3,1", node);
        assert_eq!([tasks(0), tasks(1), tasks(2), tasks(3), tasks(4)], [Some(4), Some(4), Some(3), Some(1), None]);
        assert_eq!(tasks_on_node("4(x", 0), None);
    }
}
