//! Predicts the bytes that the ranks of a job send to ranks of other hosts and of their own host.

use zero_comm::cells;
use zero_pipeline::{Action, Content, Coordinates, Mesh, Message, Placement, Program, SegmentId, StageId, Transfer};

use crate::accounting::expected::message_bytes;
use crate::coded::CodedLevel;
use crate::layout::Layout;
use crate::options::{Coded, ZeroOptions};
use crate::segment::Segment;

/// The ranks of a job on hosts of equal size. Ranks are numbered host by host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hosts {
    /// Axes of the ranks.
    pub mesh: Mesh,
    /// Number of ranks per host.
    pub ranks: usize,
    /// The plane whose bytes are counted: the index of its ranks in their tensor groups.
    pub plane: usize,
}

/// Payload bytes of all ranks together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HostBytes {
    /// Sent to other hosts.
    pub between: u64,
    /// Exchanged in the memory of hosts.
    pub within: u64,
}

impl HostBytes {
    /// Calculates the bytes of each route with the function `bytes`.
    pub fn of(bytes: impl Fn(Route) -> u64) -> Self {
        Self { between: bytes(Route::Between), within: bytes(Route::Within) }
    }
}

/// Where bytes are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// Between hosts.
    Between,
    /// Within hosts.
    Within,
}

impl Route {
    /// Returns how many times a vector that all `ranks` need is sent on this route, if these ranks form `cells` cells.
    #[must_use]
    pub fn copies(self, ranks: usize, cells: usize) -> usize {
        match self {
            Self::Between => cells - 1,
            Self::Within => ranks - cells,
        }
    }

    /// Returns whether a rank of host `a` uses this route to send to a rank of host `b`.
    #[must_use]
    pub fn connects(self, a: usize, b: usize) -> bool {
        (self == Self::Between) == (a != b)
    }
}

/// The cells of a group (`comm/src/hierarchy`): runs of consecutive ranks on the same host.
#[derive(Debug, Clone, Copy)]
struct Cells {
    count: usize,
    ranks: usize,
}

impl Hosts {
    fn host(&self, at: Coordinates) -> usize {
        (self.mesh.rank(at) + self.plane) / self.ranks
    }

    fn cells(&self, ranks: impl Iterator<Item = Coordinates>) -> Cells {
        let hosts: Vec<usize> = ranks.map(|at| self.host(at)).collect();
        Cells { count: cells(&hosts).len(), ranks: hosts.len() }
    }

    /// Returns the ranks of a stage in the plane.
    fn of_stage(&self, stage: StageId) -> impl Iterator<Item = Coordinates> + use<> {
        let plane = self.mesh.plane();
        plane.ranks(stage).map(move |rank| plane.coordinates(rank))
    }

    /// Returns the cells of each shard group of a stage.
    fn shard_groups(&self, stage: StageId) -> impl Iterator<Item = Cells> + '_ {
        let group = move |replicate| (0..self.mesh.shards()).map(move |shard| Coordinates { stage, replicate, shard });
        (0..self.mesh.replicates()).map(move |replicate| self.cells(group(replicate)))
    }

    /// Returns the cells of each near group of a stage.
    fn near_groups(&self, stage: StageId) -> impl Iterator<Item = Cells> + '_ {
        let ranks: Vec<Coordinates> = self.of_stage(stage).collect();
        let groups: Vec<Cells> =
            ranks.chunks(self.mesh.near()).map(|group| self.cells(group.iter().copied())).collect();
        groups.into_iter()
    }

    /// Returns the cells of the ranks that hold this shard, one in each replicate.
    fn replicates(&self, stage: StageId, shard: usize) -> Cells {
        self.cells((0..self.mesh.replicates()).map(|replicate| Coordinates { stage, replicate, shard }))
    }

    /// Returns the bytes of codes that the rank at `at` sends on a route in a reduction of a segment's gradients. Each
    /// part of an all-to-all goes directly to its rank.
    fn coded(&self, route: Route, segment: &Segment, coded: Coded, at: Coordinates) -> usize {
        let (near, levels) = (self.mesh.near(), segment.reduced_as(coded, self.mesh, at));
        let sent = |level: &CodedLevel| -> usize {
            let shard = |member: usize| match level.is_near {
                true => at.shard / near * near + member,
                false => member * near + at.shard % near,
            };
            let parts = level.sent(segment).into_iter().enumerate();
            let is_on_route =
                |member| route.connects(self.host(Coordinates { shard: shard(member), ..at }), self.host(at));
            parts.filter(|(member, _)| is_on_route(*member)).map(|(_, bytes)| bytes).sum()
        };
        levels.iter().map(sent).sum()
    }

    /// Returns the cells of each group that sums gradients in a stage: the data-parallel group or, if the replicates
    /// train `alone`, each shard group.
    fn summed(&self, stage: StageId, alone: bool) -> Vec<Cells> {
        match alone {
            true => self.shard_groups(stage).collect(),
            false => vec![self.cells(self.of_stage(stage))],
        }
    }
}

