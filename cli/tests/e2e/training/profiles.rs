//! Profiles: compares the output of `flops_profiler`, `memory_breakdown` and `comms_logger` with closed forms, and
//! checks that profiling does not change the results.

use crate::case;

use std::fs;

use case::{Case, sets, text};

const PROFILE: &str = "flops_profiler={enabled: true, profile_step: 2, output_file: profiles/second.txt}";

/// Returns the words of a layer's line in the detailed profile, beginning with its name.
fn row<'a>(profile: &'a str, name: &str) -> Vec<&'a str> {
    let mut rows = profile.split("Detailed Profile").nth(1).unwrap().lines().map(|line| line.split_whitespace());
    rows.find(|row| row.clone().next() == Some(name)).unwrap_or_else(|| panic!("{name} is not in {profile}")).collect()
}

/// The forward of a GPT-2 block of width w takes 12 w² multiply-accumulates per token, plus two products of attention
/// over the unmasked scores. A backward takes twice 12 w² per token, plus five products for attention.
#[test]
fn multiply_accumulates_match_the_closed_forms_on_every_layout() {
    let case = Case::new();
    let (width, length, vocabulary) = (16, 16, 256);
    // `samples` is the number of samples per replica: four for one replica, two each for two replicas.
    for (out, ranks, samples, more) in [
        ("one", "1", 4, ["train_micro_batch_size_per_gpu=4", "zero_optimization.stage=1"]),
        ("two", "2", 2, ["train_micro_batch_size_per_gpu=2", "zero_optimization.stage=3"]),
        ("accumulated", "1", 4, ["train_micro_batch_size_per_gpu=2", "gradient_accumulation_steps=2"]),
        ("stages", "2", 4, ["pipeline.stages=2", "gradient_accumulation_steps=2"]),
    ] {
        let seen = samples * length * (length + 1) / 2 * width;
        let (linear, head) = (samples * length * 12 * width * width, samples * length * width * vocabulary);
        let set = sets(&[more[0], more[1], PROFILE]);
        case.train(&[&["--plain", "-n", ranks, "--max-steps", "2", "--out", out], &set[..]].concat());
        let profile = fs::read_to_string(case.path("profiles/second.txt")).unwrap();
        let thousands = |macs: usize| format!("{:.2}", macs as f64 / 1e3);
        for block in ["0", "1"] {
            let row = row(&profile, block);
            assert_eq!(row[..3], [block, "3.28", "K"], "{out}: {profile}");
            assert_eq!(row[4..6], [&thousands(linear + 2 * seen), "K"], "{out}: {profile}");
            assert_eq!(row[9..11], [&thousands(2 * linear + 5 * seen), "K"], "{out}: {profile}");
        }
        // The head's forward runs inside its backward. Its weight is tied to the embedding and counts once in the
        // total.
        let of_head = row(&profile, "lm_head");
        assert_eq!((of_head[4], of_head[8]), ("0", &*thousands(3 * head)), "{out}: {profile}");
        assert_eq!(row(&profile, "model")[1..3], ["10.94", "K"], "{out}: {profile}");
        assert!(profile.contains("profile of step:                                                  2\n"), "{profile}");
        fs::remove_file(case.path("profiles/second.txt")).unwrap();
    }
}

#[test]
fn recomputation_adds_the_forward_to_the_backward() {
    let case = Case::new();
    let set = sets(&[PROFILE, "activation_checkpointing={number_checkpoints: 4}"]);
    case.train(&[&["--quiet", "-n", "2", "--max-steps", "2"], &set[..]].concat());
    let profile = fs::read_to_string(case.path("profiles/second.txt")).unwrap();
    let macs = |column: usize| row(&profile, "0")[column].parse::<f64>().unwrap();
    // The backward takes the closed form above plus one forward.
    assert_eq!((macs(4), macs(9)), (107.01, 325.38), "{profile}");
}

