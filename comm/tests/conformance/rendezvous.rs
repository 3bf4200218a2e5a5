//! The rendezvous of ranks: the store, unauthenticated clients, and PyTorch's store in place of this crate's.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::port::free_port;
use zero_comm::store::{StoreClient, StoreError, StoreServer};
use zero_comm::{CommError, LauncherEnvironment, Options, ProcessTransport, ReduceOp, connect};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn client(server: &StoreServer, token: Option<&str>) -> Result<StoreClient, StoreError> {
    StoreClient::connect(&server.address().to_string(), token, soon())
}

fn place(rank: usize, size: usize, port: u16) -> LauncherEnvironment {
    LauncherEnvironment {
        rank,
        world_size: size,
        local_rank: rank,
        local_world_size: size,
        master_port: port,
        ..LauncherEnvironment::alone()
    }
}

/// Runs a job that meets at `port` and sums the numbers of its ranks. Each rank has its own options.
fn meet(options: &[Options], port: u16) -> Vec<Result<i64, CommError>> {
    let size = options.len();
    let rank = |rank: usize| {
        let comm = connect(&place(rank, size, port), &options[rank])?;
        let sum = comm.all_reduce(vec![rank as i64].into(), ReduceOp::Sum).wait()?.into_i64()?;
        comm.barrier().wait()?;
        Ok(sum[0])
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..size).map(|number| scope.spawn(move || rank(number))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    })
}

/// Returns the options of a rank with these terms.
fn with_terms(terms: &[(&str, &str)]) -> Options {
    let terms = terms.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
    Options { terms, ..Options::default() }
}

/// Checks that a program can connect again, as for a second engine, although the store still has the addresses of the
/// first connection.
#[test]
fn ranks_connect_several_times() {
    let server = StoreServer::bind(("127.0.0.1", 0), None).expect("a server");
    for _ in 0..3 {
        for sum in meet(&[Options::default(), Options::default()], server.address().port()) {
            assert_eq!(sum.expect("the ranks connect"), 1);
        }
    }
}

#[test]
fn values_can_be_set_and_awaited() {
    let server = StoreServer::bind(("127.0.0.1", 0), Some("token")).expect("a server");
    let mut first = client(&server, Some("token")).expect("a client");
    let mut second = client(&server, Some("token")).expect("a client");
    first.set("a", b"1").expect("set");
    assert_eq!(second.get("a", soon()), Ok(b"1".to_vec()));
    let waiting = std::thread::spawn(move || second.get("late", soon()));
    std::thread::sleep(Duration::from_millis(30));
    first.set("late", &[7; 1000]).expect("set");
    assert_eq!(waiting.join().expect("no panic"), Ok(vec![7; 1000]));
    let missing = first.get("never", Instant::now() + Duration::from_millis(30));
    assert!(matches!(missing, Err(StoreError::Missing { key, .. }) if key == "never"));
    assert!(matches!(first.set("big", &[0; 100_000]), Err(StoreError::TooLong { bytes: 100_000, .. })));
    first.set("a", b"2").expect("the connection is still good");
}

#[test]
fn a_store_serves_nobody_without_the_token() {
    let server = StoreServer::bind(("127.0.0.1", 0), Some("token")).expect("a server");
    for guess in [None, Some(""), Some("Token")] {
        assert!(matches!(client(&server, guess), Err(StoreError::Unauthorized { .. })), "{guess:?}");
    }
    // The store does not answer requests in the protocol of PyTorch's store.
    let mut stream = TcpStream::connect(server.address()).expect("a connection");
    stream.write_all(&[0, 0xCE, 0xF7, 0x85, 0x3C, 7, 7]).expect("sent");
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(answer.len() <= 64, "no more than a greeting");
}

#[test]
fn a_port_in_use_is_reported() {
    let server = StoreServer::bind(("127.0.0.1", 0), None).expect("a server");
    let second = StoreServer::bind(server.address(), None).map(|_| ());
    assert!(matches!(second, Err(StoreError::Bind { in_use: true, .. })), "{second:?}");
}

#[test]
fn unauthenticated_connections_do_not_block_the_ranks() {
    let server = StoreServer::bind(("127.0.0.1", 0), Some("token")).expect("a server");
    // Half of the connections send nothing, and half send garbage. Together they exceed the limit for
    // unauthenticated connections.
    let strangers: Vec<TcpStream> = (0..100)
        .map(|i| {
            let mut stream = TcpStream::connect(server.address()).expect("a connection");
            if i % 2 == 0 {
                let _ = stream.write_all(&[i; 300]);
            }
            stream
        })
        .collect();
    let options = Options { token: Some("token".into()), ..Options::default() };
    for sum in meet(&vec![options; 3], server.address().port()) {
        assert_eq!(sum, Ok(3));
    }
    drop(strangers);
}

