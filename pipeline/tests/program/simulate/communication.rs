//! Checks the simulated times of messages, collectives and disk requests, and of the instructions that wait for them.

use zero_pipeline::Instruction::*;
use zero_pipeline::schedule;
use zero_pipeline::simulate::{Collectives, Link, Sharing};
use zero_pipeline::{Costs, Degrees, Exchanges, Item, Lane, Mesh, Program, Stages, World, ZeroStage, simulate};

use super::{costs, layer, shape, world};

#[test]
fn messages_take_latency_and_bandwidth_and_come_in_order() {
    let shape = shape(2, ZeroStage::Zero);
    let stages = Stages::new(&shape, 2, vec![0..1, 1..2]).unwrap();
    let world = World { shape: &shape, stages: &stages, mesh: Mesh::new(2, Degrees::stages(2)).unwrap(), capacity: 2 };
    let programs: Vec<Program> = (0..2).map(|stage| schedule::forward_only(&shape, &stages, stage, 2)).collect();
    let costs = Costs { pipe: Link { latency: 2.0, bandwidth: 50.0 }, ..costs(2, layer(1.0, 1.0, 1.0)) };
    // Messages of 100 bytes take 2 + 100/50 seconds. The second one is sent at 2 and starts when the first has arrived.
    let times_with = |world, costs: &Costs| {
        let found = simulate(&programs, &world, costs).unwrap();
        let of = |rank, lane: fn(&Lane) -> bool| -> Vec<(f64, f64)> {
            let events = found.events.iter();
            events.filter(|e| e.rank == rank && lane(&e.lane)).map(|e| (e.start, e.end)).collect()
        };
        let computes = found.events.iter().filter(|e| e.is_compute() && e.rank == 1);
        let computes: Vec<(f64, f64)> = computes.map(|e| (e.start, e.end)).collect();
        (of(0, |lane| matches!(lane, Lane::Channel(_))), computes)
    };
    let times = |world| times_with(world, &costs);
    assert_eq!(times(world), (vec![(1.0, 5.0), (5.0, 9.0)], vec![(5.0, 6.0), (9.0, 10.0)]));
    // Messages run at half speed while the sender or the receiver computes, here for one second of each message.
    let sharing = Sharing { transferring: 0.1, sending: 0.5, ..Sharing::NONE };
    let slower = (vec![(1.0, 5.5), (5.5, 10.0)], vec![(5.5, 6.5), (10.0, 11.0)]);
    assert_eq!(times_with(world, &Costs { sharing, ..costs.clone() }), slower);
    // Without channel capacity, the second message waits until its receive is posted, which happens when the first
    // message has been received.
    assert_eq!(times(World { capacity: 0, ..world }), times(world));
    let slow: Vec<Program> = programs
        .iter()
        .map(|program| {
            // Post each receive only when it is needed.
            let mut instructions = program.instructions.clone();
            instructions.retain(|i| !matches!(i, Receive { .. }));
            let posted = instructions.into_iter().flat_map(|i| match i {
                AwaitReceive { message } => vec![Receive { message }, i],
                other => vec![other],
            });
            Program { instructions: posted.collect(), ..program.clone() }
        })
        .collect();
    let found = simulate(&slow, &World { capacity: 0, ..world }, &costs).unwrap();
    let sends: Vec<f64> = found.events.iter().filter(|e| e.lane != Lane::Compute).map(|e| e.start).collect();
    assert_eq!(sends, [1.0, 6.0]);
    // Rank 0 awaits its last send at the end of its program.
    assert_eq!(found.events.iter().filter(|e| e.rank == 0).map(|e| e.end).fold(0.0, f64::max), 10.0);
}

