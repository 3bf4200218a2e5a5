//! Training on files of a web server with faults. It gives the same losses, or an error with the address and the byte.

use std::fs;
use std::time::Duration;

#[path = "../../../../store/tests/store/server.rs"]
mod server;

use super::{corpus, data, local_losses};
use crate::case::{Case, text};
use server::{Fault, Server};

/// Puts the corpus on a server, which sends checksums as S3 does. Returns the value of `data.train`.
fn put(server: &Server) -> String {
    let urls = corpus().into_iter().map(|(name, content)| {
        use md5::{Digest, Md5};
        let hash: String = Md5::digest(&content).iter().map(|byte| format!("{byte:02x}")).collect();
        server.put(name, content, &[("etag", &format!("\"{hash}\"")), ("x-amz-request-id", "1")]);
        server.url(name)
    });
    format!("[{}]", urls.collect::<Vec<_>>().join(", "))
}

#[test]
fn two_ranks_download_once_and_train_as_on_local_files() {
    let (case, server) = (Case::new(), Server::start());
    let urls = put(&server);
    server.fail("a.txt", Fault::Cut(100_000, 2));
    server.fail("b.txt", Fault::Status(503, 2));
    server.fail("b.txt", Fault::Flip { byte: 1_000_000, times: 1, varies: false });
    let cache = case.path("cache").display().to_string();
    let train = |out: &str| case.train(&["--max-steps", "4", "-n", "2", "--out", out, "--set", &data(&urls, &cache)]);
    train("first");
    let requests = server.requests();
    assert_eq!(case.losses("first"), local_losses_of_two(&case));
    // The second run finds all files in the cache.
    train("second");
    assert_eq!(server.requests(), requests);
    assert_eq!(case.losses("second"), case.losses("first"));
}

fn local_losses_of_two(case: &Case) -> Vec<String> {
    local_losses(case);
    let cache = case.path("local-cache").display().to_string();
    let set = data("[a.txt, b.txt]", &cache);
    case.train(&["--quiet", "--max-steps", "4", "-n", "2", "--out", "local-2", "--set", &set]);
    case.losses("local-2")
}

#[test]
fn a_server_that_is_killed_in_the_middle_delays_the_run() {
    let (case, server) = (Case::new(), Server::start());
    let urls = put(&server);
    server.fail("a.txt", Fault::Slow(64 << 10, Duration::from_millis(30)));
    let cache = case.path("cache").display().to_string();
    let mut command = case.command(&["--config", "ds.yaml", "--max-steps", "4", "--out", "run"]);
    let mut child = command.args(["--set", &data(&urls, &cache)]).spawn().unwrap();
    while server.requests() == 0 {
        std::thread::sleep(Duration::from_millis(10));
    }
    let restart = server.kill();
    std::thread::sleep(Duration::from_secs(2));
    let server = restart();
    assert!(child.wait().unwrap().success());
    drop(server);
    assert_eq!(case.losses("run"), local_losses(&case));
}

#[test]
fn download_errors_are_one_line_with_help() {
    let (case, server) = (Case::new(), Server::start());
    let urls = put(&server);
    let failed = |train: &str| {
        let cache = case.path("cache").display().to_string();
        let output = case.run(&["-n", "2", "--set", &data(train, &cache)]);
        let errors = text(&output.stderr);
        assert_eq!((output.status.code().unwrap() > 0, errors.matches("error:").count()), (true, 1), "{errors}");
        errors
    };
    server.fail("b.txt", Fault::Flip { byte: 1_000_000, times: usize::MAX, varies: true });
    let errors = failed(&urls);
    let wanted = format!("error: {} is damaged at byte 1000000: the store states MD5 ", server.url("b.txt"));
    assert!(errors.contains(&wanted) && errors.contains("in: data.train"), "{errors}");
    put(&server);
    server.fail("b.txt", Fault::Status(403, usize::MAX));
    let errors = failed(&urls);
    assert!(errors.contains(&format!("error: {}: access was refused at byte 0: ", server.url("b.txt"))), "{errors}");
    assert!(errors.contains("help: set the credentials"), "{errors}");
    let errors = failed(&server.url("none.txt"));
    assert!(errors.contains(&format!("error: {} does not exist", server.url("none.txt"))), "{errors}");
    let errors = failed(&server.url("*.txt"));
    assert!(errors.contains("a web server does not list its files"), "{errors}");
    let errors = failed("ftp://host/a.txt");
    assert!(errors.contains("`ftp` is not a supported scheme"), "{errors}");
}

#[test]
fn the_cache_keeps_to_its_limit() {
    let (case, server) = (Case::new(), Server::start());
    put(&server);
    let cache = case.path("cache").display().to_string();
    let train = |name: &str, limit: &str| {
        let set = data(&server.url(name), &cache).replace('}', &format!(", cache_limit: {limit}}}"));
        case.run(&["--quiet", "--max-steps", "2", "--out", name, "--set", &set])
    };
    for name in ["a.txt", "b.txt"] {
        let output = train(name, "3MB");
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    let mut kept = vec![];
    let mut folders = vec![case.path("cache/stores")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().flatten() {
            match entry.path().is_dir() {
                true => folders.push(entry.path()),
                false if entry.path().extension().is_some_and(|end| end == "txt") => kept.push(entry.file_name()),
                false => {}
            }
        }
    }
    assert_eq!(kept, ["b.txt"]);
    let output = train("a.txt", "1MB");
    let errors = text(&output.stderr);
    assert!(errors.contains("0 of the cache's 1000000 bytes are in use"), "{errors}");
    assert!(errors.contains("help: increase `data.cache_limit`"), "{errors}");
}
