//! `flops_profiler`: prints the layers of one step, in the format of DeepSpeed's module profile.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use zero_config::FlopsProfiler;
use zero_model::ParameterId;
use zero_model::ops::{measure, threads};

use zero_engine::Error;
use zero_engine::format::counted;
use zero_engine::timing::profile::{Found, LayerWork, ProfiledWork};
use zero_engine::{Engine, Step};

/// A node in the tree of names: one layer, or all layers whose names begin with the node's name.
#[derive(Debug, Clone, Default)]
struct Node {
    /// Number of elements of each parameter. A parameter that several layers use counts once.
    params: BTreeMap<ParameterId, usize>,
    forward: ProfiledWork,
    backward: ProfiledWork,
}

impl Node {
    fn params(&self) -> f64 {
        self.params.values().map(|&elements| elements as f64).sum()
    }

    fn add(&mut self, params: &[(ParameterId, usize)], work: &LayerWork) {
        self.params.extend(params.iter().copied());
        self.forward += work.forward;
        self.backward += work.backward;
    }
}

/// A layer: its name, its parameters with their elements, and its measured work.
type Profiled = (String, Vec<(ParameterId, usize)>, LayerWork);

/// Formats the profile of a step. Each layer is measured on the first rank that has it.
pub(in crate::train) fn report(engine: &Engine, step: &Step, found: &Found, options: &FlopsProfiler) -> String {
    // The peak FLOP rate of the CPU. The peak rate of a GPU is unknown.
    let peak =
        engine.model().device().is_cpu().then(|| measure::peak_flops(engine.settings().dtype) * threads() as f64);
    let mut text = String::from("-------------------------- Flops Profiler --------------------------\n");
    summary(&mut text, engine, step, found, peak);
    let layers: Vec<Profiled> = engine
        .model()
        .layers()
        .iter()
        .zip(&found.layers)
        .map(|(layer, work)| {
            let params = layer.uses().iter().map(|&id| (id, engine.model().parameters()[id].whole_elements()));
            (layer.name().to_string(), params.collect(), *work)
        })
        .collect();
    aggregated(&mut text, &layers, options);
    if options.detailed {
        detailed(&mut text, &layers, options.module_depth, peak);
    }
    text.push_str("--------------------------------------------------------------------");
    text
}

/// Writes the profile to a file. Creates the folder of the file.
pub(in crate::train) fn write(path: &Path, text: &str) -> Result<(), Error> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(Error::io(folder))?;
    }
    fs::write(path, format!("{text}\n")).map_err(Error::io(path))
}

fn summary(text: &mut String, engine: &Engine, step: &Step, found: &Found, peak: Option<f64>) {
    let config = engine.config();
    let mut total = Node::default();
    found.own.iter().for_each(|work| total.add(&[], work));
    let flops = |macs: u64| 2.0 * macs as f64;
    let both = flops(total.forward.macs + total.backward.macs);
    let (forward, backward) = (total.forward.seconds(), total.backward.seconds());
    let iteration = step.duration.as_secs_f64();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "{name:<66}{value}");
    };
    line("profile of step:", step.step.to_string());
    line("world size:", engine.communicator().size().to_string());
    line("data parallel size:", engine.replicas().to_string());
    line("pipeline stages:", config.pipeline.stages.to_string());
    if config.context_size() > 1 {
        line("ranks that share each sequence:", config.context_size().to_string());
    }
    if config.tensor_size() > 1 {
        line("ranks that split each layer:", config.tensor_size().to_string());
    }
    line("batch size per rank:", (step.samples / engine.replicas()).to_string());
    line("params of model:", scaled(engine.model().elements() as f64, ""));
    line("fwd MACs of rank 0:", scaled(total.forward.macs as f64, "MACs"));
    line("fwd latency:", duration(forward));
    line("fwd FLOPS = 2 * fwd MACs / fwd latency:", rate(flops(total.forward.macs), forward));
    line("bwd MACs, including recomputation and the head's forward:", scaled(total.backward.macs as f64, "MACs"));
    line("bwd latency:", duration(backward));
    line("bwd FLOPS = 2 * bwd MACs / bwd latency:", rate(flops(total.backward.macs), backward));
    line("fwd+bwd FLOPS:", rate(both, forward + backward));
    line("step latency (gradient norm and optimizer):", duration(found.update.as_secs_f64()));
    line("iter latency:", duration(iteration));
    line("FLOPS = 2 * (fwd + bwd MACs) / iter latency:", rate(both, iteration));
    if let Some(peak) = peak {
        let of = counted(threads(), "thread", "threads");
        line(&format!("peak, measured with multiply-adds in registers of {of}:"), scaled(peak, "FLOPS"));
        line("share of the peak in fwd+bwd and in the whole iteration:", {
            format!("{}, {}", share(both / (forward + backward), peak), share(both / iteration, peak))
        });
    }
    line("samples/second:", format!("{:.2}", step.samples as f64 / iteration));
}

