//! `comms_logger`: statistics of collectives and messages by kind and size, in the format of DeepSpeed's `log_summary`.

use std::collections::BTreeMap;

use zero_comm::{Operation, SizeCounter};
use zero_config::CommsLogger;

use zero_engine::format::bytes;

/// Maps the name, the size in bytes and the number of ranks to the operation, its number of calls and its seconds.
type Counts = BTreeMap<(&'static str, u64, usize), (Operation, u64, f64)>;

/// The counts at the time when `verbose` last printed its lines.
#[derive(Default)]
pub(in crate::train) struct Seen(Counts);

/// Sums the counters of operations with the same name, size and number of ranks.
fn by_size(counters: &[SizeCounter], options: &CommsLogger) -> Counts {
    let is_shown = |name: &str| options.prof_all || options.prof_ops.iter().any(|wanted| wanted == name);
    let mut counts = Counts::new();
    for counter in counters.iter().filter(|counter| is_shown(counter.operation.name())) {
        let key = (counter.operation.name(), counter.bytes, counter.ranks);
        let (_, calls, seconds) = counts.entry(key).or_insert((counter.operation, 0, 0.0));
        *calls += counter.calls;
        *seconds += counter.seconds;
    }
    counts
}

/// Returns DeepSpeed's algorithm bandwidth and bus bandwidth in Gbit/s. `seconds` is the time of one call, and `bytes`
/// is the size of the whole vector.
fn rates(operation: Operation, bytes: u64, ranks: usize, seconds: f64) -> (f64, f64) {
    let others = (ranks as f64 - 1.0) / ranks as f64;
    let (algorithm, bus) = match operation {
        Operation::AllReduce => (2.0, 2.0 * others),
        Operation::AllGather | Operation::ReduceScatter | Operation::AllToAll => (1.0, others),
        _ => (1.0, 1.0),
    };
    let rate = bytes as f64 * 8.0 / 1e9 / seconds.max(1e-9);
    (rate * algorithm, rate * bus)
}

/// Formats the counts of the whole run on this rank, with the columns of DeepSpeed's `log_summary`.
pub(in crate::train) fn summary(counters: &[SizeCounter], options: &CommsLogger) -> String {
    let columns =
        ["Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)", "busbw_avg (Gbps)"];
    let row = |first: &str, rest: [String; 6]| {
        let line = rest.iter().fold(format!("{first:<20}"), |line, cell| line + &format!("{cell:<20}"));
        line.trim_end().to_string()
    };
    let mut lines = vec![row("Comm. Op", columns.map(str::to_string))];
    let mut last = "";
    for ((name, size, ranks), (operation, calls, seconds)) in by_size(counters, options) {
        if name != last {
            lines.push(name.to_string());
            last = name;
        }
        let each = seconds / calls.max(1) as f64;
        let (algorithm, bus) = rates(operation, size, ranks, each);
        let number = |x: f64| format!("{x:.2}");
        let cells =
            [bytes(size), calls.to_string(), number(seconds * 1e3), number(each * 1e3), number(algorithm), number(bus)];
        lines.push(row("", cells));
    }
    lines.join("\n")
}

impl Seen {
    /// Returns one line for each kind and size used since the last call, like DeepSpeed's `verbose`.
    pub(in crate::train) fn lines(&mut self, counters: &[SizeCounter], options: &CommsLogger) -> Vec<String> {
        let now = by_size(counters, options);
        let mut lines = vec![];
        for (key, (operation, calls, seconds)) in &now {
            let (before, earlier) = self.0.get(key).map_or((0, 0.0), |(_, calls, seconds)| (*calls, *seconds));
            let (calls, (name, size, ranks)) = (calls - before, *key);
            if calls > 0 {
                let each = (seconds - earlier) / calls as f64;
                let (algorithm, bus) = rates(*operation, size, ranks, each);
                lines.push(format!(
                    "comm op: {name} | count: {calls} | time (ms): {:.2} | msg size: {} | algbw (Gbps): {algorithm:.2} | busbw (Gbps): {bus:.2}",
                    each * 1e3,
                    bytes(size),
                ));
            }
        }
        self.0 = now;
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counter(operation: Operation, bytes: u64, ranks: usize, calls: u64, seconds: f64) -> SizeCounter {
        SizeCounter { operation, bytes, ranks, calls, seconds }
    }

    fn all() -> CommsLogger {
        CommsLogger { enabled: true, verbose: true, prof_all: true, prof_ops: vec![] }
    }

    #[test]
    fn rates_match_deepspeed() {
        // 1 Gbit in one second, over 4 ranks.
        let size = 125_000_000;
        assert_eq!(rates(Operation::AllReduce, size, 4, 1.0), (2.0, 1.5));
        assert_eq!(rates(Operation::AllGather, size, 4, 1.0), (1.0, 0.75));
        assert_eq!(rates(Operation::ReduceScatter, size, 2, 0.5), (2.0, 1.0));
        assert_eq!(rates(Operation::AllToAll, size, 4, 1.0), (1.0, 0.75));
        assert_eq!(rates(Operation::Send, size, 4, 1.0), (1.0, 1.0));
    }

    #[test]
    fn groups_of_the_same_size_share_a_line() {
        let counters = [
            counter(Operation::AllReduce, 1_000_000, 2, 3, 0.003),
            counter(Operation::AllReduce, 1_000_000, 2, 1, 0.005),
            counter(Operation::AllReduce, 8, 2, 1, 0.001),
            counter(Operation::Send, 8, 2, 5, 0.01),
        ];
        let text = summary(&counters, &all());
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines.len(), 6, "{text}");
        assert_eq!(lines[1], ["all_reduce"]);
        assert_eq!(lines[3], ["1.0", "MB", "4", "8.00", "2.00", "8.00", "4.00"]);
        let only = CommsLogger { prof_all: false, prof_ops: vec!["send".into()], ..all() };
        assert_eq!(summary(&counters, &only).lines().count(), 3);
        let mut seen = Seen::default();
        assert_eq!(seen.lines(&counters[2..], &all()).len(), 2);
        let more = [counters[2], counter(Operation::Send, 8, 2, 7, 0.03)];
        let lines = seen.lines(&more, &all());
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(
            lines[0].starts_with("comm op: send | count: 2 | time (ms): 10.00 | msg size: 8 B | algbw"),
            "{lines:?}"
        );
    }
}
