//! Downloads objects in concurrent parts. A broken download resumes after its last complete part. The file is compared
//! with the store's checksum.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::ObjectStore;

use crate::cache::Slot;
use crate::digest::Checksum;
use crate::list::{open, range};
use crate::{Error, Local, Object, Stores, Watch, client};

/// Size of one request in bytes. A part stays in memory until all parts before it are written.
const PART: u64 = 4 << 20;
/// Number of parts that are requested at the same time.
const AT_ONCE: usize = 8;
/// First and longest pause between two attempts.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
/// How often a wait checks whether the caller wants to stop.
const TICK: Duration = Duration::from_millis(50);

impl Stores {
    /// Downloads an object, unless it is on this machine already, and returns the local file.
    ///
    /// # Errors
    /// Fails if the store stays unreachable or refuses access, if the content has changed since the object was listed,
    /// or if it does not match the store's checksum. Also fails if the cache has no room, or if `watch` ends the wait.
    pub fn fetch(&self, object: &Object, watch: &dyn Watch) -> Result<Local, Error> {
        if let Some(path) = &object.local {
            return Ok(Local::of_others(path));
        }
        let slot = Slot::new(&self.folder, object);
        if let Some(local) = slot.present(object)? {
            return Ok(local);
        }
        let lock = slot.lock(watch)?;
        if let Some(local) = slot.shared(&lock, object)? {
            return Ok(local);
        }
        self.make_room(object, &slot)?;
        let part = slot.part();
        let mut is_second = false;
        loop {
            let stated = self.receive(object, &part, watch)?;
            let Some(stated) = stated.or_else(|| object.checksum.clone()) else { break };
            let found = stated.of_file(&part).map_err(Error::local(&part))?;
            if found == stated {
                break;
            }
            // Download once more. If the network damaged the first download, the second one is probably right. If the
            // second one is wrong too, the first byte in which the two differ goes into the error.
            let again = part.with_extension("damaged");
            if is_second {
                let byte = first_difference(&part, &again).map_err(Error::local(&part))?;
                let _ = (fs::remove_file(&part), fs::remove_file(&again));
                let (stated, found) = (stated.to_string(), found.to_string());
                return Err(Error::Corrupt { address: object.address.clone(), stated, found, byte });
            }
            fs::rename(&part, &again).map_err(Error::local(&part))?;
            is_second = true;
        }
        let _ = fs::remove_file(part.with_extension("damaged"));
        fs::rename(&part, slot.content()).map_err(Error::local(&part))?;
        match slot.shared(&lock, object)? {
            Some(local) => Ok(local),
            None => Err(Error::local(&slot.content())(io::ErrorKind::NotFound.into())),
        }
    }

    /// Downloads what the file `part` still lacks, and returns the checksum that the store states.
    fn receive(&self, object: &Object, part: &Path, watch: &dyn Watch) -> Result<Option<Checksum>, Error> {
        let mut file = File::options().append(true).create(true).open(part).map_err(Error::local(part))?;
        let mut done = file.metadata().map_err(Error::local(part))?.len();
        if done > object.size {
            file.set_len(0).map_err(Error::local(part))?;
            done = 0;
        }
        let mut stated = None;
        let mut pause = Pause::new(self.patience);
        while done < object.size {
            let from = done;
            let received = client::runtime().map_err(Error::local(part))?.block_on(async {
                let store = open(&object.location)?;
                let starts = (from..object.size).step_by(PART as usize);
                let parts = stream::iter(starts).map(|start| {
                    let end = object.size.min(start + PART);
                    get(store.as_ref(), object, start..end)
                });
                let mut parts = parts.buffered(AT_ONCE);
                loop {
                    let next = tokio::select! {
                        next = parts.try_next() => next?,
                        () = stopped(watch) => return Err(Error::Stopped),
                    };
                    let Some((bytes, checksum)) = next else { return Ok(()) };
                    file.write_all(&bytes).map_err(Error::local(part))?;
                    done += bytes.len() as u64;
                    stated = checksum.or(stated.take());
                    watch.progress(done, object.size);
                }
            });
            match received {
                Ok(()) => {}
                Err(error) if error.is_transient() => {
                    if done > from {
                        pause = Pause::new(self.patience);
                    }
                    pause.wait(error, watch)?;
                }
                Err(error) => return Err(error),
            }
        }
        file.sync_all().map_err(Error::local(part))?;
        Ok(stated)
    }
}

