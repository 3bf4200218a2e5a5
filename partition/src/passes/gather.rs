//! Gathers sharded parameters before they are needed and releases them afterwards.

use zero_pipeline::{Action, Instruction, ModelShape, Placement, Program, SegmentId};

/// Options of gathers, named by DeepSpeed's `stage3_*` keys, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatherOptions {
    /// `stage3_prefetch_bucket_size`: maximum elements in flight ahead of their use. The next layer may exceed it; 0
    /// disables prefetching.
    pub prefetch: usize,
    /// `stage3_max_live_parameters`: maximum elements gathered at a time. A single layer may exceed it.
    pub max_live: usize,
    /// `stage3_max_reuse_distance`: parameters needed again within this many elements are not released.
    pub max_reuse_distance: usize,
    /// `overlap_comm`: if unset, every gather is awaited where it starts.
    pub overlap: bool,
}

/// Inserts [`Instruction::Gather`], [`Instruction::AwaitGather`] and [`Instruction::Release`] around the compute. One
/// gather covers all segments that a layer needs and that are not gathered yet.
///
/// [`Instruction::GatherSecondary`] gathers segments from their secondary shards. The first gather of a segment in the
/// program, and the first one after its update, is from all shards.
///
/// No segment stays gathered across an [`Instruction::Update`], which would make it stale.
#[must_use]
pub fn gather(program: Program, shape: &ModelShape, options: &GatherOptions) -> Program {
    let Program { instructions, micro_batches } = program;
    let uses = uses(&instructions, shape);
    let mut pass = Pass::new(shape, options, &uses);
    let mut position = 0;
    for instruction in instructions {
        if uses.get(position).is_some_and(|next| next.instruction == instruction) {
            pass.before(position);
            pass.out.push(instruction);
            pass.after(position);
            position += 1;
        } else {
            if let Instruction::Update { segment } = instruction {
                pass.filled[segment] = false;
            }
            pass.out.push(instruction);
        }
    }
    Program { instructions: pass.out, micro_batches }
}

/// A compute instruction and the sharded segments that it reads.
struct Use {
    instruction: Instruction,
    segments: Vec<SegmentId>,
    elements: usize,
}

fn uses(instructions: &[Instruction], shape: &ModelShape) -> Vec<Use> {
    let sharded = |&s: &SegmentId| shape.segments[s].placements.parameters == Placement::Sharded;
    instructions
        .iter()
        .filter_map(|instruction| {
            let Action::Computes(computation) = instruction.effects().action else { return None };
            let read = computation.reads(shape)?;
            let segments: Vec<_> = read.iter().copied().filter(sharded).collect();
            let elements = segments.iter().map(|&s| shape.segments[s].elements).sum();
            Some(Use { instruction: instruction.clone(), segments, elements })
        })
        .collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GatherState {
    Released,
    InFlight,
    Gathered,
}

/// A gather in flight.
struct Started {
    segments: Vec<SegmentId>,
    from_secondary: bool,
}

struct Pass<'a> {
    shape: &'a ModelShape,
    options: &'a GatherOptions,
    uses: &'a [Use],
    /// For each segment, the indices of its uses in `uses`.
    places: Vec<Vec<usize>>,
    /// Total elements of all uses before each use.
    before: Vec<usize>,
    state: Vec<GatherState>,
    /// Total elements of the segments in flight, and of the gathered segments.
    in_flight: usize,
    gathered: usize,
    started: Vec<Started>,
    /// For each segment, whether its secondary shards hold the current values of its parameters.
    filled: Vec<bool>,
    out: Vec<Instruction>,
}

impl<'a> Pass<'a> {
    fn new(shape: &'a ModelShape, options: &'a GatherOptions, uses: &'a [Use]) -> Self {
        let mut places = vec![vec![]; shape.segments.len()];
        let mut before = vec![0];
        for (place, one) in uses.iter().enumerate() {
            one.segments.iter().for_each(|&segment| places[segment].push(place));
            before.push(before[place] + one.elements);
        }
        let state = vec![GatherState::Released; shape.segments.len()];
        let filled = vec![false; shape.segments.len()];
        let (in_flight, gathered) = (0, 0);
        Self { shape, options, uses, places, before, state, in_flight, gathered, started: vec![], filled, out: vec![] }
    }