#[test]
fn collectives_wait_for_all_members_and_overlap_with_compute() {
    let shape = shape(4, ZeroStage::Three);
    let (stages, mesh) = world(&shape);
    let world = World { shape: &shape, stages: &stages, mesh, capacity: 0 };
    let mut costs = costs(4, layer(3.0, 1.0, 1.0));
    // Gathering half of 40 bytes at 10 bytes per second takes 2 seconds, plus a second of latency.
    costs.data = Collectives::all(Link { latency: 1.0, bandwidth: 10.0 });
    costs.gradient_norm = 0.5;
    let program = |rank: usize| {
        let first = 2 * (rank / 2);
        let late = (rank == 1).then_some(Load { micro_batch: 0 });
        let second = first + 1;
        let forward = |layer| Forward { layer, micro_batch: 0 };
        let mut instructions: Vec<_> = late.into_iter().collect();
        instructions.extend([Gather { segments: vec![first] }, Gather { segments: vec![second] }]);
        instructions.extend([AwaitGather { segments: vec![first] }, forward(first), Release { segment: first }]);
        instructions.extend([AwaitGather { segments: vec![second] }, forward(second), Release { segment: second }]);
        instructions.push(GradientNorm);
        Program { instructions, micro_batches: 1 }
    };
    costs.load = 7.0;
    let found = simulate(&(0..4).map(program).collect::<Vec<_>>(), &world, &costs).unwrap();
    let of = |rank, lane| {
        let events = found.events.iter().filter(move |e| e.rank == rank && e.lane == lane);
        events.map(|e| (e.instruction.kind(), e.start, e.end)).collect::<Vec<_>>()
    };
    // Each rank starts both gathers before it computes, and the gathers run one after the other. Rank 1 is late. Rank 0
    // waits for it in the gathers, ranks 2 and 3 only in the gradient norm.
    let collectives = [("gather", 7.0, 10.0), ("gather", 10.0, 13.0), ("gradient_norm", 16.0, 16.5)];
    assert_eq!(of(0, Lane::Collectives), collectives);
    assert_eq!(of(1, Lane::Collectives), collectives);
    assert_eq!(of(2, Lane::Collectives)[..2], [("gather", 0.0, 3.0), ("gather", 3.0, 6.0)]);
    let computes =
        [("await_gather", 0.0, 10.0), ("forward", 10.0, 13.0), ("forward", 13.0, 16.0), ("gradient_norm", 16.0, 16.5)];
    assert_eq!(of(0, Lane::Compute), computes);
    assert_eq!(of(3, Lane::Compute).last(), Some(&("gradient_norm", 9.0, 16.5)));
    assert_eq!(found.busy(), [6.0, 13.0, 6.0, 6.0]);
    assert_eq!(found.communication(), [6.5; 4]);
}

/// A bucket is one collective, so the latency counts once.
#[test]
fn a_bucket_takes_the_time_of_one_collective() {
    for zero_stage in [ZeroStage::Zero, ZeroStage::Three] {
        let shape = shape(2, zero_stage);
        let stages = Stages::single(&shape);
        let world = World::data_parallel(&shape, &stages, 2);
        let mut costs = costs(2, layer(0.0, 0.0, 0.0));
        costs.data = Collectives::all(Link { latency: 1.0, bandwidth: 10.0 });
        let segments = vec![0, 1];
        let instructions = match zero_stage {
            ZeroStage::Three => vec![Gather { segments: segments.clone() }, AwaitGather { segments }],
            _ => vec![Reduce { segments: segments.clone(), micro_batch: 0 }, AwaitReduce { segments, micro_batch: 0 }],
        };
        let programs = vec![Program { instructions, micro_batches: 1 }; 2];
        let found = simulate(&programs, &world, &costs).unwrap();
        let collective = found.events.iter().find(|event| event.lane == Lane::Collectives).unwrap();
        // A gather transfers half of 80 bytes, an all-reduce transfers all of them.
        let bytes = if zero_stage == ZeroStage::Three { 40.0 } else { 80.0 };
        assert_eq!((collective.start, collective.end), (0.0, 1.0 + bytes / 10.0), "{zero_stage:?}");
    }
}

/// To gather 40 bytes, a rank sends 30 in a shard group of 4, and 20 in a near group of 2, which has a link of its own.
#[test]
fn gathers_from_secondary_shards_use_the_link_of_their_group() {
    let shape = shape(1, ZeroStage::Three);
    let stages = Stages::single(&shape);
    let mesh = Mesh::new(4, Degrees { near: Some(2), ..Degrees::stages(1) }).unwrap();
    let world = World { shape: &shape, stages: &stages, mesh, capacity: 0 };
    let mut costs = costs(1, layer(0.0, 0.0, 0.0));
    costs.data = Collectives {
        near: Link { latency: 1.0, bandwidth: 20.0 },
        ..Collectives::all(Link { latency: 0.0, bandwidth: 10.0 })
    };
    let instructions = vec![
        Gather { segments: vec![0] },
        AwaitGather { segments: vec![0] },
        Release { segment: 0 },
        GatherSecondary { segments: vec![0] },
        AwaitGatherSecondary { segments: vec![0] },
        Release { segment: 0 },
    ];
    let found = simulate(&vec![Program { instructions, micro_batches: 0 }; 4], &world, &costs).unwrap();
    let of_rank = found.events.iter().filter(|event| event.rank == 3 && event.lane == Lane::Collectives);
    let times: Vec<_> = of_rank.map(|event| (event.instruction.kind(), event.start, event.end)).collect();
    assert_eq!(times, [("gather", 0.0, 3.0), ("gather_secondary", 3.0, 5.0)]);
}