/// Downloads a range of an object. Returns its bytes and the checksum that the answer states.
async fn get(
    store: &dyn ObjectStore,
    object: &Object,
    bytes: std::ops::Range<u64>,
) -> Result<(Vec<u8>, Option<Checksum>), Error> {
    let mut received = Vec::with_capacity((bytes.end - bytes.start) as usize);
    let failed = |at: usize, error| Error::of(&object.address, bytes.start + at as u64, &error);
    let answer = store.get_opts(&object.key, range(object, bytes.clone())).await.map_err(|error| failed(0, error))?;
    if answer.range != bytes || answer.meta.size != object.size {
        return Err(Error::Changed { address: object.address.clone(), byte: bytes.start });
    }
    let checksum = answer.extensions.get::<Checksum>().cloned();
    let mut stream = answer.into_stream();
    while let Some(piece) = stream.try_next().await.map_err(|error| failed(received.len(), error))? {
        received.extend_from_slice(&piece);
    }
    match received.len() as u64 == bytes.end - bytes.start {
        true => Ok((received, checksum)),
        false => {
            let (address, byte) = (object.address.clone(), bytes.start + received.len() as u64);
            Err(Error::Unreachable { address, byte, message: "the response is too short".into() })
        }
    }
}

/// Completes when the caller wants to stop.
async fn stopped(watch: &dyn Watch) {
    while !watch.is_stopped() {
        tokio::time::sleep(TICK).await;
    }
}

/// Repeats a request as long as it fails with a transient error.
pub(crate) fn patiently<T>(
    patience: Duration,
    watch: &dyn Watch,
    mut request: impl AsyncFnMut() -> Result<T, Error>,
) -> Result<T, Error> {
    let runtime = client::runtime().map_err(Error::local(Path::new("threads")))?;
    let mut pause = Pause::new(patience);
    loop {
        let answer = runtime.block_on(async {
            tokio::select! {
                answer = request() => answer,
                () = stopped(watch) => Err(Error::Stopped),
            }
        });
        match answer {
            Err(error) if error.is_transient() => pause.wait(error, watch)?,
            answer => return answer,
        }
    }
}

/// Growing pauses between attempts, until the allowed time without progress is over.
struct Pause {
    next: Duration,
    ends: Instant,
}

impl Pause {
    fn new(patience: Duration) -> Self {
        Self { next: FIRST_PAUSE, ends: Instant::now() + patience }
    }

    /// Pauses before the next attempt, or returns the error if the allowed time is over.
    fn wait(&mut self, error: Error, watch: &dyn Watch) -> Result<(), Error> {
        let left = self.ends.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(error);
        }
        watch.waits(&error, left);
        let until = Instant::now() + self.next.min(left);
        while Instant::now() < until {
            if watch.is_stopped() {
                return Err(Error::Stopped);
            }
            std::thread::sleep(TICK);
        }
        self.next = (2 * self.next).min(LONGEST_PAUSE);
        Ok(())
    }
}

/// Returns the first byte in which two files differ.
fn first_difference(one: &Path, other: &Path) -> io::Result<Option<u64>> {
    let bytes = |path| File::open(path).map(|file| io::BufReader::new(file).bytes());
    let (mut one, mut other) = (bytes(one)?, bytes(other)?);
    for at in 0.. {
        match (one.next().transpose()?, other.next().transpose()?) {
            (None, None) => break,
            (a, b) if a == b => {}
            _ => return Ok(Some(at)),
        }
    }
    Ok(None)
}
