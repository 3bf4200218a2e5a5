//! The mesh of ranks, the partition of the model into pipeline stages, and the programs of all stages.

use zero_config::{Config, PartitionMethod, Pipeline};
use zero_model::Model;
use zero_partition::passes::{PassOptions, Share, averaging, evaluation, training_step};
use zero_partition::{Layout, ZeroError};
use zero_pipeline::split::{self, SplitError};
use zero_pipeline::{
    Costs, Degrees, Mesh, MeshError, ModelShape, Placement, Program, Schedule, SegmentShape, StageId, Stages, Timeline,
    World, schedule::Size, simulate, validate,
};

use crate::costs::cut::CutCosts;
use crate::error::Error;
use crate::recomputation;
use crate::settings::Settings;

/// How the ranks train a model together.
#[derive(Debug, Clone)]
pub struct StagePlan {
    /// The mesh: pipeline stages × replicates × shards. Each shard group is divided into context groups. If the ranks
    /// of tensor groups split layers, this is the mesh of one plane (one rank of each tensor group), because all planes
    /// run the same programs. If replicates train independently, it is the mesh of one replicate.
    pub mesh: Mesh,
    /// The mesh of all ranks.
    pub whole: Mesh,
    /// The layers of each stage.
    pub stages: Stages,
    /// The order of micro-batches on each stage.
    pub schedule: Schedule,
    /// Micro-batches per replica and step.
    pub micro_batches: usize,
    /// Options of the passes, by stage.
    pub(crate) passes: Vec<PassOptions>,
}

impl StagePlan {
    /// Plans a configuration that is resolved for its number of ranks. `costs` are required for `partition_method:
    /// time`.
    ///
    /// # Errors
    /// Fails if the model has fewer layers than stages, or cannot be split as configured.
    pub fn new(
        config: &Config,
        settings: &Settings,
        model: &Model,
        layout: &Layout,
        costs: Option<&CutCosts>,
    ) -> Result<Self, Error> {
        let (options, shape, micro_batches) = (&config.pipeline, layout.shape(), settings.micro_batches);
        let degrees = Degrees {
            pipe: options.stages,
            replicates: config.mesh.data_parallel_replicate_degree,
            near: config.near_group_size(),
            heads: config.sequence_parallel_size.max(1),
            queries: config.mesh.context_parallel_degree.max(1),
            tensor: config.tensor_size(),
        };
        let mesh = Mesh::new(config.world_size, degrees).map_err(|error| {
            let sharded = "use a divisor of the number of ranks that ZeRO shards across";
            let (key, help) = match error {
                MeshError::Stages { .. } => {
                    ("pipeline.stages", "start a number of ranks that is a multiple of `pipeline.stages`")
                }
                MeshError::Tensor { .. } => {
                    ("tensor_parallel.autotp_size", "use a divisor of the number of ranks per pipeline stage")
                }
                MeshError::Replicates { .. } => {
                    ("mesh.data_parallel_replicate_degree", "use a divisor of the number of data-parallel ranks")
                }
                MeshError::Context { .. } => (config.context_key(), sharded),
                MeshError::Near { .. } => ("zero_optimization.zero_hpz_partition_size", sharded),
            };
            Error::setting(key, error.to_string(), help)
        })?;
        let (whole, plane) = (mesh, mesh.plane());
        let mesh = if config.training.local_steps.is_some() { plane.of_one_replicate() } else { plane };
        let schedule = options.schedule;
        let size = Size { stages: options.stages, chunks: options.virtual_stages, micro_batches };
        let cut = cut(options, size, schedule, model, shape, costs)?;
        let stages = Stages::new(shape, options.stages, cut)
            .map_err(|e| Error::setting("pipeline.stages", e.to_string(), "use fewer stages"))?;
        if let Some(segment) = stages.tied_within_a_stage() {
            return Err(Error::setting(
                "pipeline.virtual_stages",
                format!(
                    "a stage cannot use the tied parameter `{}` in two of its chunks",
                    layout.segments()[segment].name
                ),
                "use `schedule: 1f1b`, or another number of virtual stages",
            ));
        }
        let passes = PassOptions { recompute: recomputation::options(config, model)?, ..settings.passes.clone() };
        let passes = &passes;
        let of_stage =
            |stage| PassOptions { gather: gathers(options, passes, shape, &stages, stage), ..passes.clone() };
        let passes = (0..stages.count()).map(of_stage).collect();
        Ok(Self { mesh, whole, stages, schedule, micro_batches, passes })
    }

    /// Builds the program of each stage for a training step.
    pub fn training(&self, shape: &ModelShape) -> Vec<Program> {
        let of_stage = |stage| {
            let share = Share { shape, stages: &self.stages, stage };
            training_step(&share, self.schedule, self.micro_batches, &self.passes[stage])
        };
        (0..self.stages.count()).map(of_stage).collect()
    }