/// For two segments together, a rank sends 12 bytes of codes within its near group, then 6 to other groups. There is
/// only one replicate, so nothing is reduced between replicates.
#[test]
fn quantized_gradients_use_the_links_of_their_groups() {
    let shape = shape(2, ZeroStage::Two);
    let stages = Stages::single(&shape);
    let mesh = Mesh::new(4, Degrees { near: Some(2), ..Degrees::stages(1) }).unwrap();
    let world = World { shape: &shape, stages: &stages, mesh, capacity: 0 };
    let mut costs = costs(2, layer(0.0, 0.0, 0.0));
    let instructions =
        vec![Reduce { segments: vec![0, 1], micro_batch: 0 }, AwaitReduce { segments: vec![0, 1], micro_batch: 0 }];
    let programs = vec![Program { instructions, micro_batches: 1 }; 4];
    let [near, across] = [10.0, 1.0].map(|bandwidth| Link { latency: 1.0, bandwidth });
    costs.data = Collectives { codes: [near, across], ..Collectives::all(Link::FREE) };
    for (codes, seconds) in [([[8, 5], [4, 1]], 1.0 + 1.2 + 1.0 + 6.0), ([[8, 0], [4, 0]], 1.0 + 1.2)] {
        [costs.segments[0].reduced_codes, costs.segments[1].reduced_codes] = codes.map(Some);
        let found = simulate(&programs, &world, &costs).unwrap();
        let reduced = found.events.iter().find(|event| event.rank == 3 && event.lane == Lane::Collectives).unwrap();
        assert_eq!((reduced.start, reduced.end), (0.0, seconds), "{codes:?}");
    }
}

/// An outer step consists of two collectives, in each of which a rank sends 30 bytes. Outer steps run one after the
/// other.
#[test]
fn outer_steps_use_the_link_between_replicates() {
    let shape = shape(2, ZeroStage::One);
    let stages = Stages::single(&shape);
    let world = World::data_parallel(&shape, &stages, 2);
    let mut costs = costs(2, layer(0.0, 0.0, 0.0));
    costs.segments.iter_mut().for_each(|segment| segment.outer = 60);
    let outer = Link { latency: 1.0, bandwidth: 10.0 };
    costs.data = Collectives { outer, ..Collectives::all(Link::FREE) };
    let instructions = vec![
        OuterStep { segment: 0 },
        OuterStep { segment: 1 },
        AwaitOuterStep { segment: 0 },
        AwaitOuterStep { segment: 1 },
    ];
    let found = simulate(&vec![Program { instructions, micro_batches: 0 }; 2], &world, &costs).unwrap();
    let of_rank = found.events.iter().filter(|event| event.rank == 1 && event.lane == Lane::Collectives);
    let times: Vec<_> = of_rank.map(|event| (event.instruction.kind(), event.start, event.end)).collect();
    assert_eq!(times, [("outer_step", 0.0, 8.0), ("outer_step", 8.0, 16.0)]);
}

/// If compute and communication run at half speed while they overlap, as with one core per rank, overlap neither saves
/// nor costs time.
#[test]
fn compute_and_communication_slow_each_other() {
    let shape = shape(2, ZeroStage::Three);
    let stages = Stages::single(&shape);
    let world = World::data_parallel(&shape, &stages, 2);
    let forward = |layer| Forward { layer, micro_batch: 0 };
    // Rank 1 runs only the gather.
    let busy = vec![Gather { segments: vec![0] }, forward(1), AwaitGather { segments: vec![0] }, forward(0)];
    let quiet = vec![Gather { segments: vec![0] }, AwaitGather { segments: vec![0] }];
    let programs = [busy, quiet].map(|instructions| Program { instructions, micro_batches: 1 });
    let found = |forward: f64, sharing: Sharing| {
        let mut costs = costs(2, layer(forward, 0.0, 0.0));
        // Gathering half of 40 bytes at 10 bytes per second takes 2 seconds.
        costs.data = Collectives::all(Link { latency: 0.0, bandwidth: 10.0 });
        costs.sharing = sharing;
        let found = simulate(&programs, &world, &costs).unwrap();
        let events = found.events.into_iter().filter(|e| e.rank == 0);
        events.map(|e| (e.instruction.kind(), e.start, e.end)).collect::<Vec<_>>()
    };
    let alone = [("forward", 0.0, 3.0), ("forward", 3.0, 6.0), ("gather", 0.0, 2.0)];
    assert_eq!(found(3.0, Sharing::NONE), alone);
    // A transfer of two seconds takes four seconds. During these four, the rank does two of its three seconds of
    // compute; the third follows.
    let half = Sharing { computing: 0.5, transferring: 0.5, sending: 1.0 };
    assert_eq!(found(3.0, half), [("forward", 0.0, 5.0), ("forward", 5.0, 8.0), ("gather", 0.0, 4.0)]);
    // The forward ends at 2, when half of the transfer is left. The other half runs at full speed.
    let first = [("forward", 0.0, 2.0), ("await_gather", 2.0, 3.0), ("forward", 3.0, 4.0), ("gather", 0.0, 3.0)];
    assert_eq!(found(1.0, half), first);
    let uneven = Sharing { computing: 0.75, ..half };
    assert_eq!(found(6.0, uneven), [("forward", 0.0, 7.0), ("forward", 7.0, 13.0), ("gather", 0.0, 4.0)]);
}

