//! Ranks as real processes: what happens when the operating system kills or stops one.
//!
//! The program starts itself again, once per rank, with the name of a scene in the environment. It has no test harness,
//! so that a child's output contains nothing else.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use zero_comm::store::StoreServer;
use zero_comm::{
    Buffer, CommError, Communicator, LauncherEnvironment, Operation, Options, ProcessTransport, ReduceOp, connect,
};

const SCENE: &str = "ZERO_COMM_TEST_SCENE";
const TRANSPORT: &str = "ZERO_COMM_TEST_TRANSPORT";
const TOKEN: &str = "ZERO_TRAIN_TOKEN";
/// Environment variable with the command of the emulator, if one runs this program. The ranks then need the emulator
/// too.
const RUNNER: &str = "ZERO_COMM_TEST_RUNNER";

/// How long ranks wait for a rank that was stopped.
const PATIENCE: Duration = Duration::from_secs(4);

/// The name of a scenario (here called a scene), and the test that runs it over a transport.
type Scene = (&'static str, fn(&str));

/// Runs this process as a rank if it was started as one; otherwise runs all scenes.
pub(crate) fn play(transports: &[&str]) {
    if let Ok(scene) = std::env::var(SCENE) {
        return rank(&scene);
    }
    let play = |transport: &str, (name, test): Scene| {
        test(transport);
        println!("{transport}: {name} ... ok");
    };
    let scenes: [Scene; _] = [
        ("a rank is killed while the others work", |transport| kill_one("work", transport, 1)),
        ("a rank is killed in an all_to_all", |transport| kill_one("exchange", transport, 2)),
        ("a rank is killed while the others sleep", |transport| kill_one("sleep", transport, 1)),
        ("a rank is killed in a mesh of groups", |transport| kill_one("mesh", transport, 3)),
        ("a rank ends right after the last operation", leaves_early),
        ("nothing is left behind", nothing_left),
    ];
    for transport in transports {
        scenes.into_iter().for_each(|scene| play(transport, scene));
    }
    wrong_token();
    println!("a rank with another token ... ok");
    // In these scenes, ranks mostly wait for several seconds, so the scenes run at the same time.
    let scenes: [Scene; _] = [
        ("a rank is stopped", |transport| stop_last("stopped", transport, 3, "all_reduce #")),
        ("a rank is stopped in an all_to_all", |transport| {
            stop_last("stopped exchange", transport, 3, "all_to_all #");
        }),
        ("a rank is stopped in a mesh of groups", |transport| stop_last("stopped mesh", transport, 4, "")),
    ];
    std::thread::scope(|scope| {
        for scene in scenes {
            scope.spawn(move || transports.iter().for_each(|transport| play(transport, scene)));
        }
        old_attempt();
        println!("a rank of another attempt ... ok");
    });
}

/// Runs a rank. It prints `ready` before the scene begins, and the error that ends it.
fn rank(scene: &str) {
    let place = LauncherEnvironment::from_environment(|name| std::env::var(name).ok()).expect("a place");
    let (transport, host) = match std::env::var(TRANSPORT).as_deref() {
        Ok("tcp") => (ProcessTransport::Tcp, None),
        // Two ranks per host.
        Ok("hosts") => (ProcessTransport::Auto, Some((place.rank / 2).to_string())),
        _ => (ProcessTransport::SharedMemory, None),
    };
    // The timeout is long enough for a busy machine, on which a process may not run for a second.
    let timeout = if scene.starts_with("stopped") { PATIENCE } else { Duration::from_secs(60) };
    let meeting_timeout = Duration::from_secs(if scene == "meet" { 6 } else { 60 });
    let token = std::env::var(TOKEN).ok();
    let options = Options { transport, host, token, timeout, meeting_timeout, ..Options::default() };
    let outcome = connect(&place, &options).and_then(|comm| {
        // Create the groups before printing `ready`. If a rank were killed during this, the ranks that wait for it in
        // `split` would report it instead.
        let mesh = if scene.ends_with("mesh") { Some(mesh(&*comm)?) } else { None };
        comm.barrier().wait()?;
        println!("ready");
        if let Some([pipe, data]) = mesh {
            return work_in_a_mesh(comm.rank(), &*pipe, &*data);
        }
        match scene {
            "work" => work(&*comm, FOREVER),
            "exchange" | "stopped exchange" => exchange(&*comm),
            "sleep" if comm.rank() == 1 => {
                std::thread::sleep(Duration::from_secs(60));
                Ok(())
            }
            "sleep" => comm.barrier().wait(),
            "stopped" => work(&*comm, FOREVER),
            "leave" => {
                work(&*comm, 10)?;
                comm.barrier().wait()?;
                // Ends the process without notifying the others.
                std::process::exit(0);
            }
            _ => work(&*comm, 20),
        }
    });
    if let Err(error) = outcome {
        println!("error: {error}");
        std::process::exit(4);
    }
}

/// More rounds than any test runs.
const FOREVER: usize = 1_000_000;

fn work(comm: &dyn Communicator, rounds: usize) -> Result<(), CommError> {
    let mut buffer = Buffer::from(vec![1f32; 1 << 20]);
    for _ in 0..rounds {
        buffer = comm.all_reduce(buffer, ReduceOp::Max).wait()?;
    }
    let done = comm.stats()[Operation::AllReduce];
    assert_eq!(done.in_place, if crate::IN_PLACE { done.calls } else { 0 });
    Ok(())
}

fn exchange(comm: &dyn Communicator) -> Result<(), CommError> {
    let counts = vec![1 << 18; comm.size()];
    let buffer = || Buffer::from(vec![1f32; counts.iter().sum()]);
    let (mut input, mut output) = (buffer(), buffer());
    for _ in 0..FOREVER {
        let exchanged = comm.all_to_all(input, output, &counts, &counts).wait()?;
        (input, output) = (exchanged.output, exchanged.input);
    }
    Ok(())
}

/// Returns the pipe and the data group of this rank.
fn mesh(comm: &dyn Communicator) -> Result<[Arc<dyn Communicator>; 2], CommError> {
    let (stage, column) = (comm.rank() / 2, comm.rank() % 2);
    Ok([comm.split(column, stage)?, comm.split(stage, column)?])
}

/// Runs two pipes of two stages. Ranks 0 and 1 reduce in their data group, and rank 3 only exchanges messages with rank
/// 1 in its pipe. Ranks 0 and 2 therefore wait for ranks that wait for rank 3.
fn work_in_a_mesh(rank: usize, pipe: &dyn Communicator, data: &dyn Communicator) -> Result<(), CommError> {
    let stage = rank / 2;
    let message = || Buffer::from(vec![1f32; 1 << 18]);
    for _ in 0..FOREVER {
        let received = pipe.recv(message(), 1 - stage);
        let sent = pipe.send(message(), 1 - stage);
        received.wait()?;
        if rank < 2 {
            data.all_reduce(message(), ReduceOp::Sum).wait()?;
        }
        sent.wait()?;
    }
    Ok(())
}

fn this_program() -> Command {
    let program = std::env::current_exe().expect("this program");
    let runner = std::env::var(RUNNER).unwrap_or_default();
    let mut words = runner.split_whitespace();
    let Some(emulator) = words.next() else { return Command::new(program) };
    let mut command = Command::new(emulator);
    command.args(words).arg(program);
    command
}

/// Child processes, killed when the test ends in any way.
struct Ranks {
    children: Vec<Child>,
    _store: StoreServer,
}

impl Ranks {
    fn start(scene: &str, transport: &str, size: usize, change: impl Fn(usize, &mut Command)) -> Ranks {
        let store = StoreServer::bind(("127.0.0.1", 0), Some("token")).expect("a port");
        let start = |rank: usize| {
            let mut command = this_program();
            command.env(SCENE, scene).env(TRANSPORT, transport).env(TOKEN, "token").stdout(Stdio::piped());
            for (name, value) in
                [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", size), ("LOCAL_WORLD_SIZE", size)]
            {
                command.env(name, value.to_string());
            }
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", store.address().port().to_string());
            change(rank, &mut command);
            command.spawn().expect("a rank starts")
        };
        Ranks { children: (0..size).map(start).collect(), _store: store }
    }

    fn signal(&self, rank: usize, signal: &str) {
        let process = self.children[rank].id().to_string();
        let done = Command::new("kill").args([signal, &process]).status().expect("kill runs");
        assert!(done.success());
    }

    /// Waits until all ranks have printed `ready`, and returns the rest of their output.
    fn ready(&mut self) -> Vec<BufReader<std::process::ChildStdout>> {
        let ready = |child: &mut Child| {
            let mut output = BufReader::new(child.stdout.take().expect("piped"));
            let mut line = String::new();
            output.read_line(&mut line).expect("a line");
            assert_eq!(line, "ready\n");
            output
        };
        self.children.iter_mut().map(ready).collect()
    }

    fn wait(&mut self, rank: usize) -> ExitStatus {
        self.children[rank].wait().expect("the rank ends")
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn rest(mut output: impl BufRead) -> String {
    let mut text = String::new();
    output.read_to_string(&mut text).expect("text");
    text
}

/// Kills one of four ranks and checks that the others report a lost rank, not a passed deadline.
fn kill_one(scene: &str, transport: &str, victim: usize) {
    let mut ranks = Ranks::start(scene, transport, 4, |_, _| {});
    let outputs = ranks.ready();
    std::thread::sleep(Duration::from_millis(100));
    ranks.signal(victim, "-KILL");
    let killed = Instant::now();
    for (rank, output) in outputs.into_iter().enumerate().filter(|(rank, _)| *rank != victim) {
        assert_eq!(ranks.wait(rank).code(), Some(4));
        let text = rest(output);
        assert!(text.starts_with(&format!("error: rank {rank} lost rank {victim} in ")), "{text}");
    }
    println!("{transport}: all noticed after {:?}", killed.elapsed());
}

/// Stops the last of `size` ranks and checks that the others name it and their operation when their timeout has passed.
fn stop_last(scene: &str, transport: &str, size: usize, operation: &str) {
    let mut ranks = Ranks::start(scene, transport, size, |_, _| {});
    let (outputs, last) = (ranks.ready(), size - 1);
    std::thread::sleep(Duration::from_millis(100));
    ranks.signal(last, "-STOP");
    for (rank, output) in outputs.into_iter().enumerate().take(last) {
        assert_eq!(ranks.wait(rank).code(), Some(4));
        let text = rest(output);
        let expected = format!("timed out after {PATIENCE:?} waiting for rank {last} in {operation}");
        assert!(text.contains(&expected), "{text}");
    }
}

fn leaves_early(transport: &str) {
    for _ in 0..10 {
        let mut ranks = Ranks::start("leave", transport, 3, |_, _| {});
        let outputs = ranks.ready();
        for (rank, output) in outputs.into_iter().enumerate() {
            assert!(ranks.wait(rank).success(), "{}", rest(output));
        }
    }
}

fn nothing_left(transport: &str) {
    let before = shared_memory_files();
    let mut ranks = Ranks::start("work", transport, 2, |_, _| {});
    drop(ranks.ready());
    assert_eq!(shared_memory_files(), before, "not even while it runs");
    drop(ranks);
    assert_eq!(shared_memory_files(), before);
}

fn shared_memory_files() -> usize {
    std::fs::read_dir("/dev/shm").map_or(0, |entries| {
        entries.flatten().filter(|entry| entry.file_name().to_string_lossy().contains("zero")).count()
    })
}

/// Starts two ranks with commands that `change` has changed, and checks the error that rank 1 reports.
fn refused(change: impl Fn(usize, &mut Command), error: &str) {
    let mut ranks = Ranks::start("meet", "tcp", 2, change);
    let output = ranks.children[1].stdout.take().expect("piped");
    assert_eq!(ranks.wait(1).code(), Some(4));
    let text = rest(BufReader::new(output));
    assert!(text.contains(error), "{text}");
}

fn wrong_token() {
    let change = |rank: usize, command: &mut Command| {
        if rank == 1 {
            command.env(TOKEN, "guess");
        }
    };
    refused(change, "has a different job token");
}

fn old_attempt() {
    let change = |rank: usize, command: &mut Command| {
        command.env("TORCHELASTIC_RESTART_COUNT", rank.to_string());
    };
    refused(change, "/zero/local/1/0 did not appear");
}
