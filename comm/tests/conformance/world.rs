//! Creates jobs over each transport and runs a closure on each of their ranks.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use zero_comm::store::StoreServer;
use zero_comm::{Communicator, LauncherEnvironment, Options, ProcessTransport, connect, threads};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Threads,
    /// Threads whose operations on devices run ahead of the host.
    #[allow(dead_code)]
    Ahead,
    SharedMemory,
    Tcp,
    /// Two hosts; the first has the larger half of the ranks.
    Hosts,
    /// Hosts of two ranks each. The last host may have one rank. Not every program of the suite uses this kind.
    #[allow(dead_code)]
    Pairs,
}

/// Returns the number of ranks on the first of two hosts.
pub(crate) fn first_host(size: usize) -> usize {
    size.div_ceil(2)
}

/// Runs `rank` on every rank of a job and returns the results in rank order. Each rank drops its communicator when it
/// returns.
pub(crate) fn run<T: Send>(kind: Kind, size: usize, rank: impl Fn(Arc<dyn Communicator>) -> T + Sync) -> Vec<T> {
    run_with(kind, size, &Options::default(), rank)
}

pub(crate) fn run_with<T: Send>(
    kind: Kind,
    size: usize,
    options: &Options,
    rank: impl Fn(Arc<dyn Communicator>) -> T + Sync,
) -> Vec<T> {
    let results: Vec<std::thread::Result<T>> = run_catching(kind, size, options, rank);
    results.into_iter().map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
}

/// Like `run_with`, for ranks that may panic.
pub(crate) fn run_catching<T: Send>(
    kind: Kind,
    size: usize,
    options: &Options,
    rank: impl Fn(Arc<dyn Communicator>) -> T + Sync,
) -> Vec<std::thread::Result<T>> {
    let transport = match kind {
        Kind::Tcp => ProcessTransport::Tcp,
        Kind::Hosts | Kind::Pairs => ProcessTransport::Auto,
        Kind::Threads | Kind::Ahead | Kind::SharedMemory => ProcessTransport::SharedMemory,
    };
    let options = Options { transport, token: Some("conformance".into()), ..options.clone() };
    let store = StoreServer::bind(("127.0.0.1", 0), options.token.as_deref()).expect("a free port");
    let is_in_process = matches!(kind, Kind::Threads | Kind::Ahead);
    let mut in_process = if is_in_process { threads(size, &options) } else { Vec::new() };
    let place = |rank| LauncherEnvironment {
        rank,
        world_size: size,
        local_rank: rank,
        local_world_size: size,
        master_port: store.address().port(),
        run_id: "conformance".into(),
        ..LauncherEnvironment::alone()
    };
    // Wait until all ranks have connected before any of them misbehaves.
    let met = AtomicUsize::new(0);
    let (rank, options, place, met) = (&rank, &options, &place, &met);
    std::thread::scope(|scope| {
        let start = |number: usize| {
            let ready = is_in_process.then(|| in_process.remove(0));
            scope.spawn(move || {
                let host = match kind {
                    Kind::Hosts => Some(number / first_host(size)),
                    Kind::Pairs => Some(number / 2),
                    Kind::Threads | Kind::Ahead | Kind::SharedMemory | Kind::Tcp => None,
                };
                let host = host.map(|host| host.to_string());
                let options = Options { host, ..options.clone() };
                let comm = ready.unwrap_or_else(|| connect(&place(number), &options).expect("the ranks meet"));
                let comm = crate::tested(comm);
                if kind == Kind::Ahead {
                    comm.run_ahead();
                }
                assert_eq!((comm.rank(), comm.size()), (number, size));
                met.fetch_add(1, Ordering::SeqCst);
                let patience = Instant::now() + Duration::from_secs(60);
                while met.load(Ordering::SeqCst) < size && Instant::now() < patience {
                    std::thread::sleep(Duration::from_millis(1));
                }
                rank(comm)
            })
        };
        let running: Vec<_> = (0..size).map(start).collect();
        running.into_iter().map(|thread| thread.join()).collect()
    })
}

/// Returns options with a deadline short enough for a test to wait for, but long enough for ranks that share their
/// cores.
pub(crate) fn impatient() -> Options {
    Options { timeout: Duration::from_secs(3), ..Options::default() }
}

/// Lets a rank wait until a number of other ranks have given up.
#[derive(Default)]
pub(crate) struct GivenUp(AtomicUsize);

impl GivenUp {
    pub(crate) fn add_one(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn wait_for(&self, others: usize) {
        let patience = Instant::now() + Duration::from_secs(60);
        while self.0.load(Ordering::SeqCst) < others {
            assert!(Instant::now() < patience, "the others do not give up");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