    /// Builds the program of each stage for an evaluation of `micro_batches` micro-batches.
    pub fn evaluation(&self, shape: &ModelShape, micro_batches: usize) -> Vec<Program> {
        let of_stage =
            |stage| evaluation(&Share { shape, stages: &self.stages, stage }, micro_batches, &self.passes[stage]);
        (0..self.stages.count()).map(of_stage).collect()
    }

    /// Builds the program of each stage for an outer step, which averages replicates that train independently.
    pub fn averaging(&self, shape: &ModelShape) -> Vec<Program> {
        let of_stage = |stage| averaging(&Share { shape, stages: &self.stages, stage }, &self.passes[stage]);
        (0..self.stages.count()).map(of_stage).collect()
    }

    /// Validates the programs of all stages together, and returns the program of `stage`, with its spare memory
    /// released.
    ///
    /// # Errors
    /// Returns the first violation.
    pub(crate) fn kept(
        &self,
        mut programs: Vec<Program>,
        stage: StageId,
        shape: &ModelShape,
    ) -> Result<Program, Error> {
        self.validate(&programs, shape)?;
        let mut program = programs.swap_remove(stage);
        program.instructions.shrink_to_fit();
        Ok(program)
    }

    /// Validates the programs of all stages together.
    ///
    /// # Errors
    /// Returns the first violation.
    pub fn validate(&self, programs: &[Program], shape: &ModelShape) -> Result<(), Error> {
        // All ranks of a stage run the same program, so validating two ranks on each axis is enough for any number of
        // ranks.
        let few = self.of_few_ranks(self.whole.tensor().min(2));
        Ok(validate(&few.of_all_ranks(programs), &few.world(shape))?)
    }

    /// Returns the plan of one plane (one rank of each tensor group) with at most two replicas, because all replicas of
    /// a stage run the same program.
    pub fn of_two_replicas(&self) -> Self {
        self.of_few_ranks(1)
    }

    /// Returns this plan with at most two replicas and `tensor` ranks per tensor group.
    fn of_few_ranks(&self, tensor: usize) -> Self {
        let pipe = self.mesh.pipe();
        let ranks = pipe * self.mesh.data().min(2) * tensor;
        let mesh = Mesh::new(ranks, Degrees { heads: self.mesh.context().min(2), tensor, ..Degrees::stages(pipe) });
        let mesh = mesh.unwrap_or(self.mesh);
        Self { mesh, ..self.clone() }
    }

    /// Returns this plan for the ranks of all replicates together, even if the replicates train independently.
    #[must_use]
    pub fn of_all_replicates(&self) -> Self {
        Self { mesh: self.whole.plane(), ..self.clone() }
    }

    /// Simulates the programs of all ranks with a cost table.
    ///
    /// # Errors
    /// Fails if the table belongs to another model.
    pub fn simulate(&self, programs: &[Program], shape: &ModelShape, costs: &Costs) -> Result<Timeline, Error> {
        let simulated = simulate(&self.of_all_ranks(programs), &self.world(shape), costs);
        simulated.map_err(|e| Error::Zero(ZeroError::Internal(e.to_string())))
    }

    /// Returns the world that the validator and the simulator run on. Its channels buffer no messages, so a program
    /// that is valid there runs over any transport.
    pub fn world<'a>(&'a self, shape: &'a ModelShape) -> World<'a> {
        World { shape, stages: &self.stages, mesh: self.mesh, capacity: 0 }
    }

    /// Expands the programs of the stages to one program per rank.
    pub fn of_all_ranks(&self, programs: &[Program]) -> Vec<Program> {
        (0..self.mesh.world_size()).map(|rank| programs[self.mesh.coordinates(rank).stage].clone()).collect()
    }

    /// Returns the rank that broadcasts values of the last stage: the first rank of that stage in `mesh`.
    pub fn last_rank(&self) -> usize {
        self.mesh.ranks(self.stages.stage_of(self.stages.layers() - 1)).start
    }

    /// Describes in one line, for each stage, its layers and when it gathers sharded parameters.
    pub fn describe(&self, shape: &ModelShape) -> String {
        let all: Vec<String> = (0..self.stages.count()).map(|stage| self.layers_of(stage, shape)).collect();
        let text = format!("pipeline: {} stages, {}: {}", self.stages.count(), self.schedule, all.join(" | "));
        match self.gathering(shape) {
            Some(gathering) => format!("{text}; {gathering}"),
            None => text,
        }
    }

    /// Names the first and the last layer of each chunk of a stage.
    pub fn layers_of(&self, stage: StageId, shape: &ModelShape) -> String {
        let chunks = self.stages.chunks().iter().skip(stage).step_by(self.stages.count());
        let names = chunks.map(|chunk| {
            let (first, last) = (&shape.layers[chunk.start].name, &shape.layers[chunk.end - 1].name);
            if first == last { first.clone() } else { format!("{first} … {last}") }
        });
        names.collect::<Vec<_>>().join(" + ")
    }

