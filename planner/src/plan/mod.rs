//! Plans a configuration before it runs: which rank has which layers, what it needs, and the step as a grid.

mod drawing;
mod text;

use std::collections::BTreeMap;

use serde_json::{Value, json};
use zero_config::{Config, Transport};
use zero_model::memory::Exchanged;
use zero_model::{Layers, Model};
use zero_partition::{
    CATEGORIES, Hosts, Layout, Payload, Segment, StateBytes, expected_payload, expected_state, expected_tensor_sum,
    network_bytes,
};
use zero_pipeline::simulate::{Costs, LayerCosts, SegmentCosts};
use zero_pipeline::{Content, Coordinates, Mesh, Program, StageId, Timeline, alive, grid};

use crate::disk::check_space;
use crate::memory::{Needs, needs};
use zero_engine::Error;
use zero_engine::configured_model;
use zero_engine::costs::cut::CutCosts;
use zero_engine::costs::forms::{Table, tokens};
use zero_engine::costs::subject::Subject;
use zero_engine::costs::{Choice, CostTable, Prediction, choose, costs};
use zero_engine::settings::{Settings, with_total_steps, working_dtype};
use zero_engine::stage_plan::StagePlan;

/// The memory part of a plan: enough to tell whether a configuration fits. The programs are not validated.
pub struct MemoryPlan {
    config: Config,
    settings: Settings,
    model: Model,
    layout: Layout,
    stage_plan: StagePlan,
    /// The program of each stage.
    programs: Vec<Program>,
    /// The program of each stage for an outer step, and the steps between two of them; `None` unless replicates train alone.
    averaging: Option<(Vec<Program>, usize)>,
    /// The needs of each stage.
    needs: Vec<Needs>,
    /// From `training.cost_table`.
    table: Option<CostTable>,
    choice: Option<Choice>,
}

/// The plan of a training step of all ranks.
pub struct Plan {
    memory_plan: MemoryPlan,
    /// The simulation of two replicas.
    timeline: Timeline,
    /// The prediction from the configuration's cost table.
    prediction: Option<Result<Prediction, String>>,
}

/// The share of one rank of a stage.
struct Share {
    layers: String,
    parameters: usize,
    /// Those that training changes.
    trainable: usize,
    state: StateBytes,
    /// Bytes sent per step, except activations and their gradients, whose sizes are only known at run time.
    sent: Payload,
    /// Bytes sent in an outer step of replicates that train alone, and those of them that go to other replicates.
    sent_outer: u64,
    sent_between: u64,
    alive: usize,
}

/// Plans configurations that train on the same data.
#[derive(Debug, Clone)]
pub struct Planner {
    vocabulary: Option<usize>,
}

impl Planner {
    /// Creates a planner. `vocabulary` is the vocabulary size of the data's tokenizer, for `model.vocab_size: auto`.
    #[must_use]
    pub fn new(vocabulary: Option<usize>) -> Self {
        Self { vocabulary }
    }

    /// Plans a configuration that is resolved for its number of ranks. Starts nothing.
    ///
    /// # Errors
    /// Returns any error that would keep the ranks from starting.
    pub fn plan(&self, config: &Config) -> Result<Plan, Error> {
        self.memory_plan(config)?.plan()
    }

    /// Plans the memory of a configuration.
    ///
    /// # Errors
    /// Fails if the model cannot be built or split into stages.
    pub fn memory_plan(&self, config: &Config) -> Result<MemoryPlan, Error> {
        let layers = configured_model::from_config(config, self.vocabulary)?;
        MemoryPlan::new(with_total_steps(config.clone(), 1), layers)
    }
}

impl MemoryPlan {
    /// Plans the memory of a configuration that is resolved for its number of ranks. Starts no ranks and allocates no
    /// parameters.
    ///
    /// # Errors
    /// Fails if the model cannot be built or split into stages.
    pub fn new(config: Config, model: Layers) -> Result<Self, Error> {
        let model = configured_model::cut(&config, model, 0)?;
        let model = configured_model::build(&config, model, working_dtype(&config)?)?;
        // Costs that would have to be measured are assumed equal.
        let equal = CutCosts::equal(model.layers().len());
        let mut config = config;
        let choice = choose(&config, &model, Some(&equal))?;
        if let Some(choice) = choice {
            config.zero.overlap_comm = Some(choice.overlap);
        }
        let table = config.training.cost_table.as_deref().map(CostTable::read).transpose()?;
        let settings = Settings::new(&config, &model)?;
        let layout = Layout::new(&model, &settings.layout).on_disk(&settings.tiers);
        let stage_plan = StagePlan::new(&config, &settings, &model, &layout, Some(&equal))?;
        let programs = stage_plan.training(layout.shape());
        let subject = Subject {
            config: &config,
            settings: &settings,
            model: &model,
            layout: &layout,
            stage_plan: &stage_plan,
            programs: &programs,
        };
        let needs = needs(&subject);
        let averaging = config.training.local_steps.map(|local| (stage_plan.averaging(layout.shape()), local.steps));
        Ok(Self { config, settings, model, layout, stage_plan, programs, averaging, needs, table, choice })
    }