    /// Returns the first use of a segment after a position.
    fn next(&self, segment: SegmentId, position: usize) -> Option<usize> {
        let places = &self.places[segment];
        places.get(places.partition_point(|&place| place <= position)).copied()
    }

    fn before(&mut self, position: usize) {
        let needed = &self.uses[position].segments;
        self.start(needed);
        self.wait(needed);
        if self.options.overlap {
            self.prefetch(position);
        }
    }

    /// Starts gathers for the following uses, in order, until the options forbid the next one. The bucket limits the
    /// elements in flight, except that the first gather may exceed it: a larger layer is prefetched alone.
    fn prefetch(&mut self, position: usize) {
        if self.options.prefetch == 0 {
            return;
        }
        let uses = self.uses;
        for following in &uses[position + 1..] {
            let is_released = |&&segment: &&SegmentId| self.state[segment] == GatherState::Released;
            let released: Vec<SegmentId> = following.segments.iter().filter(is_released).copied().collect();
            if released.is_empty() {
                continue;
            }
            let ahead = self.in_flight + released.iter().map(|&segment| self.elements(segment)).sum::<usize>();
            let exceeds_bucket = self.in_flight > 0 && ahead > self.options.prefetch;
            if exceeds_bucket || ahead + self.gathered > self.options.max_live {
                return;
            }
            self.start(&released);
        }
    }

    fn after(&mut self, position: usize) {
        for &segment in &self.uses[position].segments {
            if !self.keep(segment, position) {
                self.out.push(Instruction::Release { segment });
                self.change(segment, GatherState::Released);
            }
        }
    }

    fn keep(&self, segment: SegmentId, position: usize) -> bool {
        let Some(next) = self.next(segment, position) else { return false };
        let distance = self.before[next] - self.before[position + 1];
        let live = self.gathered + self.in_flight;
        distance <= self.options.max_reuse_distance && (distance == 0 || live <= self.options.max_live)
    }

    /// Starts gathering those of the segments that are not gathered or in flight.
    fn start(&mut self, segments: &[SegmentId]) {
        for from_secondary in [false, true] {
            let is_wanted =
                |&&id: &&SegmentId| self.state[id] == GatherState::Released && self.filled[id] == from_secondary;
            let segments: Vec<SegmentId> = segments.iter().filter(is_wanted).copied().collect();
            if segments.is_empty() {
                continue;
            }
            self.out.push(match from_secondary {
                true => Instruction::GatherSecondary { segments: segments.clone() },
                false => Instruction::Gather { segments: segments.clone() },
            });
            segments.iter().for_each(|&id| self.change(id, GatherState::InFlight));
            self.started.push(Started { segments, from_secondary });
        }
        if !self.options.overlap {
            self.wait(segments);
        }
    }

    /// Awaits all gathers in flight that contain one of the segments.
    fn wait(&mut self, segments: &[SegmentId]) {
        let is_needed = |started: &mut Started| started.segments.iter().any(|id| segments.contains(id));
        let needed: Vec<Started> = self.started.extract_if(.., is_needed).collect();
        for Started { segments, from_secondary } in needed {
            for &id in &segments {
                self.change(id, GatherState::Gathered);
                self.filled[id] = self.shape.segments[id].has_secondary;
            }
            self.out.push(match from_secondary {
                true => Instruction::AwaitGatherSecondary { segments },
                false => Instruction::AwaitGather { segments },
            });
        }
    }

    fn change(&mut self, segment: SegmentId, to: GatherState) {
        let elements = self.elements(segment);
        match std::mem::replace(&mut self.state[segment], to) {
            GatherState::Released => {}
            GatherState::InFlight => self.in_flight -= elements,
            GatherState::Gathered => self.gathered -= elements,
        }
        match to {
            GatherState::Released => {}
            GatherState::InFlight => self.in_flight += elements,
            GatherState::Gathered => self.gathered += elements,
        }
    }

    fn elements(&self, segment: SegmentId) -> usize {
        self.shape.segments[segment].elements
    }
}