#[test]
fn rank_0_serves_the_store_if_no_process_does() {
    for token in [None, Some("token".to_string())] {
        let options = Options { token, ..Options::default() };
        for sum in meet(&vec![options; 4], free_port()) {
            assert_eq!(sum, Ok(6));
        }
    }
}

#[test]
fn no_rank_serves_a_store_that_the_launcher_serves_later() {
    let port = free_port();
    let rank = |rank: usize| {
        let place = LauncherEnvironment { store_is_served: true, ..place(rank, 2, port) };
        connect(&place, &Options::default())?.barrier().wait()
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2).map(|number| scope.spawn(move || rank(number))).collect();
        std::thread::sleep(Duration::from_millis(200));
        let server = StoreServer::bind(("127.0.0.1", port), None).expect("the port is still free");
        for rank in ranks {
            assert_eq!(rank.join().expect("no panic"), Ok(()));
        }
        drop(server);
    });
}

#[test]
fn all_ranks_report_the_same_differing_key() {
    let usual = [("version", "1"), ("zero_optimization.stage", "3")];
    let other = [("version", "1"), ("zero_optimization.stage", "2")];
    // First with the launcher's store, then with rank 0's own, which must exist until the others have read the terms.
    let server = StoreServer::bind(("127.0.0.1", 0), None).expect("a server");
    for port in [server.address().port(), free_port()] {
        let error = CommError::Disagreement {
            rank: 0,
            peer: 2,
            key: "zero_optimization.stage".into(),
            here: "3".into(),
            there: "2".into(),
        };
        for result in meet(&[&usual, &usual, &other, &other].map(|terms| with_terms(terms)), port) {
            assert_eq!(result, Err(error.clone()));
        }
        assert!(error.to_string().contains("stage is 3 on rank 0 and 2 on rank 2"), "{error}");
    }
    for sum in meet(&vec![with_terms(&usual); 3], free_port()) {
        assert_eq!(sum, Ok(3));
    }
}

#[test]
fn a_leftover_rank_of_an_earlier_attempt_neither_joins_nor_disturbs() {
    let server = StoreServer::bind(("127.0.0.1", 0), None).expect("a server");
    let port = server.address().port();
    let in_attempt =
        |attempt: u32, rank: usize, size: usize| LauncherEnvironment { attempt, ..place(rank, size, port) };
    std::thread::scope(|scope| {
        // Rank 1 of attempt 0 is late. The other ranks of its attempt have already ended, and it waits for them.
        let patience = Options { meeting_timeout: Duration::from_secs(4), ..Options::default() };
        let late = scope.spawn(move || connect(&in_attempt(0, 1, 2), &patience).map(drop));
        std::thread::sleep(Duration::from_millis(100));
        let ranks: Vec<_> = (0..2)
            .map(|rank| {
                scope.spawn(move || {
                    let comm = connect(&in_attempt(1, rank, 2), &Options::default())?;
                    comm.all_reduce(vec![rank as i64].into(), ReduceOp::Sum).wait()?.into_i64()
                })
            })
            .collect();
        for rank in ranks {
            assert_eq!(rank.join().expect("no panic"), Ok(vec![1]));
        }
        let error = late.join().expect("no panic").expect_err("its attempt has ended").to_string();
        assert!(error.contains("/zero/local/0/") && error.contains("did not appear"), "{error}");
    });
}

#[test]
fn a_job_of_one_rank_does_not_wait() {
    let comm = connect(&LauncherEnvironment::alone(), &Options::default()).expect("a single rank connects");
    assert_eq!((comm.rank(), comm.size()), (0, 1));
    assert_eq!(comm.all_reduce(vec![1.5f32].into(), ReduceOp::Sum).wait(), Ok(vec![1.5f32].into()));
}

#[test]
fn a_rank_missing_at_the_rendezvous_is_named() {
    let options = Options { meeting_timeout: Duration::from_secs(3), ..Options::default() };
    std::thread::scope(|scope| {
        let alone = |rank| connect(&place(rank, 2, free_port()), &options).map(|_| ());
        let server = scope.spawn(move || alone(0).expect_err("rank 1 does not connect"));
        let error = alone(1).expect_err("nobody serves");
        assert!(matches!(error, CommError::Rendezvous { rank: 1, .. }), "{error}");
        let error = server.join().expect("no panic");
        assert!(error.to_string().contains("/zero/local/0/1 did not appear"), "{error}");
    });
}