    /// Returns the peak bytes of the busiest rank, as the allocator counts them: without the program itself.
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        self.needs.iter().map(|needs| needs.peaks.total).max().unwrap_or(0)
    }

    /// Returns the most bytes that a rank needs on its disk.
    #[must_use]
    pub fn disk_bytes(&self) -> u64 {
        self.needs.iter().map(|needs| needs.disk.optimizer + needs.disk.parameters).max().unwrap_or(0)
    }

    /// Returns the bytes that hosts of `ranks` ranks send to each other in a step: the sum over the hosts, with the share of a step
    /// in an outer step of replicates that train alone. `None` if the sizes of
    /// activations that cross hosts are only known in a run, or if `launcher.transport` keeps the ranks of a host from using shared
    /// memory among themselves.
    ///
    /// # Panics
    /// Panics if `ranks` is 0.
    #[must_use]
    pub fn network_bytes(&self, ranks: usize) -> Option<u64> {
        if ranks > 1 && self.config.launcher.transport != Transport::Auto {
            return None;
        }
        // Ranks that share sequences in both ways do not send the same to each of the others.
        if self.config.sequence_parallel_size > 1 && self.config.mesh.context_parallel_degree > 1 {
            return None;
        }
        let mesh = self.stage_plan.whole;
        let needs_sizes = mesh.pipe() > 1 || mesh.context() > 1 || mesh.tensor() > 1;
        let table = needs_sizes.then(|| self.subject().table());
        if let Some(None) = table {
            return None;
        }
        let table = table.flatten();
        let activations = |content: &Content| {
            let Some(table) = &table else { return 0 };
            match *content {
                Content::Activations { layer, .. } => table.inputs[layer] as usize,
                Content::Gradients { layer, .. } => {
                    table.layers.get(layer).map_or(table.loss.input_gradients, |memory| memory.input_gradients) as usize
                }
                Content::TiedGradient { .. } | Content::TiedParameters { .. } => 0,
            }
        };
        let width = self.settings.dtype.size_in_bytes();
        let of = |programs: &[Program]| {
            let of_plane = |plane| {
                let hosts = Hosts { mesh, ranks, plane };
                network_bytes(programs, &self.layout, hosts, width, &self.settings.zero, activations)
            };
            (0..mesh.tensor()).map(of_plane).sum::<u64>()
        };
        let exchanged = table.as_ref().map_or(0, |table| self.exchanged_between_hosts(table, mesh, ranks));
        let outer = self.averaging.as_ref().map_or(0, |(programs, steps)| of(programs).div_ceil(*steps as u64));
        Some(of(&self.programs) + exchanged + outer)
    }

    /// Returns the bytes that ranks send inside of layers to ranks on other hosts that share their sequences or cut their layers, if
    /// each rank sends the same to every other rank of its group. `ranks` are those of a host.
    fn exchanged_between_hosts(&self, table: &Table, mesh: Mesh, ranks: usize) -> u64 {
        let elsewhere =
            |rank: usize, group: &[usize]| group.iter().filter(|&&other| other / ranks != rank / ranks).count() as u64;
        let part = |sent: u64, rank: usize, group: Vec<usize>| {
            (sent * elsewhere(rank, &group)).checked_div(group.len() as u64 - 1).unwrap_or(0)
        };
        let of_stage = |(stage, program): (usize, &Program)| {
            let sent = table.exchanged(program);
            let of_rank = |rank| {
                let tensor = sent.tensor + self.tensor_sum(mesh.coordinates(rank));
                part(sent.context, rank, mesh.context_ranks(rank)) + part(tensor, rank, mesh.tensor_ranks(rank))
            };
            mesh.ranks(stage).map(of_rank).sum::<u64>()
        };
        self.programs.iter().enumerate().map(of_stage).sum()
    }

    /// Returns the bytes that a rank sends to its tensor group in the sum of the gradients of parameters that are not cut.
    fn tensor_sum(&self, at: Coordinates) -> u64 {
        let of = (&self.layout, &self.model, &self.stage_plan.stages);
        expected_tensor_sum(of, at, (0, self.stage_plan.whole.tensor()))
    }

    fn subject(&self) -> Subject<'_> {
        Subject {
            config: &self.config,
            settings: &self.settings,
            model: &self.model,
            layout: &self.layout,
            stage_plan: &self.stage_plan,
            programs: &self.programs,
        }
    }

    /// Predicts the time of a step from the configuration's cost table, or returns what the table lacks; `None` if the
    /// configuration names no table.
    #[must_use]
    pub fn prediction(&self) -> Option<Result<Prediction, String>> {
        Some(self.predict(self.table.as_ref()?))
    }

    /// Predicts the time of a step from a cost table.
    ///
    /// # Errors
    /// Describes what the table lacks.
    pub fn predict(&self, table: &CostTable) -> Result<Prediction, String> {
        let tokens = tokens(&self.config).map(|tokens| tokens * self.config.train_batch_size);
        let mut prediction = Prediction::of(&self.timeline(table)?, None);
        if let Some((programs, steps)) = &self.averaging {
            prediction.step_seconds += self.simulated(programs, table)?.makespan() / *steps as f64;
        }
        Ok(prediction.with_tokens(tokens))
    }

    /// Simulates a step with a cost table: what each rank does at which time.
    ///
    /// # Errors
    /// Describes what the table lacks.
    pub(crate) fn timeline(&self, table: &CostTable) -> Result<Timeline, String> {
        self.simulated(&self.programs, table)
    }

    fn simulated(&self, programs: &[Program], table: &CostTable) -> Result<Timeline, String> {
        let costs = costs(table, &self.subject())?;
        self.stage_plan.simulate(programs, self.layout.shape(), &costs).map_err(|e| e.to_string())
    }

    /// Returns the number of elements of all parameters.
    #[must_use]
    pub fn parameters(&self) -> usize {
        self.model.elements()
    }

    /// Validates the programs of all ranks and simulates them.
    ///
    /// # Errors
    /// Fails if a program is invalid.
    pub fn plan(self) -> Result<Plan, Error> {
        let (stage_plan, shape) = (&self.stage_plan, self.layout.shape());
        stage_plan.validate(&self.programs, shape)?;
        stage_plan.validate(&stage_plan.evaluation(shape, 1), shape)?;
        if let Some((programs, _)) = &self.averaging {
            stage_plan.validate(programs, shape)?;
        }
        let costs = equal_chunks(stage_plan, &self.layout);
        let timeline = stage_plan.of_two_replicas().simulate(&self.programs, shape, &costs)?;
        let prediction = self.prediction();
        Ok(Plan { memory_plan: self, timeline, prediction })
    }
}

