//! `zero-train plan`: prints how much memory a configuration needs, and which changes would make it fit.

mod hosts;

use zero_config::Config;
use zero_planner::{Limit, MemoryKind, Plan, Planner, Ranks};

use crate::arguments::{ConfigArgs, PlanArgs};
use crate::input::{load, load_sources, read};
use crate::printed::{show, warn};
use zero_train::process;
use zero_train::process::launch::one_a_gpu;

/// Plans the configuration and prints the requested information. Returns the exit status.
///
/// # Errors
/// Fails if the configuration cannot be trained.
pub(crate) fn plan(args: &PlanArgs) -> anyhow::Result<u8> {
    let mut overrides = args.config.set.clone();
    overrides.extend(args.costs.iter().map(|table| format!("training.cost_table={:?}", table.display().to_string())));
    let sources = read(&args.config)?;
    let typed = load_sources(&args.config, sources.clone(), &overrides)?;
    let ranks = args.world_size.or(args.config.num_processes).map(|ranks| ranks as usize);
    let config = match args.hosts {
        Some(hosts) => {
            let world = ranks.map_or_else(|| Ok(typed.resolve(None)?.world_size), anyhow::Ok)?;
            typed.on_hosts(hosts::ranks_of_each(hosts as usize, world)?).resolve(Some(world))?
        }
        None => typed.resolve(ranks.or_else(|| one_a_gpu(&typed)))?,
    };
    warn(&config);
    zero_model::ops::set_threads(process::threads(Some(&config.launcher), config.world_size));
    let planner = zero_train::train::planner(&config)?;
    let plan = planner.plan(&config)?;
    let hosts = args
        .hosts
        .map(|hosts| hosts::compare(args, hosts as usize, (&sources, &overrides), &config, &planner))
        .transpose()?;
    // With `--world-size`, the ranks run on other machines, whose memory is unknown.
    let here = args.world_size.is_none();
    let memory = MemoryKind::of_layers(&config);
    let written = args.device_memory.map(|bytes| Limit { memory, bytes, source: "`--device-memory`" });
    let mut limits = match here {
        true => Limit::all_of_rank(&config, config.ranks_per_host()),
        false if config.training.memory_limit.is_some() => {
            Limit::of_rank(&config, config.ranks_per_host()).into_iter().collect()
        }
        false => vec![],
    };
    if let Some(written) = written {
        limits.retain(|limit| limit.memory != memory);
        limits.insert(0, written);
    }
    let limit = limits.iter().find(|limit| limit.memory == memory).map(|limit| limit.bytes);
    if args.json {
        let mut value = plan.value();
        if let Some(hosts) = hosts {
            value["hosts"] = hosts.value(limit);
        }
        show(&format!("{value:#}\n"));
        return Ok(0);
    }
    show(&format!("{plan}\n"));
    if !limits.is_empty() {
        let told = match plan.exceeded(&limits) {
            None => {
                let told = limits.iter().map(|limit| limit.told(plan.peak_in(limit.memory), "and"));
                format!("fits: {}", told.collect::<Vec<_>>().join("; "))
            }
            Some(limit) => does_not_fit(&plan, limit, &limits, &args.config, &overrides, &config, &planner)?,
        };
        show(&format!("{told}\n"));
    }
    if let Some(hosts) = hosts {
        show(&format!("{}\n", hosts.text(limit)));
    }
    if args.stages {
        show("\nstate per rank (parameters, gradients, optimizer), without pipeline and offload:\n");
        show(&plan.stages_over_ranks(&[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]));
        if config.training.cost_table.is_some() {
            let ranks = zero_engine::counted(config.world_size, "rank", "ranks");
            show(&format!("\nstep time with {ranks}, from the cost table:\n"));
            for stage in 0..=3 {
                let overrides = [&overrides[..], &[format!("zero_optimization.stage={stage}")]].concat();
                let told = match load(&args.config, &overrides)?
                    .0
                    .on_hosts(config.ranks_per_host())
                    .resolve(Some(config.world_size))
                {
                    Err(_) => "conflicts with other keys of the configuration".to_string(),
                    Ok(config) => match planner.memory_plan(&config)?.prediction() {
                        Some(Ok(time)) => format!("{:.1} ms", time.step_seconds * 1e3),
                        Some(Err(missing)) => format!("unknown: {missing}"),
                        None => continue,
                    },
                };
                show(&format!("stage {stage}  {told}\n"));
            }
        }
    }
    if args.grid {
        let terminal = console::Term::stdout();
        let columns = if terminal.is_term() { usize::from(terminal.size().1) } else { 120 };
        show(
            "\ntimeline, if the forward pass of a chunk takes 1 s, its backward pass takes 2 s, and messages take no time:\n",
        );
        show(&plan.grid(columns));
    }
    Ok(0)
}

/// Describes by how much a plan exceeds one of its limits, and which changes would make it fit.
pub(crate) fn does_not_fit(
    plan: &Plan,
    limit: Limit,
    limits: &[Limit],
    args: &ConfigArgs,
    overrides: &[String],
    config: &Config,
    planner: &Planner,
) -> anyhow::Result<String> {
    let with = |settings: &[String], ranks: usize| {
        let all = [overrides, settings].concat();
        let typed = load(args, &all).map_err(|e| zero_train::Error::Batch(e.to_string()))?.0;
        Ok(typed.on_hosts(config.ranks_per_host()).resolve(Some(ranks))?)
    };
    let memory_plan = |config: &Config| planner.memory_plan(config);
    let found = zero_planner::advice(config, limits, |settings| with(settings, config.world_size), memory_plan)?;
    let mut text = format!("does not fit: {}", limit.told(plan.peak_in(limit.memory), "but"));
    if !found.is_empty() {
        text += "\n  help: any one of these changes makes it fit:";
        found.iter().for_each(|advice| text += &format!("\n    {advice}"));
        return Ok(text);
    }
    // If all ranks run on this machine, fewer ranks leave more memory for each of them.
    let is_here = limits == Limit::all_of_rank(config, config.world_size) && config.training.memory_limit.is_none();
    let shares = |ranks: usize| Limit::all_of_rank(config, ranks);
    let shares: Option<&dyn Fn(usize) -> Vec<Limit>> = if is_here { Some(&shares) } else { None };
    text += "\n  help: no change of ZeRO stage, micro-batch, recomputation or offload makes it fit; ";
    text += &match zero_planner::other_ranks(config, limits, shares, with, memory_plan) {
        Some(Ranks { ranks, settings, peak_bytes, limit }) => {
            let settings: String = settings.iter().map(|setting| format!(" --set {setting}")).collect();
            let (needs, has) = (zero_engine::bytes(peak_bytes), zero_engine::bytes(limit));
            match ranks < config.world_size {
                true => format!("use fewer ranks on this machine: with {ranks}, each rank needs {needs} and may use {has}"),
                false => format!("use more ranks with the same memory each: with {ranks}{settings}, each rank needs {needs}"),
            }
        }
        None => "more ranks do not help either, because one layer and its activations are too large: use smaller layers or samples, or \
                 give each rank more memory"
            .to_string(),
    };
    Ok(text)
}