#[test]
fn profilers_print_their_results_and_do_not_change_the_training() {
    let case = Case::new();
    let common = ["--plain", "-n", "2", "--max-steps", "4"];
    case.train(&[&common[..], &["--out", "without"]].concat());
    let all = sets(&[
        "flops_profiler={enabled: true, module_depth: 1, top_modules: 2}",
        "memory_breakdown=true",
        "wall_clock_breakdown=true",
        "comms_logger={enabled: true, verbose: true}",
        "steps_per_print=2",
    ]);
    let out = case.train(&[&common[..], &all, &["--out", "with"]].concat());
    assert_eq!((case.losses("with"), case.shards("with", 4)), (case.losses("without"), case.shards("without", 4)));
    for part in
        ["profile of step:", "depth 1:", "peak memory in each part of step 4, by rank", "comm op: all_gather | "]
    {
        assert!(out.contains(part), "{part} is not in {out}");
    }
    assert!(!out.contains("depth 2:"), "{out}");
    // The table is printed at steps 1, 2 and 4. For each rank, it has a row for each of four parts of the step.
    assert_eq!(out.matches("peak memory in each part").count(), 3, "{out}");
    let table = out.split("peak memory in each part of step 4, by rank\n").nth(1).unwrap();
    let rows: Vec<&str> = table.lines().skip(1).take(8).collect();
    let is_of = |row: &&str| row.trim_start().starts_with("1  backward");
    assert_eq!(rows.iter().filter(|row| is_of(row)).count(), 1, "{out}");
    // Gradients are resident from the backward until the update.
    let gradients = |part: &str| {
        let row = rows.iter().find(|row| row.trim_start().starts_with(&format!("0  {part}"))).unwrap();
        row.split("  ").filter(|cell| !cell.trim().is_empty()).nth(3).unwrap().trim()
    };
    assert_eq!((gradients("forward"), gradients("end")), ("0 B", "0 B"), "{out}");
    assert_eq!((gradients("backward"), gradients("step")), ("17.5 kB", "17.5 kB"), "{out}");
    // The summary counts all calls of all operations.
    let summary = out.split("Comm. Op").nth(1).unwrap();
    for operation in ["all_gather", "reduce_scatter", "all_reduce"] {
        let of = summary.split(&format!("\n{operation}\n")).nth(1).unwrap();
        let counts = of.lines().take_while(|line| line.starts_with(' '));
        let calls: u64 = counts.map(|line| line[40..60].trim().parse::<u64>().unwrap()).sum();
        // The summary may count a few more calls, because gathering the report itself uses collectives.
        let reported = case.report("with")["collectives"][operation]["calls"].as_u64().unwrap();
        assert!(calls >= reported && calls <= reported + 8, "{operation}: {calls}, {reported}: {out}");
    }
}

#[test]
fn a_profile_that_cannot_be_written_is_a_warning() {
    let case = Case::new();
    fs::write(case.path("file"), "").unwrap();
    let output = case.run(&["--quiet", "--set", "flops_profiler={enabled: true, output_file: file/profile.txt}"]);
    let errors = text(&output.stderr);
    assert!(output.status.success() && errors.lines().count() == 1, "{errors}");
    assert!(errors.starts_with("warning: cannot write the profile: file: "), "{errors}");
    assert!(errors.contains("set `flops_profiler.output_file` to another file"), "{errors}");
}

#[test]
fn a_run_without_the_step_to_profile_warns() {
    let case = Case::new();
    let args = |steps| ["--plain", "--max-steps", steps, "--resume", "auto", "--set", PROFILE];
    let errors = |steps: &'static str| text(&case.run(&args(steps)).stderr);
    let warning = |steps: &str| {
        format!(
            "warning: `flops_profiler.profile_step` is 2, but this run trains the steps {steps}: no step is profiled\n"
        )
    };
    assert_eq!(errors("1"), warning("1 to 1"));
    assert_eq!(errors("3"), "");
    assert_eq!(errors("4"), warning("4 to 4"));
}
