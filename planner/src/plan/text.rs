//! Prints a plan for the user: tables of stages, memory and time.

use std::fmt;

use zero_config::PartitionMethod;
use zero_engine::costs::Prediction;
use zero_engine::format::{bytes, counted, grouped};
use zero_model::memory::Exchanged;
use zero_partition::{Layout, LayoutOptions, expected_state};
use zero_pipeline::{Coordinates, Stages, ZeroStage};

use super::drawing::drawing;
use super::{Plan, Share};

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mesh = self.memory_plan.stage_plan.whole;
        let slices = match mesh.context() {
            1 => String::new(),
            size => format!(" × {size} slices of each sequence"),
        } + &match mesh.tensor() {
            1 => String::new(),
            size => format!(" × {size} parts of each layer"),
        };
        writeln!(
            f,
            "{} = {} × {}, ZeRO stage {}, {} per step = {} × {} × {}",
            counted(mesh.world_size(), "rank", "ranks"),
            counted(mesh.pipe(), "pipeline stage", "pipeline stages"),
            match mesh.replicates() {
                1 => counted(mesh.data_parallel(), "replica", "replicas") + &slices,
                groups => {
                    let shards = counted(mesh.shards() / mesh.context(), "rank", "ranks");
                    format!("{groups} shard groups × {shards}{slices}")
                }
            },
            self.memory_plan.settings.layout.zero_stage.number(),
            counted(self.memory_plan.config.train_batch_size, "sample", "samples"),
            self.memory_plan.settings.micro_batch_size,
            counted(self.memory_plan.settings.micro_batches, "micro-batch", "micro-batches"),
            counted(mesh.data_parallel(), "replica", "replicas"),
        )?;
        drawing(mesh).iter().try_for_each(|line| writeln!(f, "{line}"))?;
        let averaging = self.memory_plan.averaging.as_ref();
        let local_steps = averaging.map_or(1, |(_, steps)| *steps as u64);
        let header = ["stage", "ranks", "parameters", "state/rank", "sent/step", "alive", "layers"];
        let mut rows = vec![header.map(String::from)];
        for stage in 0..mesh.pipe() {
            let (share, ranks) = (self.share(stage), mesh.ranks(stage));
            rows.push([
                stage.to_string(),
                if ranks.len() == 1 { ranks.start.to_string() } else { format!("{}-{}", ranks.start, ranks.end - 1) },
                grouped(share.parameters as u64),
                bytes(share.state.total()),
                bytes(share.sent.total() + share.sent_outer.div_ceil(local_steps)),
                share.alive.to_string(),
                share.layers,
            ]);
        }
        let widths: Vec<usize> =
            (0..7).map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0)).collect();
        for row in &rows {
            let cells = row[..6].iter().zip(&widths).map(|(cell, &width)| format!("{cell:>width$}"));
            writeln!(f, "{}  {}", cells.collect::<Vec<_>>().join("  "), row[6])?;
        }
        writeln!(
            f,
            "sent: bytes of collectives and tied parameters, without activations. alive: micro-batches between forward and backward"
        )?;
        if averaging.is_some() {
            let shares: Vec<_> = (0..mesh.pipe()).map(|stage| self.share(stage)).collect();
            let join = |of: fn(&Share) -> u64| shares.iter().map(of).map(bytes).collect::<Vec<_>>().join(" | ");
            writeln!(
                f,
                "each replicate trains independently for {}; an outer step sends {} per rank, {} to other replicates; `sent/step` includes 1/{local_steps} of these bytes",
                counted(local_steps as usize, "step", "steps"),
                join(|share| share.sent_outer),
                join(|share| share.sent_between),
            )?;
        }
        let exchanged = self.exchanged();
        let sent_inside = |part: fn(Exchanged) -> u64| {
            let of_stages = match &exchanged {
                Some(of_stages) => of_stages.iter().map(|&sent| bytes(part(sent))).collect(),
                None => vec!["unknown".to_string(); mesh.pipe()],
            };
            of_stages.join(" | ")
        };
        if mesh.context() > 1 {
            let sent = sent_inside(Exchanged::context);
            writeln!(f, "sent in attention per step to the ranks that share sequences: {sent}")?;
        }
        if mesh.tensor() > 1 {
            let sent = sent_inside(|sent| sent.tensor);
            writeln!(f, "sent in layers per step to the ranks that split them: {sent}")?;
        }
        let layout = &self.memory_plan.layout;
        if let Some(near) = layout.secondary() {
            let across: Vec<String> = (0..mesh.pipe()).map(|stage| bytes(self.share(stage).sent.across)).collect();
            writeln!(f, "secondary shards in groups of {near} ranks; sent to other groups: {}", across.join(" | "))?;
        }
        let model = &self.memory_plan.model;
        let (trainable, all) = (model.trainable_elements() as u64, model.elements() as u64);
        if trainable < all {
            writeln!(f, "trainable: {} of {} parameters; the others are frozen", grouped(trainable), grouped(all))?;
        }
        self.memory(f)?;
        if self.memory_plan.config.pipeline.stages > 1
            && self.memory_plan.config.pipeline.partition_method == PartitionMethod::Time
        {
            writeln!(
                f,
                "this plan assumes that all layers take the same time; a run first measures the layers, then divides them into stages by time"
            )?;
        }
        if let Some(gathering) = self.memory_plan.stage_plan.gathering(self.memory_plan.layout.shape()) {
            writeln!(f, "{gathering}")?;
        }
        if let Some(choice) = self.memory_plan.choice {
            writeln!(f, "{choice}")?;
        }
        if let Some(prediction) = &self.prediction {
            self.time(prediction, f)?;
        }
        write!(
            f,
            "{}: {:.1} % of a step is bubble if all layer chunks take the same time",
            self.memory_plan.stage_plan.schedule,
            self.bubble() * 100.0
        )
    }
}

