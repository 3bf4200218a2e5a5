//! Downloads from a store that fails: either the file is right, or the error names the object and the byte.

mod server;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use server::{Fault, Server};
use zero_store::{Error, Stores, Watch};

/// Counts the events that a caller would show to its user.
#[derive(Default)]
struct Counts {
    waits: AtomicUsize,
    progress: AtomicUsize,
    is_stopped: AtomicBool,
    /// Called at the first progress.
    at_first: std::sync::Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Watch for Counts {
    fn progress(&self, done: u64, total: u64) {
        assert!(done <= total);
        self.progress.fetch_add(1, Ordering::Relaxed);
        if let Some(call) = self.at_first.lock().unwrap().take() {
            call();
        }
    }

    fn waits(&self, _: &Error, _: Duration) {
        self.waits.fetch_add(1, Ordering::Relaxed);
    }

    fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }
}

/// Returns bytes that do not repeat with the length of a part, so that a misplaced part is noticed.
fn content(length: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}

const MIB: usize = 1 << 20;
const TAG: [(&str, &str); 1] = [("etag", "\"v1\"")];

fn stores(folder: &Path) -> Stores {
    Stores::new(folder, None).patience(Duration::from_secs(20))
}

#[test]
fn an_object_is_downloaded_once() {
    let (server, folder, watch) = (Server::start(), tempfile::tempdir().unwrap(), Counts::default());
    // An empty object, an object of one byte, and an object of several parts with a short last part.
    for length in [0, 1, 9 * MIB + 17] {
        server.put("d/a.txt", content(length), &[("etag", &format!("\"{length}\""))]);
        let stores = stores(folder.path());
        let objects = stores.list(&server.url("d/a.txt"), &watch).unwrap();
        assert_eq!((objects.len(), objects[0].size), (1, length as u64));
        let local = stores.fetch(&objects[0], &watch).unwrap();
        assert_eq!(local.path.file_name().unwrap(), "a.txt");
        assert!(fs::read(&local.path).unwrap() == content(length));
        let before = server.requests();
        assert_eq!(stores.fetch(&objects[0], &watch).unwrap().path, local.path);
        assert_eq!(server.requests(), before);
    }
}

#[test]
fn an_object_that_was_replaced_is_downloaded_again() {
    let (server, folder, watch) = (Server::start(), tempfile::tempdir().unwrap(), Counts::default());
    let stores = stores(folder.path());
    let read = || {
        let object = stores.list(&server.url("a"), &watch).unwrap().remove(0);
        fs::read_to_string(stores.fetch(&object, &watch).unwrap().path).unwrap()
    };
    server.put("a", "one", &TAG);
    assert_eq!(read(), "one");
    server.put("a", "two", &[("etag", "\"v2\"")]);
    assert_eq!(read(), "two");
    // The object is replaced after it was listed.
    let object = stores.list(&server.url("a"), &watch).unwrap().remove(0);
    server.put("a", "three", &[("etag", "\"v3\"")]);
    let other = tempfile::tempdir().unwrap();
    let error = Stores::new(other.path(), None).fetch(&object, &watch).unwrap_err();
    assert_eq!(error.to_string(), format!("{} was replaced in the store while it was read, at byte 0", object.address));
}

#[test]
fn temporary_failures_are_retried() {
    let (server, folder, watch) = (Server::start(), tempfile::tempdir().unwrap(), Counts::default());
    let (stores, length) = (stores(folder.path()), 17 * MIB);
    server.put("a", content(length), &TAG);
    server.fail("a", Fault::Cut(MIB + 5, 3));
    server.fail("a", Fault::Status(503, 5));
    server.fail("a", Fault::Status(429, 2));
    let object = stores.list(&server.url("a"), &watch).unwrap().remove(0);
    let local = stores.fetch(&object, &watch).unwrap();
    assert!(fs::read(local.path).unwrap() == content(length));
}

#[test]
fn a_download_continues_after_the_server_was_killed_and_started_again() {
    let (server, folder, watch) = (Server::start(), tempfile::tempdir().unwrap(), Counts::default());
    let (stores, length) = (stores(folder.path()), 40 * MIB);
    server.put("a", content(length), &TAG);
    server.fail("a", Fault::Slow(256 << 10, Duration::from_millis(5)));
    let object = stores.list(&server.url("a"), &watch).unwrap().remove(0);
    let (send, again) = std::sync::mpsc::channel();
    *watch.at_first.lock().unwrap() = Some(Box::new(move || {
        let restart = server.kill();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_secs(3));
            send.send(restart()).unwrap();
        });
    }));
    let local = stores.fetch(&object, &watch).unwrap();
    assert!(fs::read(local.path).unwrap() == content(length));
    assert!(watch.waits.load(Ordering::Relaxed) > 0);
    drop(again.recv());
}