/// Writes the top entries of each depth by parameters, MACs and latency. Layers whose names differ only in numbers are
/// summed.
fn aggregated(text: &mut String, layers: &[Profiled], options: &FlopsProfiler) {
    let _ = writeln!(text, "\n----------------------- Aggregated Profile -----------------------");
    let _ = writeln!(
        text,
        "Top {} modules in terms of params, MACs or latency at different model depths:",
        options.top_modules
    );
    let deepest = layers.iter().map(|(name, ..)| name.split('.').count()).max().unwrap_or(0);
    for depth in 0..=options.module_depth.unwrap_or(deepest).min(deepest) {
        let mut groups: BTreeMap<String, Node> = BTreeMap::new();
        for (name, params, work) in layers.iter().filter(|(name, ..)| name.split('.').count() >= depth) {
            groups.entry(group(name, depth)).or_default().add(params, work);
        }
        let _ = writeln!(text, "depth {depth}:");
        let mut top = |what: &str, of: fn(&Node) -> f64, shown: fn(f64) -> String| {
            let mut sorted: Vec<(&String, f64)> = groups.iter().map(|(name, node)| (name, of(node))).collect();
            sorted.sort_by(|a, b| b.1.total_cmp(&a.1));
            let sorted = sorted.into_iter().take(options.top_modules).map(|(name, x)| format!("{name}: {}", shown(x)));
            let _ = writeln!(text, "    {what:<12}- {}", sorted.collect::<Vec<_>>().join(", "));
        };
        top("params", Node::params, |x| scaled(x, ""));
        top("MACs", |node| (node.forward.macs + node.backward.macs) as f64, |x| scaled(x, "MACs"));
        top("fwd latency", |node| node.forward.seconds(), duration);
        top("bwd latency", |node| node.backward.seconds(), duration);
    }
}

/// Returns the first parts of a name, with `*` in place of numbers.
fn group(name: &str, depth: usize) -> String {
    let part = |part: &str| if part.bytes().all(|b| b.is_ascii_digit()) { "*".to_string() } else { part.to_string() };
    match depth {
        0 => "model".into(),
        _ => name.split('.').take(depth).map(part).collect::<Vec<_>>().join("."),
    }
}

/// Writes every node of the tree of names, starting with the root, in the order of the model.
fn detailed(text: &mut String, layers: &[Profiled], depth: Option<usize>, peak: Option<f64>) {
    let mut nodes: Vec<(String, Node)> = vec![("model".into(), Node::default())];
    for (name, params, work) in layers {
        nodes[0].1.add(params, work);
        let parts: Vec<&str> = name.split('.').collect();
        for length in 1..=parts.len().min(depth.unwrap_or(usize::MAX)) {
            let prefix = parts[..length].join(".");
            let index = nodes.iter().position(|(known, _)| *known == prefix).unwrap_or_else(|| {
                nodes.push((prefix, Node::default()));
                nodes.len() - 1
            });
            nodes[index].1.add(params, work);
        }
    }
    let whole = nodes[0].1.clone();
    let _ = writeln!(text, "\n------------------------ Detailed Profile ------------------------");
    let _ = writeln!(
        text,
        "{:<28}{:>10}{:>7}{:>12}{:>7}{:>11}{:>7}{:>12}{:>7}{:>11}{:>7}{:>14}{:>7}",
        "module", "params", "%", "fwd MACs", "%", "fwd ms", "%", "bwd MACs", "%", "bwd ms", "%", "FLOPS", "peak"
    );
    for (index, (name, node)) in nodes.iter().enumerate() {
        let parts = if index == 0 { 0 } else { name.split('.').count() };
        let short = format!("{}{}", "  ".repeat(parts), name.rsplit('.').next().unwrap_or(name));
        let seconds = node.forward.seconds() + node.backward.seconds();
        let flops = 2.0 * (node.forward.macs + node.backward.macs) as f64;
        let mut line =
            format!("{short:<28}{:>10}{:>7}", scaled(node.params(), ""), part(node.params(), whole.params()));
        for (work, of) in [(node.forward, whole.forward), (node.backward, whole.backward)] {
            let _ = write!(
                line,
                "{:>12}{:>7}{:>11.3}{:>7}",
                scaled(work.macs as f64, ""),
                part(work.macs as f64, of.macs as f64),
                work.seconds() * 1e3,
                part(work.seconds(), of.seconds())
            );
        }
        let peak =
            peak.filter(|_| flops > 0.0 && seconds > 0.0).map_or(String::new(), |peak| share(flops / seconds, peak));
        let _ = write!(line, "{:>14}{peak:>7}", rate(flops, seconds));
        let _ = writeln!(text, "{}", line.trim_end());
    }
}

