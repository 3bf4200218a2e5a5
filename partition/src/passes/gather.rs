//! Gathers sharded parameters before they are needed and releases them afterwards.

use zero_pipeline::{Action, Instruction, ModelShape, Placement, Program, SegmentId};

/// Options of gathers, named by DeepSpeed's `stage3_*` keys, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatherOptions {
    /// `stage3_prefetch_bucket_size`: maximum elements in flight ahead of their use; 0 disables prefetching.
    pub prefetch: usize,
    /// `stage3_max_live_parameters`: maximum elements gathered at a time. A single layer may exceed it.
    pub max_live: usize,
    /// `stage3_max_reuse_distance`: parameters needed again within this many elements are not released.
    pub max_reuse_distance: usize,
    /// `overlap_comm`: if unset, every gather is awaited where it starts.
    pub overlap: bool,
}

/// Inserts [`Instruction::Gather`], [`Instruction::AwaitGather`] and [`Instruction::Release`] around the compute.
///
/// A segment with secondary shards is gathered from them, by [`Instruction::GatherSecondary`], unless it was not gathered since
/// the program began or the segment was updated.
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
enum State {
    Released,
    Gathering,
    GatheringSecondary,
    Gathered,
}

struct Pass<'a> {
    shape: &'a ModelShape,
    options: &'a GatherOptions,
    uses: &'a [Use],
    /// Segments that the program uses, and for each segment its positions in `uses`.
    used: Vec<SegmentId>,
    places: Vec<Vec<usize>>,
    /// Total elements of all uses before each use.
    before: Vec<usize>,
    state: Vec<State>,
    /// For each segment, whether its secondary shards have the values of its parameters.
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
        let used = (0..places.len()).filter(|&segment| !places[segment].is_empty()).collect();
        let state = vec![State::Released; shape.segments.len()];
        let filled = vec![false; shape.segments.len()];
        Self { shape, options, uses, used, places, before, state, filled, out: vec![] }
    }

    /// Returns the first use of a segment after a position.
    fn next(&self, segment: SegmentId, position: usize) -> Option<usize> {
        let places = &self.places[segment];
        places.get(places.partition_point(|&place| place <= position)).copied()
    }

    fn before(&mut self, position: usize) {
        let needed = &self.uses[position].segments;
        for &segment in needed {
            self.start(segment);
        }
        for &segment in needed {
            self.wait(segment);
        }
        if self.options.overlap {
            self.prefetch(position);
        }
    }

    /// Starts gathers for the following uses, in order, up to the first one that the options do not allow.
    fn prefetch(&mut self, position: usize) {
        let order = |&segment: &SegmentId| {
            let next = self.next(segment, position).filter(|_| self.state[segment] == State::Released)?;
            Some((next, self.uses[next].segments.iter().position(|&s| s == segment), segment))
        };
        let mut released: Vec<_> = self.used.iter().filter_map(order).collect();
        released.sort_unstable();
        for (_, _, segment) in released {
            let ahead = self.in_flight() + self.elements(segment);
            if ahead > self.options.prefetch || ahead + self.sum(State::Gathered) > self.options.max_live {
                return;
            }
            self.start(segment);
        }
    }

    fn after(&mut self, position: usize) {
        for &segment in &self.uses[position].segments {
            if !self.keep(segment, position) {
                self.out.push(Instruction::Release { segment });
                self.state[segment] = State::Released;
            }
        }
    }

    fn keep(&self, segment: SegmentId, position: usize) -> bool {
        let Some(next) = self.next(segment, position) else { return false };
        let distance = self.before[next] - self.before[position + 1];
        let live = self.sum(State::Gathered) + self.in_flight();
        distance <= self.options.max_reuse_distance && (distance == 0 || live <= self.options.max_live)
    }

    fn start(&mut self, segment: SegmentId) {
        if self.state[segment] == State::Released {
            let (gather, state) = match self.filled[segment] {
                true => (Instruction::GatherSecondary { segment }, State::GatheringSecondary),
                false => (Instruction::Gather { segment }, State::Gathering),
            };
            self.out.push(gather);
            self.state[segment] = state;
            if !self.options.overlap {
                self.wait(segment);
            }
        }
    }

    fn wait(&mut self, segment: SegmentId) {
        self.out.push(match self.state[segment] {
            State::Gathering => Instruction::AwaitGather { segment },
            State::GatheringSecondary => Instruction::AwaitGatherSecondary { segment },
            State::Released | State::Gathered => return,
        });
        self.state[segment] = State::Gathered;
        self.filled[segment] = self.shape.segments[segment].has_secondary;
    }

    fn elements(&self, segment: SegmentId) -> usize {
        self.shape.segments[segment].elements
    }

    fn in_flight(&self) -> usize {
        self.sum(State::Gathering) + self.sum(State::GatheringSecondary)
    }

    fn sum(&self, state: State) -> usize {
        self.used.iter().filter(|&&s| self.state[s] == state).map(|&s| self.elements(s)).sum()
    }
}