impl Plan {
    /// Plans a configuration that is resolved for its number of ranks. Starts no ranks and allocates no parameters.
    ///
    /// # Errors
    /// Returns any error that would keep the ranks from starting: the model cannot be built or split into stages, or a
    /// program is invalid.
    pub fn new(config: Config, model: Layers) -> Result<Self, Error> {
        MemoryPlan::new(config, model)?.plan()
    }

    /// Checks that the disks have room for offloaded data.
    ///
    /// # Errors
    /// Fails if a folder is too small or not writable; the error names its key.
    pub fn check_disks(&self) -> Result<(), Error> {
        check_space(&self.memory_plan.layout, &self.memory_plan.stage_plan, &self.memory_plan.settings)
    }

    /// Draws the step as a grid with a row per stage and a column per time slot. Assumes that every chunk of layers
    /// takes equally long, a backward twice as long as a forward, and communication no time.
    #[must_use]
    pub fn grid(&self, columns: usize) -> String {
        let few = self.memory_plan.stage_plan.of_two_replicas();
        grid::grid(&self.timeline, &few.stages, few.mesh, columns)
    }

    /// Returns the fraction of a step in which even the busiest stage is idle, under the same assumptions.
    #[must_use]
    pub fn bubble(&self) -> f64 {
        self.timeline.bubble()
    }

    /// Simulates the programs of all ranks with a table of costs.
    ///
    /// # Errors
    /// Fails if the table is for another model.
    pub fn simulate(&self, costs: &Costs) -> Result<Timeline, Error> {
        self.memory_plan.stage_plan.simulate(&self.memory_plan.programs, self.memory_plan.layout.shape(), costs)
    }