#[test]
fn an_unreachable_store_is_an_error_that_names_the_byte() {
    let (server, folder, watch) = (Server::start(), tempfile::tempdir().unwrap(), Counts::default());
    let stores = Stores::new(folder.path(), None).patience(Duration::from_millis(500));
    server.put("a", content(9 * MIB), &TAG);
    let object = stores.list(&server.url("a"), &watch).unwrap().remove(0);
    // Every request fails.
    server.fail("a", Fault::Status(500, usize::MAX));
    let error = stores.fetch(&object, &watch).unwrap_err();
    assert!(matches!(error, Error::Unreachable { byte: 0, .. }), "{error}");
    assert!(
        error.to_string().starts_with(&format!("{} could not", object.address))
            || error.to_string().contains("at byte 0"),
        "{error}"
    );
    server.put("a", content(9 * MIB), &TAG);
    server.fail("a", Fault::Cut(100, usize::MAX));
    let error = stores.fetch(&object, &watch).unwrap_err();
    let Error::Unreachable { byte, .. } = error else { panic!("{error}") };
    assert!(byte >= 100, "{byte}");
}

#[test]
fn a_wrong_byte_is_found_by_every_checksum_that_stores_state() {
    use base64::Engine as _;
    use md5::{Digest, Md5};
    let base64 = |bytes: &[u8]| base64::prelude::BASE64_STANDARD.encode(bytes);
    let length = 5 * MIB;
    let right = content(length);
    let md5 = Md5::digest(&right);
    let hex: String = md5.iter().map(|byte| format!("{byte:02x}")).collect();
    let crc = base64(&crc32c::crc32c(&right).to_be_bytes());
    let amazon = vec![("etag", format!("\"{hex}\"")), ("x-amz-request-id", "1".to_string())];
    let google = vec![("etag", "\"g\"".to_string()), ("x-goog-hash", format!("crc32c={crc},md5={}", base64(&md5)))];
    let azure = vec![("etag", "\"z\"".to_string()), ("x-ms-blob-content-md5", base64(&md5))];
    for headers in [amazon, google, azure] {
        let headers: Vec<(&str, &str)> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let (server, watch) = (Server::start(), Counts::default());
        server.put("a", right.clone(), &headers);
        let get = |fault| {
            let folder = tempfile::tempdir().unwrap();
            server.put("a", right.clone(), &headers);
            server.fail("a", fault);
            let object = stores(folder.path()).list(&server.url("a"), &watch).unwrap().remove(0);
            let local = stores(folder.path()).fetch(&object, &watch);
            local.map(|local| fs::read(local.path).unwrap())
        };
        // The fault occurs once, so the second download is right.
        assert!(get(Fault::Flip { byte: 4_300_000, times: 1, varies: false }).unwrap() == right);
        // If a byte differs between the two downloads, the error names it. If it is wrong in the same way each time,
        // the copy in the store is wrong, and the error names no byte.
        let at = |fault| match get(fault).unwrap_err() {
            Error::Corrupt { byte, address, .. } => (byte, address.ends_with("/a")),
            error => panic!("{error}"),
        };
        assert_eq!(at(Fault::Flip { byte: 4_300_000, times: usize::MAX, varies: true }), (Some(4_300_000), true));
        assert_eq!(at(Fault::Flip { byte: 4_300_000, times: usize::MAX, varies: false }), (None, true));
    }
    // The ETag of an object that is encrypted with a KMS key, or that was uploaded in parts, is not an MD5.
    let (server, folder, watch) = (Server::start(), tempfile::tempdir().unwrap(), Counts::default());
    let tag = format!("\"{}\"", "0".repeat(32));
    let headers = [("etag", tag.as_str()), ("x-amz-request-id", "1"), ("x-amz-server-side-encryption", "aws:kms")];
    server.put("a", "x", &headers);
    let object = stores(folder.path()).list(&server.url("a"), &watch).unwrap().remove(0);
    stores(folder.path()).fetch(&object, &watch).unwrap();
}