impl Plan {
    pub(super) fn has_gpu(&self) -> bool {
        self.memory_plan.settings.zero.on_gpu.layers
    }

    /// Writes the peak bytes by category. The categories peak at different times, so the total peak is at most the sum
    /// of their peaks.
    fn memory(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = ["parameters", "gradients", "optimizer", "activations", "messages", "staging"];
        // With a GPU, there are separate totals for the GPU and the host.
        let at_a_time: &[&str] = if self.has_gpu() { &["on the GPU", "on the host"] } else { &["peak"] };
        let heads = ["stage"].iter().chain(&names).chain(at_a_time).chain(&["disk"]);
        let mut rows = vec![heads.map(ToString::to_string).collect::<Vec<_>>()];
        for (stage, needs) in self.memory_plan.needs.iter().enumerate() {
            let mut row = vec![stage.to_string()];
            row.extend(needs.peaks.by_category.iter().map(|&b| bytes(b)));
            if self.has_gpu() {
                row.push(bytes(needs.peaks.gpu));
            }
            row.push(bytes(needs.peaks.total));
            row.push(bytes(needs.disk_bytes()));
            rows.push(row);
        }
        writeln!(f, "peak memory per rank:")?;
        table(f, &rows)?;
        match self.knows_activations() {
            true => writeln!(
                f,
                "categories peak at different times, so the total peak is at most the sum of their peaks; staging: buffers kept for reuse"
            ),
            false => {
                writeln!(
                    f,
                    "these peaks exclude activations, because the model has a layer whose activations are known only when it runs"
                )
            }
        }
    }

    fn time(&self, prediction: &Result<Prediction, String>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prediction = match prediction {
            Ok(prediction) => prediction,
            Err(missing) => return writeln!(f, "time unknown: the cost table does not apply to this plan: {missing}"),
        };
        let tokens = prediction.tokens_per_second.map_or(String::new(), |rate| format!(", {rate:.0} tokens/s"));
        writeln!(f, "predicted step time: {:.1} ms{tokens}", prediction.step_seconds * 1e3)?;
        let names = ["stage", "computes", "idle", "collectives", "sends", "disk"];
        let mut rows = vec![names.map(String::from).to_vec()];
        // Show only the first rank of each stage.
        for stage in 0..self.memory_plan.stage_plan.mesh.pipe() {
            let rank = prediction.ranks[self.memory_plan.stage_plan.mesh.ranks(stage).start];
            let times = [rank.computing, rank.idle, rank.collectives, rank.sending, rank.disk];
            let times = times.map(|seconds| format!("{:.1} ms", seconds * 1e3));
            rows.push(std::iter::once(stage.to_string()).chain(times).collect());
        }
        table(f, &rows)
    }

    /// Returns a table of the bytes of state per rank, for each ZeRO stage and for several numbers of ranks. It is
    /// figure 1 of the ZeRO paper, computed for this model.
    #[must_use]
    pub fn stages_over_ranks(&self, ranks: &[usize]) -> String {
        let mut rows = vec![["ranks", "stage 0", "stage 1", "stage 2", "stage 3"].map(String::from).to_vec()];
        let widths = self.memory_plan.settings.zero.widths(self.memory_plan.settings.dtype.size_in_bytes());
        let stages = Stages::single(self.memory_plan.layout.shape());
        for &ranks in ranks {
            let of_stage = |zero_stage: u8| {
                let zero_stage = ZeroStage::from_number(zero_stage).unwrap_or(ZeroStage::Zero);
                let layout = Layout::new(
                    &self.memory_plan.model,
                    &LayoutOptions { zero_stage, ranks, secondary: None, ..self.memory_plan.settings.layout },
                );
                let at = Coordinates::first(0);
                bytes(expected_state(&layout, &stages, at, &widths).total())
            };
            rows.push(std::iter::once(ranks.to_string()).chain((0..4).map(of_stage)).collect());
        }
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = table(&mut text, &rows);
        text
    }
}

/// Right-aligns the columns.
fn table(f: &mut impl fmt::Write, rows: &[Vec<String>]) -> fmt::Result {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for row in rows {
        let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:>width$}"));
        writeln!(f, "{}", cells.collect::<Vec<_>>().join("  "))?;
    }
    Ok(())
}
