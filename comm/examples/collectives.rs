//! Times the collectives between ranks, and compares coalesced operations on several vectors with separate ones.
//!
//! `collectives N [threads|shm|tcp|hosts] [BYTES] [REPEATS]` starts N ranks on this host. With `hosts`, they
//! communicate as if they were on two hosts. Under a launcher, on one host or several, the process is one rank.

use std::process::{Child, Command, ExitCode};
use std::sync::Arc;
use std::time::Instant;

use zero_comm::store::StoreServer;
use zero_comm::{
    Buffer, Communicator, Gathered, LauncherEnvironment, Operation, Options, ProcessTransport, ReduceOp, Scattered,
    SharedAllocator, ToGather, ToScatter, connect, measure, threads,
};

/// Without this allocator, vectors between processes of one host pass through rings.
#[global_allocator]
static ALLOCATOR: SharedAllocator = SharedAllocator;

type AnyError = Box<dyn std::error::Error>;

fn main() -> Result<ExitCode, AnyError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |i: usize, default: &str| arguments.get(i).cloned().unwrap_or(default.into());
    let (size, transport): (usize, _) = (argument(0, "2").parse()?, argument(1, "shm"));
    let (bytes, repeats) = (argument(2, "67108864").parse()?, argument(3, "30").parse()?);
    let variable = |name: &str| std::env::var(name).ok();
    let (token, interface) = (variable("ZERO_TRAIN_TOKEN"), variable("ZERO_TRAIN_INTERFACE"));
    let mut options = Options { token, interface, ..Options::default() };
    let place = LauncherEnvironment::from_environment(variable)?;
    options.transport = match transport.as_str() {
        "tcp" => ProcessTransport::Tcp,
        "hosts" => ProcessTransport::Auto,
        _ => ProcessTransport::SharedMemory,
    };
    options.host = (transport == "hosts").then(|| (2 * place.rank / place.world_size).to_string());
    if place.world_size > 1 {
        measure_all(&*connect(&place, &options)?, bytes, repeats)?;
    } else if transport == "threads" {
        let ranks = threads(size, &options).into_iter();
        let work = |comm: Arc<dyn Communicator>| move || measure_all(&*comm, bytes, repeats).map_err(|e| e.to_string());
        let ranks: Vec<_> = ranks.map(|comm| std::thread::spawn(work(comm))).collect();
        for rank in ranks {
            rank.join().map_err(|_| "a rank panicked")??;
        }
    } else {
        return launch(size);
    }
    Ok(ExitCode::SUCCESS)
}

fn measure_all(comm: &dyn Communicator, bytes: usize, repeats: usize) -> Result<(), AnyError> {
    // Writing other memory between the runs evicts the vectors from the caches.
    let mut other = vec![0u8; 2 * bytes];
    for operation in
        Operation::ALL.into_iter().filter(|operation| !matches!(operation, Operation::Recv | Operation::Split))
    {
        let evict = || std::hint::black_box(&mut other).fill(1);
        let [mut times, _] = measure::times(comm, operation, bytes, repeats, evict)?;
        times.sort();
        if let (0, Some(best)) = (comm.rank(), times.first()) {
            println!(
                "{:14} {bytes:>10} B over {}: median {:.1?}, best {best:.1?}",
                operation.name(),
                comm.transport(),
                times[repeats / 2],
            );
        }
    }
    for operation in [Operation::AllGather, Operation::ReduceScatter] {
        measure_coalesced(comm, operation, bytes / VECTORS, repeats)?;
    }
    comm.barrier().wait()?;
    Ok(())
}

/// Number of vectors of a coalesced operation.
const VECTORS: usize = 5;

/// Times two alternatives in turn: separate operations on vectors of `bytes` bytes that are started together, and one
/// coalesced operation on the same vectors.
fn measure_coalesced(
    comm: &dyn Communicator,
    operation: Operation,
    bytes: usize,
    repeats: usize,
) -> Result<(), AnyError> {
    let count = bytes / size_of::<f32>() / comm.size();
    let counts = vec![count; comm.size()];
    let mut vectors: Vec<(Buffer, Buffer)> =
        (0..VECTORS).map(|_| (vec![1f32; count].into(), vec![1f32; count * comm.size()].into())).collect();
    let mut times = [vec![], vec![]];
    for turn in 0..2 * repeats {
        comm.barrier().wait()?;
        let (started, parts) = (Instant::now(), std::mem::take(&mut vectors).into_iter());
        let gathered = |Gathered { shard, output }| (shard, output);
        let scattered = |Scattered { input, shard }| (shard, input);
        vectors = match (operation, turn % 2) {
            (Operation::AllGather, 0) => {
                let all: Vec<_> = parts.map(|(shard, output)| comm.all_gather(shard, output, &counts)).collect();
                all.into_iter().map(|one| one.wait().map(gathered)).collect::<Result<_, _>>()?
            }
            (Operation::AllGather, _) => {
                let parts = parts.map(|(shard, output)| ToGather { shard, output, counts: counts.clone() });
                comm.all_gather_coalesced(parts.collect()).wait()?.into_iter().map(gathered).collect()
            }
            (_, 0) => {
                let start = |(shard, input)| comm.reduce_scatter(input, shard, &counts, ReduceOp::Max);
                let all: Vec<_> = parts.map(start).collect();
                all.into_iter().map(|one| one.wait().map(scattered)).collect::<Result<_, _>>()?
            }
            _ => {
                let parts = parts.map(|(shard, input)| ToScatter { input, shard, counts: counts.clone() });
                comm.reduce_scatter_coalesced(parts.collect(), ReduceOp::Max)
                    .wait()?
                    .into_iter()
                    .map(scattered)
                    .collect()
            }
        };
        times[turn % 2].push(started.elapsed());
    }
    if comm.rank() == 0 {
        times.iter_mut().for_each(|times| times.sort());
        let [separate, coalesced] = times.map(|times| [1, 2, 3].map(|quarter| times[quarter * (repeats - 1) / 4]));
        println!(
            "{VECTORS} × {:14} {bytes:>10} B: separate {:.1?} ({:.1?} – {:.1?}), coalesced {:.1?} ({:.1?} – {:.1?})",
            operation.name(),
            separate[1],
            separate[0],
            separate[2],
            coalesced[1],
            coalesced[0],
            coalesced[2],
        );
    }
    Ok(())
}

/// Starts this program once per rank and serves the store for their rendezvous.
fn launch(size: usize) -> Result<ExitCode, AnyError> {
    let token = format!("{:?}", std::time::SystemTime::now());
    let store = StoreServer::bind(("127.0.0.1", 0), Some(&token))?;
    let start = |rank: usize| -> std::io::Result<Child> {
        let variables = [
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("WORLD_SIZE", size.to_string()),
            ("LOCAL_WORLD_SIZE", size.to_string()),
            ("MASTER_ADDR", store.address().ip().to_string()),
            ("MASTER_PORT", store.address().port().to_string()),
            ("ZERO_TRAIN_TOKEN", token.clone()),
        ];
        Command::new(std::env::current_exe()?).args(std::env::args().skip(1)).envs(variables).spawn()
    };
    let children: Vec<Child> = (0..size).map(start).collect::<std::io::Result<_>>()?;
    let mut good = true;
    for mut child in children {
        good &= child.wait()?.success();
    }
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