#[test]
fn refused_access_is_an_error_at_once() {
    let (server, folder, watch) = (Server::start(), tempfile::tempdir().unwrap(), Counts::default());
    server.put("a", content(9 * MIB), &TAG);
    let object = stores(folder.path()).list(&server.url("a"), &watch).unwrap().remove(0);
    for status in [401, 403] {
        server.put("a", content(9 * MIB), &TAG);
        server.fail("a", Fault::Status(status, usize::MAX));
        let error = stores(folder.path()).fetch(&object, &watch).unwrap_err();
        assert!(matches!(&error, Error::Denied { byte: 0, address, .. } if *address == object.address), "{error}");
    }
    assert_eq!(watch.waits.load(Ordering::Relaxed), 0);
}

#[test]
fn a_download_continues_with_a_new_credential_where_the_old_one_expired() {
    let (server, folder, watch) = (Arc::new(Server::start()), tempfile::tempdir().unwrap(), Counts::default());
    let (stores, length) = (stores(folder.path()), 60 * MIB);
    server.put("a", content(length), &TAG);
    let object = stores.list(&server.url("a"), &watch).unwrap().remove(0);
    let expires = Arc::clone(&server);
    *watch.at_first.lock().unwrap() = Some(Box::new(move || expires.fail("a", Fault::Status(403, usize::MAX))));
    let error = stores.fetch(&object, &watch).unwrap_err();
    let Error::Denied { address, byte, .. } = &error else { panic!("{error}") };
    assert!(*address == object.address && *byte >= 4 * MIB as u64, "{error}");
    server.put("a", content(length), &TAG);
    let before = server.requests();
    assert!(fs::read(stores.fetch(&object, &watch).unwrap().path).unwrap() == content(length));
    let parts = (length as u64 - byte).div_ceil(4 << 20);
    assert!((server.requests() - before) as u64 <= parts, "{byte}: {}", server.requests() - before);
}

#[test]
fn a_wait_ends_when_the_caller_stops() {
    let (server, folder, watch) = (Server::start(), tempfile::tempdir().unwrap(), Counts::default());
    server.put("a", content(9 * MIB), &TAG);
    let object = stores(folder.path()).list(&server.url("a"), &watch).unwrap().remove(0);
    server.fail("a", Fault::Slow(1, Duration::from_millis(50)));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            watch.is_stopped.store(true, Ordering::Relaxed);
        });
        assert!(matches!(stores(folder.path()).fetch(&object, &watch), Err(Error::Stopped)));
    });
}

#[test]
fn threads_and_handles_share_one_download() {
    let (server, folder) = (Server::start(), tempfile::tempdir().unwrap());
    server.put("a", content(3 * MIB), &TAG);
    let object = stores(folder.path()).list(&server.url("a"), &Counts::default()).unwrap().remove(0);
    let before = server.requests();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| stores(folder.path()).fetch(&object, &Counts::default()).unwrap());
        }
    });
    assert_eq!(server.requests() - before, 1);
}

#[test]
fn the_least_recently_used_objects_are_evicted() {
    let (server, folder, watch) = (Server::start(), tempfile::tempdir().unwrap(), Counts::default());
    let stores = Stores::new(folder.path(), Some(2500));
    let object = |name: &str| {
        server.put(name, content(1000), &[("etag", &format!("\"{name}\""))]);
        stores.list(&server.url(name), &watch).unwrap().remove(0)
    };
    let (a, b, c, d) = (object("a"), object("b"), object("c"), object("d"));
    let path = |object| {
        let path = stores.fetch(object, &watch).unwrap().path;
        // Time stamps of file systems have a resolution of some milliseconds.
        std::thread::sleep(Duration::from_millis(20));
        path
    };
    let (of_a, of_b) = (path(&a), path(&b));
    path(&a);
    path(&c);
    assert_eq!((of_a.exists(), of_b.exists()), (true, false));
    // Objects in use are not removed.
    let (_a, _c) = (stores.fetch(&a, &watch).unwrap(), stores.fetch(&c, &watch).unwrap());
    let error = stores.fetch(&d, &watch).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("{} has 1000 bytes, but 2000 of the cache's 2500 bytes are in use", d.address)
    );
    assert_eq!(error.help(), Some("increase `data.cache_limit`"));
}

#[test]
fn missing_and_unversioned_objects_are_errors() {
    let (server, folder, watch) = (Server::start(), tempfile::tempdir().unwrap(), Counts::default());
    server.put("a", "x", &[]);
    let list = |path: &str| stores(folder.path()).list(&server.url(path), &watch).unwrap_err();
    assert!(matches!(list("b"), Error::Missing { .. }));
    assert!(matches!(list("*.txt"), Error::Address { .. }));
    // An object without a version is rejected, because a change would go unnoticed.
    assert!(matches!(list("a"), Error::Answer { .. }));
}
