//! Times the collectives between ranks.
//!
//! `collectives N [threads|shm|tcp|hosts] [BYTES] [REPEATS]` starts N ranks on this host; with `hosts` they count as
//! ranks of two hosts. Under a launcher, on one host or several, the process is one rank.

use std::process::{Child, Command, ExitCode};
use std::sync::Arc;

use zero_comm::store::StoreServer;
use zero_comm::{
    Communicator, LauncherEnvironment, Operation, Options, SharedAllocator, Transport, bench, connect, threads,
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
        "tcp" => Transport::Tcp,
        "hosts" => Transport::Auto,
        _ => Transport::SharedMemory,
    };
    options.host = (transport == "hosts").then(|| (2 * place.rank / place.world_size).to_string());
    if place.world_size > 1 {
        measure(&*connect(&place, &options)?, bytes, repeats)?;
    } else if transport == "threads" {
        let ranks = threads(size, &options).into_iter();
        let work = |comm: Arc<dyn Communicator>| move || measure(&*comm, bytes, repeats).map_err(|e| e.to_string());
        let ranks: Vec<_> = ranks.map(|comm| std::thread::spawn(work(comm))).collect();
        for rank in ranks {
            rank.join().map_err(|_| "a rank panicked")??;
        }
    } else {
        return launch(size);
    }
    Ok(ExitCode::SUCCESS)
}

fn measure(comm: &dyn Communicator, bytes: usize, repeats: usize) -> Result<(), AnyError> {
    for operation in
        Operation::ALL.into_iter().filter(|operation| !matches!(operation, Operation::Recv | Operation::Split))
    {
        let times = bench::compare(comm, operation, bytes, repeats)?;
        if comm.rank() == 0 {
            let (median, floor) = (bench::median(&times.subject), bench::median(&times.floor));
            let best = times.subject.iter().min().copied().unwrap_or_default();
            println!(
                "{:14} {bytes:>10} B over {}: median {median:.1?}, best {best:.1?}; floor {floor:.1?}, ratio {:.2}",
                operation.name(),
                comm.transport(),
                times.ratios().get(repeats / 2).copied().unwrap_or_default(),
            );
        }
    }
    comm.barrier().wait()?;
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
