//! Ranks as processes: connects the groups of a job over shared memory or TCP.
//!
//! A group on one host first connects over TCP. If its ranks can share memory, it uses these connections only to set up
//! a shared-memory segment, and then closes them. A group on several hosts consists of the groups of the hosts, its
//! cells (see [`Hierarchy`]), plus connections between ranks of different cells.

mod control;

use std::net::TcpStream;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::bell::spin_time;
use crate::collective::signature::{Signature, digest};
use crate::collective::step::{Collective, Fabric, Inbox, Membership, Outbox};
use crate::communicator::ProcessTransport;
use crate::error::CommError;
use crate::health::{Failure, Health};
use crate::hierarchy::{Hierarchy, cells, position};
use crate::inquiry::{Topic, Waiters};
use crate::shm::{self, PeerArenas, Shared, ShmWires};
use crate::stream::{End, Exchange, StreamInbox, StreamOutbox, Wires, gather_all};
use crate::tcp::{Hub, Purpose, TcpWires};

pub(crate) use control::Control;

/// State shared by all groups of a process.
pub(crate) struct World {
    pub(crate) hub: Hub,
    pub(crate) health: Arc<Health>,
    /// Host by global rank. Ranks with equal hosts can share memory.
    pub(crate) hosts: Vec<String>,
    pub(crate) transport: ProcessTransport,
    pub(crate) arenas: PeerArenas,
    /// Timeout for connecting a group.
    pub(crate) timeout: Duration,
}

/// The connections of one group.
pub(crate) struct Processes {
    world: Arc<World>,
    membership: Membership,
    links: Links,
}

enum Links {
    Tcp { collectives: Streams, messages: Streams },
    Shm(Shared),
    Hosts(Hosts),
}

/// The parts of a group on several hosts.
struct Hosts {
    /// The cells as ranges of group ranks.
    cells: Vec<Range<usize>>,
    /// This rank's cell.
    own: Range<usize>,
    cell: Box<Processes>,
    /// Connections to ranks of other cells, for messages.
    messages: Streams,
    /// Connections to ranks of other cells, for collectives.
    across: Streams,
}

/// Streams by rank in the group; `None` for this rank itself and, in a group on several hosts, for ranks of its cell.
type Streams = Vec<Option<TcpStream>>;

impl Processes {
    /// Connects a group. All its members call this at the same time.
    pub(crate) fn connect(
        world: &Arc<World>,
        membership: Membership,
        deadline: Instant,
    ) -> Result<Processes, CommError> {
        let hosts: Vec<&str> = membership.members.iter().map(|member| world.hosts[*member].as_str()).collect();
        let cells = cells(&hosts);
        let useful = cells.len() > 1 && cells.iter().any(|cell| cell.len() > 1);
        match world.transport {
            ProcessTransport::Auto if useful => Processes::connect_hosts(world, membership, cells, deadline),
            _ => Processes::connect_flat(world, membership, deadline),
        }
    }

    fn connect_hosts(
        world: &Arc<World>,
        membership: Membership,
        cells: Vec<Range<usize>>,
        deadline: Instant,
    ) -> Result<Processes, CommError> {
        let Membership { group, rank, ref members, .. } = membership;
        let (index, place) = position(&cells, rank);
        let own = cells[index].clone();
        let to_others = |purpose| {
            let others = [&members[..own.start], &members[own.end..]].concat();
            let mut streams = world.hub.mesh(group, purpose, &others, deadline)?;
            streams.splice(own.start..own.start, own.clone().map(|_| None));
            Ok::<_, CommError>(streams)
        };
        let (messages, across) = (to_others(Purpose::Messages)?, to_others(Purpose::Collectives)?);
        let cell = digest("cell", &[group as usize, index]);
        let cell = Membership::new(cell, place, members[own.clone()].to_vec());
        let cell = Box::new(Processes::connect_flat(world, cell, deadline)?);
        let links = Links::Hosts(Hosts { cells, own, cell, messages, across });
        Ok(Processes { world: Arc::clone(world), membership, links })
    }

    fn connect_flat(world: &Arc<World>, membership: Membership, deadline: Instant) -> Result<Processes, CommError> {
        let Membership { group, ref members, .. } = membership;
        let collectives = world.hub.mesh(group, Purpose::Collectives, members, deadline)?;
        let messages = world.hub.mesh(group, Purpose::Messages, members, deadline)?;
        let mut group = Processes { world: Arc::clone(world), membership, links: Links::Tcp { collectives, messages } };
        let lost = |(failure, signature): (Failure, Signature)| {
            world.health.end_because(&failure, &signature, world.timeout);
            world.health.error(failure, &signature, world.timeout)
        };
        let waiters = Arc::<Waiters>::default();
        let mut endpoint = group.exchange(&waiters)?;
        // Count the calling thread as a waiter, so that the deadline runs during the steps below.
        let _seat = waiters.enter();
        match group.share_memory(&mut endpoint, deadline).map_err(lost)? {
            Ok(shared) => group.links = Links::Shm(shared),
            Err(detail) if world.transport == ProcessTransport::SharedMemory => {
                return Err(shm::unavailable(&world.health, detail));
            }
            Err(_) => {}
        }
        // Synchronize all members: afterwards the resources of the rendezvous may be released.
        gather_all(&mut endpoint, &group.membership, &[], 2, deadline).map_err(lost)?;
        Ok(group)
    }