/// Requests of one rank are served one after another. An await lasts until its own item has arrived.
#[test]
fn a_disk_serves_one_request_at_a_time() {
    let shape = shape(1, ZeroStage::Zero);
    let stages = Stages::single(&shape);
    let world = World::data_parallel(&shape, &stages, 1);
    let mut costs = costs(1, layer(1.0, 1.0, 1.0));
    costs.read = Link { latency: 1.0, bandwidth: 100.0 };
    costs.write = Link { latency: 0.0, bandwidth: 50.0 };
    // The inputs of the layer have 100 bytes.
    let item = |micro_batch| Item::Activations { layer: 0, micro_batch };
    let instructions = vec![
        Offload { item: item(0) },
        Fetch { item: item(1) },
        Forward { layer: 0, micro_batch: 0 },
        AwaitOffload { item: item(0) },
        AwaitFetch { item: item(1) },
    ];
    let found = simulate(&[Program { instructions, micro_batches: 2 }], &world, &costs).unwrap();
    let of = |lane| {
        let events = found.events.iter().filter(move |e| e.lane == lane);
        events.map(|e| (e.instruction.kind(), e.start, e.end)).collect::<Vec<_>>()
    };
    assert_eq!(of(Lane::Disk), [("offload", 0.0, 2.0), ("fetch", 2.0, 4.0)]);
    let computes = [("forward", 0.0, 1.0), ("await_offload", 1.0, 2.0), ("await_fetch", 2.0, 4.0)];
    assert_eq!(of(Lane::Compute), computes);
    assert_eq!(found.disk(), [4.0]);
}

/// A layer that exchanges values starts once all ranks of the group have reached it.
#[test]
fn layers_with_exchanges_wait_for_the_other_ranks() {
    let mut shape = shape(2, ZeroStage::Zero);
    shape.layers[1].exchanges = Exchanges { context: true, tensor: true };
    let stages = Stages::single(&shape);
    let costs = costs(2, layer(1.0, 1.0, 1.0));
    let ends = |degrees| {
        let mesh = Mesh::new(4, degrees).unwrap();
        let world = World { shape: &shape, stages: &stages, mesh, capacity: 0 };
        let programs = (0..4).map(|rank| {
            let mut program = schedule::forward_only(&shape, &stages, 0, 1);
            // The first layer takes longer on the other ranks: 1, 2, 3 and 4 seconds.
            let first = program.instructions.iter().position(|i| matches!(i, Forward { .. })).unwrap();
            let repeated = program.instructions[first].clone();
            (0..rank).for_each(|_| program.instructions.insert(first, repeated.clone()));
            program
        });
        let found = simulate(&programs.collect::<Vec<_>>(), &world, &costs).unwrap();
        let end = |rank| found.events.iter().filter(|e| e.rank == rank).map(|e| e.end).fold(0.0, f64::max);
        [0, 1, 2, 3].map(end)
    };
    let one = Degrees::stages(1);
    assert_eq!(ends(one), [2.0, 3.0, 4.0, 5.0]);
    assert_eq!(ends(Degrees { heads: 2, ..one }), [3.0, 3.0, 5.0, 5.0]);
    assert_eq!(ends(Degrees { queries: 4, ..one }), [5.0; 4]);
    assert_eq!(ends(Degrees { tensor: 2, ..one }), [3.0, 3.0, 5.0, 5.0]);
    assert_eq!(ends(Degrees { tensor: 2, heads: 2, ..one }), [4.0, 5.0, 5.0, 5.0]);
}