    /// Returns the peak bytes of the busiest rank, as the allocator counts them: without the program itself.
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        self.memory_plan.peak_bytes()
    }

    /// Returns the most bytes that a rank needs on its disk.
    #[must_use]
    pub fn disk_bytes(&self) -> u64 {
        self.memory_plan.disk_bytes()
    }

    /// Returns whether the memory of the layers' activations is known and included.
    #[must_use]
    pub fn knows_activations(&self) -> bool {
        self.memory_plan.needs.iter().all(|needs| needs.with_activations)
    }

    /// Returns the predicted time of a step from the configuration's cost table, or what the table lacks; `None` if the
    /// configuration names no table.
    #[must_use]
    pub fn prediction(&self) -> Option<&Result<Prediction, String>> {
        self.prediction.as_ref()
    }

    /// Predicts the time of a step from a cost table.
    ///
    /// # Errors
    /// See [`MemoryPlan::predict`].
    pub fn predict(&self, table: &CostTable) -> Result<Prediction, String> {
        self.memory_plan.predict(table)
    }

    /// Returns the program of a stage.
    #[must_use]
    pub fn program(&self, stage: StageId) -> &Program {
        &self.memory_plan.programs[stage]
    }

    fn share(&self, stage: StageId) -> Share {
        let (stages, shape) = (&self.memory_plan.stage_plan.stages, self.memory_plan.layout.shape());
        let held = || (0..shape.segments.len()).filter(|&segment| stages.holds(stage, segment));
        let parameters = self.memory_plan.model.parameters();
        let elements = |segment: usize| -> usize {
            let pieces = &self.memory_plan.layout.segments()[segment].pieces;
            pieces.iter().map(|piece| parameters[piece.parameter].whole_elements()).sum()
        };
        let at = Coordinates::first(stage);
        let widths = self.memory_plan.settings.zero.widths(self.memory_plan.settings.dtype.size_in_bytes());
        let options = &self.memory_plan.settings.zero;
        let sent = |program: &Program| {
            let place = (self.memory_plan.stage_plan.mesh, at);
            expected_payload(program, &self.memory_plan.layout, place, widths.parameter, options, |_| 0)
        };
        let averaging = self.memory_plan.averaging.as_ref();
        Share {
            layers: self.memory_plan.stage_plan.layers_of(stage, shape),
            parameters: held().map(elements).sum(),
            trainable: held().filter(|&segment| shape.segments[segment].is_trainable).map(elements).sum(),
            state: expected_state(&self.memory_plan.layout, stages, at, &widths),
            sent: sent(&self.memory_plan.programs[stage]),
            sent_outer: averaging.map_or(0, |(programs, _)| sent(&programs[stage]).total()),
            sent_between: options.outer.map_or(0, |outer| {
                let layout = &self.memory_plan.layout;
                let updated = |segment: &Segment| segment.held(segment.placements.optimizer, at.shard).len();
                let is_owned = |&id: &usize| stages.owner(id) == stage && layout.segments()[id].is_trainable;
                let owned = (0..layout.segments().len()).filter(is_owned);
                owned.map(|id| outer.share.sent_bytes(updated(&layout.segments()[id])) as u64).sum()
            }),
            alive: alive(&self.memory_plan.programs[stage], stages),
        }
    }

    /// Returns the bytes that a rank of each stage sends in a step to the ranks that share its sequences or cut its layers; `None` if
    /// there are none, or if they are only known in a run. Where heads cannot be divided evenly, ranks differ.
    fn exchanged(&self) -> Option<Vec<Exchanged>> {
        let of = &self.memory_plan;
        let mesh = of.stage_plan.whole;
        let table = (mesh.context() > 1 || mesh.tensor() > 1).then(|| of.subject().table()).flatten()?;
        let of_stage = |(stage, program)| {
            let exchanged = table.exchanged(program);
            Exchanged { tensor: exchanged.tensor + of.tensor_sum(Coordinates::first(stage)), ..exchanged }
        };
        Some(of.programs.iter().enumerate().map(of_stage).collect())
    }

    /// Returns the plan as JSON.
    #[must_use]
    pub fn value(&self) -> Value {
        let mesh = self.memory_plan.stage_plan.whole;
        let exchanged = self.exchanged();
        let sent_inside = |stage: StageId, is_sent: bool, part: fn(Exchanged) -> u64| {
            exchanged.as_ref().filter(|_| is_sent).map(|of_stages| part(of_stages[stage]))
        };
        let stages = (0..mesh.pipe()).map(|stage| {
            let share = self.share(stage);
            json!({
                "stage": stage,
                "ranks": mesh.ranks(stage).collect::<Vec<_>>(),
                "layers": self.memory_plan.stage_plan.stages.layers_of(stage)
                    .map(|layer| self.memory_plan.layout.shape().layers[layer].name.clone()).collect::<Vec<_>>(),
                "parameters": share.parameters,
                "trainable_parameters": share.trainable,
                "state_bytes_per_rank": { "parameters": share.state.parameters, "gradients": share.state.gradients,
                    "optimizer_state": share.state.optimizer },
                "planned_peak_bytes": CATEGORIES.iter().map(ToString::to_string)
                    .zip(self.memory_plan.needs[stage].peaks.by_category).collect::<BTreeMap<_, _>>(),
                "planned_peak_total_bytes": self.memory_plan.needs[stage].peaks.total,
                "planned_peak_gpu_bytes": self.has_gpu().then_some(self.memory_plan.needs[stage].peaks.gpu),
                "activations_known": self.memory_plan.needs[stage].with_activations,
                "disk_bytes": { "optimizer": self.memory_plan.needs[stage].disk.optimizer, "parameters": self.memory_plan.needs[stage].disk.parameters },
                "sent_bytes_per_step_besides_activations": share.sent.total(),
                "sent_bytes_across_near_groups": share.sent.across,
                "sent_bytes_per_step_of_attention": sent_inside(stage, mesh.context() > 1, |sent| sent.context),
                "sent_bytes_per_step_to_tensor_group": sent_inside(stage, mesh.tensor() > 1, |sent| sent.tensor),
                "sent_bytes_per_outer_step": self.memory_plan.averaging.as_ref().map(|_| share.sent_outer),
                "sent_bytes_between_replicates_per_outer_step":
                    self.memory_plan.averaging.as_ref().map(|_| share.sent_between),
                "micro_batches_alive": share.alive,
                "keeps_gathered": self.memory_plan.stage_plan.gathering(self.memory_plan.layout.shape())
                    .map(|_| self.memory_plan.stage_plan.keeps_gathered(stage)),
                "instructions": self.memory_plan.programs[stage].instructions.len(),
            })
        });
        json!({
            "world_size": mesh.world_size(),
            "pipeline_stages": mesh.pipe(),
            "data_parallel_size": mesh.data_parallel(),
            "data_parallel_replicate_degree": mesh.replicates(),
            "data_parallel_shard_degree": mesh.shards() / mesh.context(),
            "sequence_parallel_size": self.memory_plan.config.sequence_parallel_size,
            "context_parallel_degree": self.memory_plan.config.mesh.context_parallel_degree,
            "tensor_parallel_size": mesh.tensor(),
            "local_steps": self.memory_plan.averaging.as_ref().map(|(_, steps)| steps),
            "zero_hpz_partition_size": self.memory_plan.settings.layout.secondary,
            "schedule": self.memory_plan.stage_plan.schedule.to_string(),
            "micro_batches": self.memory_plan.stage_plan.micro_batches,
            "zero_stage": self.memory_plan.settings.layout.zero_stage.number(),
            "bubble": self.bubble(),
            "planned_peak_bytes": self.peak_bytes(),
            "overlap_comm": self.memory_plan.settings.passes.gather.overlap,
            "time": self.prediction.as_ref().map(|time| match time {
                Ok(prediction) => json!(prediction),
                Err(missing) => json!({ "missing": missing }),
            }),
            "stages": stages.collect::<Vec<_>>(),
        })
    }
}

/// Returns a table in which every chunk takes equally long, and a backward has two equal halves.
fn equal_chunks(stage_plan: &StagePlan, layout: &Layout) -> Costs {
    let of_chunk = |chunk: &std::ops::Range<usize>| {
        let share = 1.0 / chunk.len() as f64;
        let cost = LayerCosts {
            forward: share,
            backward: 2.0 * share,
            backward_input: share,
            backward_weight: share,
            ..LayerCosts::default()
        };
        std::iter::repeat_n(cost, chunk.len())
    };
    let layers = stage_plan.stages.chunks().iter().flat_map(of_chunk).collect();
    let segments = vec![SegmentCosts::default(); layout.shape().segments.len()];
    Costs::of_compute(layers, segments)
}