    fn share_memory(
        &self,
        endpoint: &mut Exchange,
        deadline: Instant,
    ) -> Result<Result<Shared, String>, (Failure, Signature)> {
        let members = &self.membership.members;
        if self.world.transport == ProcessTransport::Tcp {
            return Ok(Err("the transport is set to TCP".into()));
        }
        let home = &self.world.hosts[members[0]];
        if let Some(stranger) = members.iter().find(|member| self.world.hosts[**member] != *home) {
            return Ok(Err(format!("rank {stranger} is not on the host of rank {}", members[0])));
        }
        shm::share(endpoint, &self.membership, &self.world.arenas, deadline)
    }

    fn job(&self) -> (u64, u32) {
        (self.world.hub.identity.job, self.world.hub.identity.attempt)
    }

    /// Returns how long this rank may spin. Counts all ranks of the job on this host, whatever their group, because
    /// each needs a core.
    fn spin_time(&self) -> Duration {
        let hosts = &self.world.hosts;
        let own = &hosts[self.world.health.rank];
        spin_time(hosts.iter().filter(|host| *host == own).count())
    }

    fn io(&self, error: std::io::Error) -> CommError {
        CommError::Io { rank: self.world.health.rank, detail: error.to_string() }
    }

    fn exchange(&self, waiters: &Arc<Waiters>) -> Result<Exchange, CommError> {
        let Membership { group, rank, .. } = self.membership;
        let (wires, neighbours): (Box<dyn Wires>, _) = match &self.links {
            Links::Shm(Shared { segment, neighbours }) => {
                (Box::new(ShmWires::collectives(segment, rank, self.spin_time())), neighbours.clone())
            }
            Links::Tcp { collectives: streams, .. } | Links::Hosts(Hosts { across: streams, .. }) => {
                let streams = streams.iter().map(|stream| stream.as_ref().map(TcpStream::try_clone).transpose());
                let streams = streams.collect::<std::io::Result<_>>().and_then(TcpWires::new);
                (Box::new(streams.map_err(|error| self.io(error))?), None)
            }
        };
        let (membership, health) = (self.membership.clone(), Arc::clone(&self.world.health));
        let topic = Topic::collectives(group, waiters);
        Ok(Exchange { wires, neighbours, membership, health, topic, job: self.job() })
    }

    /// Creates this rank's end of the stream of messages to or from `peer`.
    fn end(&self, peer: usize, direction: Direction, waiters: &Arc<Waiters>) -> Result<End, CommError> {
        let Membership { group, rank, .. } = self.membership;
        let (wires, neighbours): (Box<dyn Wires>, _) = match &self.links {
            Links::Shm(Shared { segment, neighbours }) => {
                let wires = if direction == Direction::Out { ShmWires::outgoing } else { ShmWires::incoming };
                (Box::new(wires(segment, rank, peer, self.spin_time())), neighbours.clone())
            }
            Links::Hosts(Hosts { own, cell, .. }) if own.contains(&peer) => {
                return cell.end(peer - own.start, direction, waiters);
            }
            Links::Tcp { messages, .. } | Links::Hosts(Hosts { messages, .. }) => {
                let only = |(index, stream): (usize, &Option<TcpStream>)| {
                    stream.as_ref().filter(|_| index == peer).map(TcpStream::try_clone).transpose()
                };
                let streams = messages.iter().enumerate().map(only);
                let streams = streams.collect::<std::io::Result<_>>().and_then(TcpWires::new);
                (Box::new(streams.map_err(|error| self.io(error))?), None)
            }
        };
        let (membership, health) = (self.membership.clone(), Arc::clone(&self.world.health));
        let (from, to) = if direction == Direction::Out { (rank, peer) } else { (peer, rank) };
        let topic = Topic::messages(group, from, to, waiters);
        Ok(End { wires, neighbours, membership, health, topic, job: self.job(), peer })
    }
}

/// The direction of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Out,
    In,
}

impl Fabric for Processes {
    fn transport(&self) -> &'static str {
        match self.links {
            Links::Tcp { .. } => "tcp",
            Links::Shm(_) => "shared memory",
            Links::Hosts(_) => "shared memory and tcp",
        }
    }

    fn collective(&self, waiters: &Arc<Waiters>) -> Result<Box<dyn Collective>, CommError> {
        let exchange = self.exchange(waiters)?;
        Ok(match &self.links {
            Links::Hosts(Hosts { cells, cell, .. }) => {
                Box::new(Hierarchy::new(cells.clone(), cell.collective(waiters)?, exchange))
            }
            Links::Tcp { .. } | Links::Shm(_) => Box::new(exchange),
        })
    }

    fn outbox(&self, peer: usize, waiters: &Arc<Waiters>) -> Result<Box<dyn Outbox>, CommError> {
        Ok(Box::new(StreamOutbox(self.end(peer, Direction::Out, waiters)?)))
    }

    fn inbox(&self, peer: usize, waiters: &Arc<Waiters>) -> Result<Box<dyn Inbox>, CommError> {
        Ok(Box::new(StreamInbox(self.end(peer, Direction::In, waiters)?)))
    }

    fn connect(&self, membership: Membership) -> Result<Box<dyn Fabric>, CommError> {
        let deadline = Instant::now() + self.world.timeout;
        Ok(Box::new(Processes::connect(&self.world, membership, deadline)?))
    }
}