    /// Returns whether a stage's sharded parameters stay gathered for the whole step.
    pub fn keeps_gathered(&self, stage: StageId) -> bool {
        self.passes[stage].gather.max_reuse_distance == usize::MAX
    }

    /// Describes when sharded parameters are gathered; `None` without pipeline stages or sharded parameters.
    pub fn gathering(&self, shape: &ModelShape) -> Option<String> {
        let is_sharded = |segment: &SegmentShape| segment.placements.parameters == Placement::Sharded;
        if self.stages.count() == 1 || !shape.segments.iter().any(is_sharded) {
            return None;
        }
        let (kept, other): (Vec<StageId>, Vec<StageId>) =
            (0..self.stages.count()).partition(|&stage| self.keeps_gathered(stage));
        Some(match (kept.is_empty(), other.is_empty()) {
            (true, _) => "parameters are gathered for each use, except within stage3_max_reuse_distance".into(),
            (_, true) => "parameters stay gathered during a step".into(),
            _ => format!("parameters stay gathered during a step on stages {kept:?}, but not on stages {other:?}"),
        })
    }
}

/// Cuts the layers into contiguous chunks, one per virtual stage.
fn cut(
    options: &Pipeline,
    size: Size,
    schedule: Schedule,
    model: &Model,
    shape: &ModelShape,
    costs: Option<&CutCosts>,
) -> Result<Vec<std::ops::Range<usize>>, Error> {
    let parts = size.stages * size.chunks;
    let parameters = |layer: usize| -> u64 {
        // A tied parameter counts on each stage that uses it, because each of them keeps a copy.
        shape.layers[layer].segments.iter().map(|&s| shape.segments[s].elements as u64).sum()
    };
    let layers = shape.layers.len();
    let cut = match &options.partition_method {
        PartitionMethod::Uniform => split::uniform(layers, parts),
        PartitionMethod::Parameters => split::balanced(&(0..layers).map(parameters).collect::<Vec<_>>(), parts),
        PartitionMethod::Type(pattern) => {
            let weights: Vec<u64> = model.layers().iter().map(|l| u64::from(pattern.matches(l.name()))).collect();
            if weights.iter().all(|&weight| weight == 0) {
                let names: Vec<&str> = model.layers().iter().map(|l| l.name()).collect();
                return Err(Error::setting(
                    "pipeline.partition_method",
                    format!("no layer name matches `{}`", pattern.as_str()),
                    format!("the layers are {}", names.join(", ")),
                ));
            }
            split::balanced(&weights, parts)
        }
        PartitionMethod::Time => match costs {
            _ if size.stages == 1 => split::uniform(layers, parts),
            Some(costs) => {
                let limit = costs.limit / size.chunks as u64;
                split::by_time(&costs.layers, &split::alive(schedule, size), limit)
            }
            None => {
                return Err(Error::setting(
                    "pipeline.partition_method",
                    "`time` needs a batch, to measure the layers",
                    "create the engine with `Engine::measured`, or use `parameters`",
                ));
            }
        },
    };
    cut.map_err(|error| {
        let key = if size.chunks > 1 { "pipeline.virtual_stages" } else { "pipeline.stages" };
        let help = match &error {
            SplitError::TooFewLayers { layers, .. } => format!("split this model into at most {layers} parts"),
            _ => "use another `pipeline.partition_method`".into(),
        };
        Error::setting(key, error.to_string(), help)
    })
}

/// Decides how a stage gathers. It gathers once per step if `keep_gathered` is true, or if that key is unset, the
/// pipeline has several stages, and this stage's sharded parameters fit into `max_live`. It gathers for each use if the
/// key is false. Otherwise it uses the options of `passes`.
fn gathers(
    options: &Pipeline,
    passes: &PassOptions,
    shape: &ModelShape,
    stages: &Stages,
    stage: StageId,
) -> zero_partition::passes::GatherOptions {
    let is_gathered =
        |&s: &usize| stages.holds(stage, s) && shape.segments[s].placements.parameters == Placement::Sharded;
    let all: usize = (0..shape.segments.len()).filter(is_gathered).map(|s| shape.segments[s].elements).sum();
    let fits = stages.count() > 1 && all <= passes.gather.max_live;
    let mut gather = passes.gather;
    match options.keep_gathered {
        Some(true) => (gather.max_reuse_distance, gather.max_live) = (usize::MAX, usize::MAX),
        None if fits => gather.max_reuse_distance = usize::MAX,
        Some(false) => gather.max_reuse_distance = 0,
        None => {}
    }
    gather
}
