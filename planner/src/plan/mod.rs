//! Plans a configuration before it runs: the layers and the memory needs of each rank, and the schedule of a step as a
//! grid.

mod drawing;
mod json;
mod network;
mod text;

use zero_config::Config;
use zero_model::{Layers, Model};
use zero_partition::{Layout, Payload, Segment, StateBytes, expected_payload, expected_state};
use zero_pipeline::simulate::{Costs, LayerCosts, SegmentCosts};
use zero_pipeline::{Coordinates, Program, StageId, Timeline, alive, grid};

use crate::disk::check_space;
use crate::memory::{Limit, MemoryKind, Needs, needs};
use zero_engine::Error;
use zero_engine::configured_model;
use zero_engine::costs::cut::CutCosts;
use zero_engine::costs::forms::tokens;
use zero_engine::costs::subject::Subject;
use zero_engine::costs::{Choice, CostTable, Prediction, choose, costs};
use zero_engine::settings::{Settings, with_total_steps, working_dtype};
use zero_engine::stage_plan::StagePlan;

/// The memory part of a plan, which suffices to decide whether a configuration fits. The programs are not validated.
pub struct MemoryPlan {
    config: Config,
    settings: Settings,
    model: Model,
    layout: Layout,
    stage_plan: StagePlan,
    /// The program of each stage.
    programs: Vec<Program>,
    /// The program of each stage for an outer step, and the number of steps between two outer steps; `None` without
    /// local steps.
    averaging: Option<(Vec<Program>, usize)>,
    /// The memory needs of each stage.
    needs: Vec<Needs>,
    /// The table of `training.cost_table`; `None` if the key is not set.
    table: Option<CostTable>,
    choice: Option<Choice>,
}

/// The plan of a training step of all ranks.
pub struct Plan {
    memory_plan: MemoryPlan,
    /// The simulated step of two replicas. All other replicas behave in the same way.
    timeline: Timeline,
    /// The prediction from the configuration's cost table.
    prediction: Option<Result<Prediction, String>>,
}

/// Layers, parameters, state and traffic of one rank of a stage.
struct Share {
    layers: String,
    parameters: usize,
    /// The parameters that training changes.
    trainable: usize,
    state: StateBytes,
    /// Bytes sent per step, except activations and their gradients, whose sizes are only known at run time.
    sent: Payload,
    /// With local steps, the bytes sent in an outer step. `sent_between` counts those of them that go to other
    /// replicates.
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

    /// Plans a configuration that is resolved for its number of ranks. Starts no processes.
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
        // A run bases some choices on measured costs. The plan makes these choices as if all layers had equal costs.
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

    /// Returns the largest peak of any rank on the host in bytes, as the allocator counts them. The program itself is not
    /// included.
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        self.peak_in(MemoryKind::Host)
    }

    /// Returns the largest peak of any rank in one kind of memory, in bytes.
    #[must_use]
    pub fn peak_in(&self, memory: MemoryKind) -> u64 {
        let peak = |needs: &Needs| match memory {
            MemoryKind::Host => needs.peaks.total,
            MemoryKind::Gpu => needs.peaks.gpu,
        };
        self.needs.iter().map(peak).max().unwrap_or(0)
    }

    /// Returns the first of these limits that any rank exceeds.
    #[must_use]
    pub fn exceeded(&self, limits: &[Limit]) -> Option<Limit> {
        limits.iter().copied().find(|limit| self.peak_in(limit.memory) > limit.bytes)
    }

    /// Returns the maximum number of bytes that a rank needs on its disk.
    #[must_use]
    pub fn disk_bytes(&self) -> u64 {
        self.needs.iter().map(Needs::disk_bytes).max().unwrap_or(0)
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

    /// Predicts the time of a step from the configuration's cost table, or describes the values missing from the table;
    /// `None` if the configuration names no table.
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

    /// Simulates a step with a cost table. The timeline records what each rank does at which time.
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
        check_space(&self.memory_plan.subject(), &self.memory_plan.needs)
    }

    /// Draws the step as a grid with a row per stage and a column per time slot. Assumes that all chunks of layers take
    /// the same time, that a backward takes twice as long as a forward, and that communication takes no time.
    #[must_use]
    pub fn grid(&self, columns: usize) -> String {
        let few = self.memory_plan.stage_plan.of_two_replicas();
        grid::grid(&self.timeline, &few.stages, few.mesh, columns)
    }

    /// Returns the fraction of a step in which the busiest stage is idle, under the same assumptions.
    #[must_use]
    pub fn bubble(&self) -> f64 {
        self.timeline.bubble()
    }

    /// Simulates the programs of all ranks with a table of costs.
    ///
    /// # Errors
    /// Fails if the table belongs to another model.
    pub fn simulate(&self, costs: &Costs) -> Result<Timeline, Error> {
        self.memory_plan.stage_plan.simulate(&self.memory_plan.programs, self.memory_plan.layout.shape(), costs)
    }

    /// Returns the largest peak of any rank on the host in bytes, as the allocator counts them. The program itself is not
    /// included.
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        self.memory_plan.peak_bytes()
    }

    /// Returns the largest peak of any rank in one kind of memory, in bytes.
    #[must_use]
    pub fn peak_in(&self, memory: MemoryKind) -> u64 {
        self.memory_plan.peak_in(memory)
    }

    /// Returns the first of these limits that any rank exceeds.
    #[must_use]
    pub fn exceeded(&self, limits: &[Limit]) -> Option<Limit> {
        self.memory_plan.exceeded(limits)
    }

    /// Returns the maximum number of bytes that a rank needs on its disk.
    #[must_use]
    pub fn disk_bytes(&self) -> u64 {
        self.memory_plan.disk_bytes()
    }

    /// Returns whether the memory of the layers' activations is known and included.
    #[must_use]
    pub fn knows_activations(&self) -> bool {
        self.memory_plan.needs.iter().all(|needs| needs.with_activations)
    }

    /// Returns the predicted time of a step from the configuration's cost table, or a description of the values missing
    /// from the table; `None` if the configuration names no table.
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
}

/// Returns simulator costs with which all chunks take the same time, and a backward has two equal halves.
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