/// Returns the payload bytes that all ranks together send on a route when one plane runs a step: in the gathers,
/// reductions, refreshes and messages of `programs`, one program per stage. `width` is the width in bytes of the
/// working dtype, and `activations` returns the bytes of a message with activations or their gradients.
///
/// A collective sends the values that a cell lacks to that cell only once (`comm/src/hierarchy`): a gather or a
/// reduce-scatter of n elements over N ranks in c cells sends n (c − 1) between cells and n (N − c) within them, and an
/// all-reduce sends twice these bytes. With several cells of several ranks, sums of 16-bit floats travel in f32, so
/// that they are rounded once. Like [`expected_payload`](crate::expected_payload), the result excludes the all-reduces
/// of the norm and of the loss.
#[must_use]
pub fn bytes_on_route(
    route: Route,
    programs: &[Program],
    layout: &Layout,
    hosts: Hosts,
    width: usize,
    options: &ZeroOptions,
    activations: impl Fn(&Content) -> usize,
) -> u64 {
    let mesh = hosts.mesh;
    let segment = |id: SegmentId| &layout.segments()[id];
    let elements = |id: SegmentId| segment(id).elements();
    let (working, width) = (width, |id: SegmentId| segment(id).width(width));
    let summed = |cells: Cells| match cells.count == 1 || cells.count == cells.ranks {
        true => options.communication.size_in_bytes(),
        false => options.communication.size_in_bytes().max(size_of::<f32>()),
    };
    let copies = |cells: Cells| route.copies(cells.ranks, cells.count);
    let gathered = |stage: StageId, id: SegmentId| -> usize {
        let codes = segment(id).gathered_as(options.coded);
        let bytes = codes.map_or(elements(id) * width(id), |codes| segment(id).shard_code_bytes(codes).iter().sum());
        hosts.shard_groups(stage).map(|cells| bytes * copies(cells)).sum()
    };
    let secondary = |stage: StageId, id: SegmentId| -> usize {
        hosts.near_groups(stage).map(|cells| elements(id) * width(id) * copies(cells)).sum()
    };
    let all_reduced = |cells: Cells, elements: usize| 2 * elements * copies(cells) * summed(cells);
    let replicated = |stage: StageId, id: SegmentId| -> usize {
        let of_shard = |shard| all_reduced(hosts.replicates(stage, shard), segment(id).shard(shard).len());
        (0..mesh.shards()).map(of_shard).sum()
    };
    let reduced = |stage: StageId, id: SegmentId, replicates_sum: bool| -> usize {
        let replicated = |stage, id| if replicates_sum { replicated(stage, id) } else { 0 };
        let coded = |at: Coordinates| hosts.coded(route, segment(id), options.coded, at);
        match segment(id).placements.optimizer {
            _ if !segment(id).reduced_as(options.coded, mesh, Coordinates::first(stage)).is_empty() => {
                hosts.of_stage(stage).map(coded).sum::<usize>() + replicated(stage, id)
            }
            Placement::Sharded if options.reduce_scatter && mesh.shards() > 1 => {
                let scattered = hosts.shard_groups(stage).map(|cells| elements(id) * copies(cells) * summed(cells));
                scattered.sum::<usize>() + replicated(stage, id)
            }
            _ => {
                let groups = hosts.summed(stage, options.outer.is_some()).into_iter();
                groups.map(|cells| all_reduced(cells, elements(id))).sum()
            }
        }
    };
    // An outer step is a reduce-scatter and an all-gather in f32.
    let outer = |stage: StageId, id: SegmentId| -> usize {
        let own = |shard: usize| segment(id).held(segment(id).placements.optimizer, shard).len();
        let of_shard = |shard| 2 * own(shard) * size_of::<f32>() * copies(hosts.replicates(stage, shard));
        (0..mesh.shards()).map(of_shard).sum()
    };
    let sent = |message: &Message| -> usize {
        let receiver = |at: Coordinates| Coordinates { stage: message.to, ..at };
        let senders = hosts.of_stage(message.from);
        let on_route = senders.filter(|&at| route.connects(hosts.host(at), hosts.host(receiver(at))));
        on_route.map(|at| message_bytes(message, layout, at, working, &activations)).sum()
    };
    let of_stage = |(stage, program): (StageId, &Program)| -> usize {
        let of_instruction = |action| match action {
            Action::Starts(Transfer::Gather(ids) | Transfer::Refresh(ids)) => {
                ids.iter().map(|&id| gathered(stage, id)).sum()
            }
            Action::Starts(Transfer::GatherSecondary(ids)) => ids.iter().map(|&id| secondary(stage, id)).sum(),
            Action::Starts(Transfer::Reduce(ids, micro_batch)) => {
                let replicates_sum =
                    options.outer.is_none() && layout.replicates_sum(options, micro_batch, program.micro_batches);
                ids.iter().map(|&id| reduced(stage, id, replicates_sum)).sum()
            }
            Action::Starts(Transfer::OuterStep(&id)) => outer(stage, id),
            Action::Starts(Transfer::Send(message)) => sent(message),
            _ => 0,
        };
        program.instructions.iter().map(|instruction| of_instruction(instruction.effects().action)).sum()
    };
    programs.iter().enumerate().map(of_stage).sum::<usize>() as u64
}