#[test]
fn ranks_with_different_numbers_of_ranks_report_both() {
    let port = free_port();
    let start = |(rank, size)| connect(&place(rank, size, port), &Options::default()).map(drop);
    let ends = std::thread::scope(|scope| {
        let ranks = [(0, 2), (1, 3)].map(|started| scope.spawn(move || start(started)));
        ranks.map(|rank| rank.join().expect("no panic"))
    });
    for end in ends {
        let error = end.expect_err("2 and 3 ranks").to_string();
        assert!(error.ends_with(": the number of ranks is 2 on rank 0 and 3 on rank 1"), "{error}");
    }
}

#[test]
fn a_master_on_another_host_needs_an_interface() {
    // An address reserved for documentation: never on this machine.
    let place = LauncherEnvironment { master_addr: "192.0.2.1".into(), ..place(1, 2, free_port()) };
    let error = connect(&place, &Options::default()).map(drop).expect_err("unreachable").to_string();
    assert!(error.contains("192.0.2.1") && error.contains("set `launcher.interface`"), "{error}");
}

#[test]
fn other_hosts_need_a_token() {
    // An address reserved for documentation: never on this machine, and not loopback.
    let options = Options { interface: Some("192.0.2.1".into()), ..Options::default() };
    let error = connect(&place(0, 2, 29500), &options).map(|_| ()).expect_err("no token");
    assert!(error.to_string().contains("ZERO_TRAIN_TOKEN"), "{error}");
    let options = Options { interface: Some("nowhere0".into()), token: Some("t".into()), ..Options::default() };
    let error = connect(&place(0, 2, 29500), &options).map(|_| ()).expect_err("no interface");
    assert!(error.to_string().contains("nowhere0"), "{error}");
    let options = Options { interface: Some("lo".into()), token: Some("t".into()), ..Options::default() };
    assert_eq!(meet(&vec![options; 2], free_port()), [Ok(1), Ok(1)]);
}

/// The part of PyTorch's `TCPStore` that this crate's clients use, written from the description of its protocol.
fn torch_store(listener: &TcpListener) {
    let values = std::sync::Mutex::new(HashMap::<Vec<u8>, Vec<u8>>::new());
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let (mut stream, _) = listener.accept().expect("a client");
            let values = &values;
            scope.spawn(move || {
                let mut number = [0; 4];
                let mut code = [0];
                while stream.read_exact(&mut code).is_ok() {
                    match code[0] {
                        0 => {
                            stream.read_exact(&mut number).expect("a magic number");
                            assert_eq!(u32::from_le_bytes(number), 0x3C85_F7CE);
                        }
                        1 => {
                            let (key, value) = (string(&mut stream), string(&mut stream));
                            values.lock().expect("lock").insert(key, value);
                        }
                        3 => {
                            let value = values.lock().expect("lock")[&string(&mut stream)].clone();
                            stream.write_all(&(value.len() as u64).to_le_bytes()).expect("answered");
                            stream.write_all(&value).expect("answered");
                        }
                        6 => {
                            let mut count = [0; 8];
                            stream.read_exact(&mut count).expect("a count");
                            assert_eq!(u64::from_le_bytes(count), 1);
                            let key = string(&mut stream);
                            while !values.lock().expect("lock").contains_key(&key) {
                                std::thread::sleep(Duration::from_millis(1));
                            }
                            stream.write_all(&[0]).expect("answered");
                        }
                        13 => {
                            stream.read_exact(&mut number).expect("a number");
                            stream.write_all(&number).expect("answered");
                        }
                        other => panic!("request {other}"),
                    }
                }
            });
        }
    });
}

fn string(stream: &mut TcpStream) -> Vec<u8> {
    let mut length = [0; 8];
    stream.read_exact(&mut length).expect("a length");
    let mut bytes = vec![0; u64::from_le_bytes(length) as usize];
    stream.read_exact(&mut bytes).expect("a string");
    bytes
}

#[test]
fn pytorch_store_works_as_rendezvous() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address: SocketAddr = listener.local_addr().expect("an address");
    let store = std::thread::spawn(move || torch_store(&listener));
    let options = Options { transport: ProcessTransport::Tcp, ..Options::default() };
    for sum in meet(&vec![options; 3], address.port()) {
        assert_eq!(sum, Ok(3));
    }
    store.join().expect("the store understood everything");
}
