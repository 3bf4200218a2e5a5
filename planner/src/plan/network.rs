//! The bytes that ranks send inside layers, and the bytes that they send between and within hosts.

use std::collections::BTreeSet;

use zero_config::Transport;
use zero_engine::costs::forms::Table;
use zero_model::memory::Exchanged;
use zero_partition::{HostBytes, Hosts, Route, bytes_on_route, expected_tensor_sum};
use zero_pipeline::{Content, Coordinates, Mesh, Program};

use super::{MemoryPlan, Plan};

impl MemoryPlan {
    /// Returns the bytes that ranks send per step between and within hosts with `ranks` ranks each, summed over all
    /// ranks. With local steps, the bytes of an outer step are divided by the number of steps between two outer steps.
    ///
    /// Returns `None` if the sizes of activations between hosts are only known at run time, or if `launcher.transport`
    /// keeps the ranks of a host from using shared memory.
    ///
    /// # Panics
    /// Panics if `ranks` is 0.
    #[must_use]
    pub fn host_bytes(&self, ranks: usize) -> Option<HostBytes> {
        if ranks > 1 && self.config.launcher.transport != Transport::Auto {
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
        let of = |programs: &[Program], route| {
            let of_plane = |plane| {
                let hosts = Hosts { mesh, ranks, plane };
                bytes_on_route(route, programs, &self.layout, hosts, width, &self.settings.zero, activations)
            };
            (0..mesh.tensor()).map(of_plane).sum::<u64>()
        };
        Some(HostBytes::of(|route| {
            let exchanged = table.as_ref().map_or(0, |table| self.exchanged_on_route(route, table, mesh, ranks));
            let outer = |(programs, steps): &(Vec<Program>, usize)| of(programs, route).div_ceil(*steps as u64);
            of(&self.programs, route) + exchanged + self.averaging.as_ref().map_or(0, outer)
        }))
    }

    /// Returns the bytes that ranks send inside layers to ranks of their context or tensor group on a route.
    ///
    /// A rank that shares sequences by heads sends the same number of bytes to every other rank of its group. With ring
    /// attention, a rank sends all bytes to the next rank. Values that are gathered or summed are sent once to each
    /// other host of the group. `ranks` is the number of ranks per host.
    fn exchanged_on_route(&self, route: Route, table: &Table, mesh: Mesh, ranks: usize) -> u64 {
        let host = |rank: usize| rank / ranks;
        let receivers = |rank: usize, group: &[usize]| {
            group.iter().filter(|&&other| other != rank && route.connects(host(other), host(rank))).count()
        };
        let copies =
            |group: &[usize]| route.copies(group.len(), group.iter().copied().map(host).collect::<BTreeSet<_>>().len());
        let part =
            |sent: u64, group: &[usize], to: usize| (sent * to as u64).checked_div(group.len() as u64 - 1).unwrap_or(0);
        let of_stage = |(stage, program): (usize, &Program)| {
            let sent = table.exchanged(program);
            let of_rank = |rank| {
                let tensor = sent.tensor + self.tensor_sum(mesh.coordinates(rank));
                let (heads, queries) = (mesh.head_ranks(rank), mesh.query_ranks(rank));
                let tensor_group = mesh.tensor_ranks(rank);
                let of_queries = if self.config.uses_ring_attention() {
                    let both = [rank, mesh.next_in_ring(rank)];
                    part(sent.queries, &both, receivers(rank, &both))
                } else {
                    part(sent.queries, &queries, copies(&queries))
                };
                let of_heads = part(sent.heads, &heads, receivers(rank, &heads));
                of_heads + of_queries + part(tensor, &tensor_group, copies(&tensor_group))
            };
            mesh.ranks(stage).map(of_rank).sum::<u64>()
        };
        self.programs.iter().enumerate().map(of_stage).sum()
    }

    /// Returns the bytes that a rank sends to its tensor group to sum the gradients of parameters that the group does
    /// not split.
    fn tensor_sum(&self, at: Coordinates) -> u64 {
        let of = (&self.layout, &self.stage_plan.stages);
        expected_tensor_sum(of, at, (0, self.stage_plan.whole.tensor()))
    }
}

impl Plan {
    /// Returns, for each stage, the bytes that a rank sends per step to its context and tensor groups. Returns `None`
    /// if ranks have no such groups, or if the bytes are only known at run time. The numbers of different ranks may
    /// differ if heads cannot be divided evenly.
    pub(super) fn exchanged(&self) -> Option<Vec<Exchanged>> {
        let of = &self.memory_plan;
        let mesh = of.stage_plan.whole;
        let table = (mesh.context() > 1 || mesh.tensor() > 1).then(|| of.subject().table()).flatten()?;
        let of_stage = |(stage, program)| {
            let exchanged = table.exchanged(program);
            Exchanged { tensor: exchanged.tensor + of.tensor_sum(Coordinates::first(stage)), ..exchanged }
        };
        Some(of.programs.iter().enumerate().map(of_stage).collect())
    }
}