fn part(x: f64, whole: f64) -> String {
    if whole > 0.0 { format!("{:.1}", 100.0 * x / whole) } else { "-".into() }
}

fn share(rate: f64, peak: f64) -> String {
    if rate.is_finite() { format!("{:.0} %", 100.0 * rate / peak) } else { "-".into() }
}

fn rate(flops: f64, seconds: f64) -> String {
    if flops > 0.0 && seconds > 0.0 { scaled(flops / seconds, "FLOPS") } else { "-".into() }
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.2} us", s * 1e6),
    }
}

/// Formats a number with DeepSpeed's unit letters: `842.50 K`.
fn scaled(x: f64, unit: &str) -> String {
    let (x, letter) = match x {
        x if x >= 1e12 => (x / 1e12, " T"),
        x if x >= 1e9 => (x / 1e9, " G"),
        x if x >= 1e6 => (x / 1e6, " M"),
        x if x >= 1e3 => (x / 1e3, " K"),
        x => (x, if unit.is_empty() { "" } else { " " }),
    };
    if letter.trim().is_empty() { format!("{x:.0}{letter}{unit}") } else { format!("{x:.2}{letter}{unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers() -> Vec<Profiled> {
        let work = |macs, ms: u64| ProfiledWork { macs, nanoseconds: ms * 1_000_000 };
        let layer = |name: &str, params, forward, backward| {
            (name.to_string(), vec![(params, params)], LayerWork { forward, backward })
        };
        vec![
            layer("transformer", 1_000, ProfiledWork::default(), work(0, 1)),
            layer("transformer.h.0", 2_000, work(500_000, 4), work(1_000_000, 8)),
            layer("transformer.h.1", 1_999, work(500_000, 6), work(1_000_000, 12)),
            layer("lm_head", 3_000, ProfiledWork::default(), work(3_000_000, 3)),
        ]
    }

    fn options(module_depth: Option<usize>, top_modules: usize) -> FlopsProfiler {
        FlopsProfiler { enabled: true, profile_step: 1, module_depth, top_modules, detailed: true, output_file: None }
    }

    #[test]
    fn modules_of_the_same_kind_are_added_up() {
        let mut text = String::new();
        aggregated(&mut text, &layers(), &options(None, 2));
        let after = |depth: usize| text.split(&format!("depth {depth}:\n")).nth(1).expect("the depth").to_string();
        assert!(after(0).starts_with("    params      - model: 8.00 K\n"), "{text}");
        assert!(after(1).contains("MACs        - lm_head: 3.00 MMACs, transformer: 3.00 MMACs"), "{text}");
        assert!(after(3).starts_with("    params      - transformer.h.*: 4.00 K\n"), "{text}");
        assert!(after(3).contains("bwd latency - transformer.h.*: 20.00 ms"), "{text}");
        let mut text = String::new();
        aggregated(&mut text, &layers(), &options(Some(1), 1));
        assert!(text.contains("depth 1:") && !text.contains("depth 2:"), "{text}");
    }

    #[test]
    fn the_tree_has_sums_and_shares() {
        let mut text = String::new();
        detailed(&mut text, &layers(), None, Some(1e9));
        let rows: Vec<Vec<&str>> = text.lines().skip(3).map(|line| line.split_whitespace().collect()).collect();
        let names: Vec<&str> = rows.iter().map(|row| row[0]).collect();
        assert_eq!(names, ["model", "transformer", "h", "0", "1", "lm_head"]);
        // 3 M MACs are 6 M operations. In 30 ms, this is a fifth of 1 GFLOPS.
        assert_eq!(
            rows[2][1..],
            "4.00 K 50.0 1.00 M 100.0 10.000 100.0 2.00 M 40.0 20.000 83.3 200.00 MFLOPS 20 %"
                .split(' ')
                .collect::<Vec<_>>()
        );
        let mut text = String::new();
        detailed(&mut text, &layers(), Some(1), None);
        assert_eq!(text.lines().count(), 3 + 3, "{text}");
    }
}
