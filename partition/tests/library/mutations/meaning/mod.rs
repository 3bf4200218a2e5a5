//! Executes a program symbolically. It applies the rules of the runtime and none of the rules of the validator.
//!
//! One rank represents all. A gradient is the list of backwards that contributed to it, each with the versions of the
//! parameters that it read. Sums keep the order of their summands, because the order affects the bits.

mod state;

use zero_pipeline::Instruction::*;
use zero_pipeline::{Item, ModelShape, Placement, Program, Tier};

use state::{MicroBatch, Segment, Sum, Tile, Values, read};

/// The result of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Meaning {
    /// The gradient used by each segment's update.
    updates: Vec<Sum>,
    /// The gradients used by the norm.
    norm: Vec<Sum>,
    /// Parameters held by the rank after the step.
    parameters: Vec<Values>,
}

/// Returns the meaning of a program, or the point at which the runtime would fail.
pub(crate) fn meaning(program: &Program, shape: &ModelShape) -> Result<Meaning, String> {
    let sharded = |s: usize| shape.segments[s].placements.parameters == Placement::Sharded;
    let mut segments: Vec<Segment> = (0..shape.segments.len())
        .map(|s| Segment {
            full: if sharded(s) { Values::Absent } else { Values::Version(0) },
            shard: 0,
            secondary: u32::MAX,
            gathering: None,
            gathering_secondary: None,
            open: vec![],
            accumulator: vec![],
            reduced: vec![],
            update: None,
            fetched: None,
            gradients_on_disk: None,
            reading_gradients: None,
            tiles_on_disk: vec![0; shape.segments[s].tiers.tiles],
            tiles: (0..shape.segments[s].tiers.tiles).map(|_| None).collect(),
            tile_updates: vec![],
            measured: vec![None; shape.segments[s].tiers.tiles],
        })
        .collect();
    let mut micro_batches: Vec<MicroBatch> = (0..program.micro_batches).map(|_| MicroBatch::default()).collect();
    let mut reducing: Vec<(Vec<usize>, usize, Vec<Sum>)> = vec![];
    let mut refreshing: Vec<Vec<usize>> = vec![];
    let mut gathering: Vec<Vec<usize>> = vec![];
    let mut norm: Option<Vec<Sum>> = None;
    for (index, instruction) in program.instructions.iter().enumerate() {
        let fail = |what: &str| Err(format!("instruction {index} ({instruction}): {what}"));
        match instruction {
            Load { micro_batch } => {
                let state = &mut micro_batches[*micro_batch];
                (state.loaded, state.flow) = (true, Some(0));
            }
            Gather { segments: ids } => {
                for id in ids {
                    let segment = &mut segments[*id];
                    if segment.gathering.is_some() {
                        return fail("the shard is in use");
                    }
                    segment.gathering = match shape.segments[*id].tiers.parameters {
                        Tier::Memory => Some(segment.shard),
                        Tier::Nvme => segment.fetched.take(),
                    };
                    if segment.gathering.is_none() {
                        return fail("the shard is not in memory");
                    }
                }
                gathering.push(ids.clone());
            }
            AwaitGather { segments: ids } | AwaitGatherSecondary { segments: ids } => {
                match gathering.iter().position(|started| started == ids) {
                    Some(position) => drop(gathering.remove(position)),
                    None => return fail("no such gather"),
                }
                let from_secondary = matches!(instruction, AwaitGatherSecondary { .. });
                for id in ids {
                    let segment = &mut segments[*id];
                    match (from_secondary, segment.gathering.take(), segment.gathering_secondary.take()) {
                        (false, Some(version), None) => {
                            (segment.full, segment.secondary) = (Values::Version(version), version);
                        }
                        (true, None, Some(version)) => segment.full = Values::Version(version),
                        _ => return fail("nothing to wait for"),
                    }
                }
            }
            GatherSecondary { segments: ids } => {
                for id in ids {
                    let segment = &mut segments[*id];
                    if !shape.segments[*id].has_secondary || segment.gathering_secondary.is_some() {
                        return fail("the secondary shard is in use, or there is none");
                    }
                    segment.gathering_secondary = Some(segment.secondary);
                }
                gathering.push(ids.clone());
            }
            Release { segment } => segments[*segment].full = Values::Absent,
            BackwardInput { .. }
            | BackwardWeight { .. }
            | Send { .. }
            | AwaitSend { .. }
            | Receive { .. }
            | AwaitReceive { .. } => return fail("not of a program for one pipeline stage"),
            Fetch { item: Item::Parameters { segment } } => {
                let segment = &mut segments[*segment];
                match (segment.fetched, segment.stored()) {
                    (None, Some(version)) => segment.fetched = Some(version),
                    _ => return fail("read twice, or while it is written"),
                }
            }
            Fetch { item: Item::Gradients { segment } } => {
                let segment = &mut segments[*segment];
                segment.reading_gradients = segment.gradients_on_disk.take();
            }
            AwaitFetch { item: Item::Gradients { segment } } => {
                let segment = &mut segments[*segment];
                match segment.reading_gradients.take() {
                    Some(gradients) => segment.reduced = gradients,
                    None => return fail("there are no gradients on the disk"),
                }
            }
            Offload { item: Item::Gradients { segment } } => {
                let segment = &mut segments[*segment];
                segment.gradients_on_disk = Some(std::mem::take(&mut segment.reduced));
            }
            Fetch { item: Item::Tile { segment, index } } => {
                let segment = &mut segments[*segment];
                let gradients = segment.gradients_on_disk.clone().unwrap_or_default();
                let (version, measured) = (segment.tiles_on_disk[*index], segment.measured[*index].clone());
                segment.tiles[*index] = Some(Tile { moving: true, measured, version, gradients });
            }
            AwaitFetch { item: Item::Tile { segment, index } } => match &mut segments[*segment].tiles[*index] {
                Some(tile) if tile.moving => tile.moving = false,
                _ => return fail("it is not being read"),
            },
            MeasureTile { segment: id, tile } => {
                let segment = &mut segments[*id];
                match &mut segment.tiles[*tile] {
                    Some(tile) if !tile.moving && norm.is_some() && tile.measured.is_none() => {
                        let seen = if tile.gradients.is_empty() { &segment.reduced } else { &tile.gradients };
                        tile.measured = Some(seen.clone());
                    }
                    _ => return fail("it is not in memory, it was measured, or there is no norm"),
                }
            }
            UpdateTile { segment: id, tile } => {
                // The first update sums the squares of all tiles over the ranks, so all tiles must have been measured.
                let is_measured = |(s, segment): (usize, &Segment)| {
                    !shape.segments[s].tiers.two_passes || segment.measured.iter().all(Option::is_some)
                };
                if !segments.iter().enumerate().all(is_measured) {
                    return fail("a tile has not been measured");
                }
                let segment = &mut segments[*id];
                let gradients = segment.reduced.clone();
                match &mut segment.tiles[*tile] {
                    Some(tile) if !tile.moving && norm.is_some() => {
                        tile.version += 1;
                        let seen = if tile.gradients.is_empty() { gradients } else { tile.gradients.clone() };
                        if shape.segments[*id].tiers.two_passes && tile.measured.as_ref() != Some(&seen) {
                            return fail("it was not measured with these gradients");
                        }
                        segment.tile_updates.push(seen);
                    }
                    _ => return fail("it is not in memory, or there is no norm"),
                }
                if *tile + 1 < segment.tiles.len() {
                    continue;
                }
                segment.update = segment.tile_updates.first().cloned();
                if segment.tile_updates.iter().any(|seen| Some(seen) != segment.update.as_ref()) {
                    return fail("tiles saw different gradients");
                }
                let placements = shape.segments[*id].placements;
                match (placements.parameters, placements.optimizer) {
                    (Placement::Sharded, _) => segment.shard += 1,
                    (Placement::Replicated, Placement::Sharded) => segment.full = Values::Mixed,
                    (Placement::Replicated, Placement::Replicated) => segment.full = Values::Version(1),
                }
            }
            Offload { item: Item::Tile { segment, index } } => {
                let segment = &mut segments[*segment];
                match &mut segment.tiles[*index] {
                    Some(tile) if !tile.moving => {
                        (tile.moving, segment.tiles_on_disk[*index]) = (true, tile.version);
                        segment.measured[*index].clone_from(&tile.measured);
                    }
                    _ => return fail("it is not in memory"),
                }
            }
            AwaitOffload { item: Item::Tile { segment, index } } => {
                segments[*segment].tiles[*index] = None;
            }
            AwaitFetch { item: Item::Parameters { .. } } | AwaitOffload { item: Item::Gradients { .. } } => {}
            Offload { item: Item::Activations { layer, micro_batch } } => {
                let state = &mut micro_batches[*micro_batch];
                if !state.kept.remove(layer) {
                    return fail("nothing is kept");
                }
                state.leaving.insert(*layer);
            }
            AwaitOffload { item: Item::Activations { layer, micro_batch } } => {
                let state = &mut micro_batches[*micro_batch];
                if !state.leaving.remove(layer) {
                    return fail("it is not being written");
                }
                state.on_disk.insert(*layer);
            }
            Fetch { item: Item::Activations { layer, micro_batch } } => {
                if !micro_batches[*micro_batch].on_disk.remove(layer) {
                    return fail("it is not on the disk");
                }
            }
            AwaitFetch { item: Item::Activations { layer, micro_batch } } => {
                micro_batches[*micro_batch].kept.insert(*layer);
            }
            Offload { item: Item::Parameters { .. } } | AwaitOffload { item: Item::Parameters { .. } } => {
                return fail("parameters are written with their tiles");
            }
            Forward { layer, micro_batch } => {
                let read = read(&segments, &shape.layers[*layer].segments);
                let read = read.ok_or_else(|| format!("instruction {index} reads nothing"))?;
                let state = &mut micro_batches[*micro_batch];
                if !state.loaded || state.flow != Some(*layer) || state.forward.len() != *layer {
                    return fail("no input");
                }
                state.forward.push(read);
                if *layer + 1 < shape.layers.len() {
                    state.flow = Some(*layer + 1);
                    state.saved.insert(*layer);
                }
                state.waiting = *layer + 1;
            }
            Keep { layer, micro_batch } => {
                let state = &mut micro_batches[*micro_batch];
                if state.flow != Some(*layer) {
                    return fail("no input");
                }
                state.kept.insert(*layer);
            }
            Discard { layer, micro_batch } => drop(micro_batches[*micro_batch].saved.remove(layer)),
            Recompute { layer, micro_batch } => {
                let read = read(&segments, &shape.layers[*layer].segments);
                let read = read.ok_or_else(|| format!("instruction {index} reads nothing"))?;
                let state = &mut micro_batches[*micro_batch];
                if !state.kept.remove(layer) && state.flow != Some(*layer) {
                    return fail("no input");
                }
                state.forward[*layer] = read;
                state.flow = Some(*layer + 1);
                state.saved.insert(*layer);
            }
            Backward { layer, micro_batch } => {
                let read = read(&segments, &shape.layers[*layer].read_backward);
                let mut read = read.ok_or_else(|| format!("instruction {index} reads nothing"))?;
                let state = &mut micro_batches[*micro_batch];
                if state.forward.len() != shape.layers.len() || state.waiting != *layer + 1 {
                    return fail("no gradient of its output");
                }
                let is_last = *layer + 1 == shape.layers.len();
                if if is_last { state.flow != Some(*layer) } else { !state.saved.remove(layer) } {
                    return fail("nothing to go back through");
                }
                state.flow = None;
                state.waiting = *layer;
                read.extend(&state.forward[*layer]);
                for &s in &shape.layers[*layer].segments {
                    segments[s].open.push((*micro_batch, *layer, read.clone()));
                }
            }
            Accumulate { segment, .. } => {
                let segment = &mut segments[*segment];
                match std::mem::take(&mut segment.open) {
                    open if open.is_empty() => return fail("no gradient"),
                    open => segment.accumulator.push(open),
                }
            }
            Reduce { segments: bucket, micro_batch } => {
                let mut sums = vec![];
                for &s in bucket {
                    let sum = match shape.segments[s].placements.gradients {
                        Placement::Sharded => vec![std::mem::take(&mut segments[s].open)],
                        Placement::Replicated => std::mem::take(&mut segments[s].accumulator),
                    };
                    if sum.iter().all(Vec::is_empty) {
                        return fail("no gradient");
                    }
                    sums.push(sum);
                }
                reducing.push((bucket.clone(), *micro_batch, sums));
            }
            AwaitReduce { segments: bucket, micro_batch } => {
                let Some(position) = reducing.iter().position(|(b, m, _)| b == bucket && m == micro_batch) else {
                    return fail("nothing to wait for");
                };
                let (bucket, _, sums) = reducing.remove(position);
                for (s, sum) in bucket.into_iter().zip(sums) {
                    segments[s].reduced.extend(sum);
                }
            }
            GradientNorm => {
                let held = |s: &Segment| s.gradients_on_disk.clone().unwrap_or_else(|| s.reduced.clone());
                norm = Some(segments.iter().map(held).collect());
            }
            Update { segment } => {
                let placements = shape.segments[*segment].placements;
                let segment = &mut segments[*segment];
                if norm.is_none() || segment.update.is_some() {
                    return fail("no norm, or no gradient");
                }
                segment.update = Some(std::mem::take(&mut segment.reduced));
                match (placements.parameters, placements.optimizer) {
                    (Placement::Sharded, _) => segment.shard += 1,
                    (Placement::Replicated, Placement::Sharded) => segment.full = Values::Mixed,
                    (Placement::Replicated, Placement::Replicated) => segment.full = Values::Version(1),
                }
            }
            OuterStep { .. } | AwaitOuterStep { .. } => return fail("is no part of a training step"),
            Refresh { segments: bucket } => {
                if bucket.iter().any(|&s| segments[s].update.is_none()) {
                    return fail("sends old values");
                }
                refreshing.push(bucket.clone());
            }
            AwaitRefresh { segments: bucket } => {
                let Some(position) = refreshing.iter().position(|b| b == bucket) else {
                    return fail("nothing to wait for");
                };
                refreshing.remove(position).into_iter().for_each(|s| segments[s].full = Values::Version(1));
            }
        }
    }
    let gathering = segments.iter().any(|s| s.gathering.is_some());
    if gathering || !reducing.is_empty() || !refreshing.is_empty() {
        return Err("something is under way at the end".into());
    }
    if segments.iter().any(|s| s.tiles.iter().any(Option::is_some) || s.fetched.is_some()) {
        return Err("something is in memory at the end".into());
    }
    if let Some(stale) = segments.iter().position(|s| !s.tiles.is_empty() && s.stored() != Some(1)) {
        return Err(format!("the values of segment {stale} on the disk are stale"));
    }
    let held = |s: &Segment| if s.full == Values::Absent { Values::Version(s.shard) } else { s.full };
    Ok(Meaning {
        parameters: segments.iter().map(held).collect(),
        norm: norm.unwrap_or_default(),
        updates: segments.into_iter().map(|s| s.update.unwrap_or_default()).collect(),
    })
}
