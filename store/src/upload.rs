//! Uploads files and folders, and moves and removes objects. When a folder is uploaded, the caller may choose files
//! that are uploaded last, once all others are in the store.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use bytes::Bytes;
use object_store::path::Path as Key;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload, WriteMultipart};

use crate::download::patiently;
use crate::files::find;
use crate::list::{key, open};
use crate::location::{Location, Service};
use crate::{Error, Object, Stores, Watch};

/// A file of at most this many bytes is uploaded in one request, a longer file in parts of at least this size.
const PART: u64 = 16 << 20;
/// Maximum number of parts of an object. S3 accepts 10,000.
const PARTS: u64 = 9_000;
/// Number of parts that are sent at the same time.
const AT_ONCE: usize = 4;

impl Stores {
    /// Uploads the files in a folder and in the folders below it to the same names below an address. Files whose
    /// relative names `is_last` accepts are uploaded after all others are in the store.
    ///
    /// # Errors
    /// Fails if a file cannot be read, if the store stays unreachable, or if it refuses a file. Objects that were
    /// uploaded before the failure stay in the store.
    pub fn upload_folder(
        &self,
        folder: &Path,
        address: &str,
        is_last: impl Fn(&str) -> bool,
        watch: &dyn Watch,
    ) -> Result<(), Error> {
        let mut files = vec![];
        find(folder, Path::new(""), &mut files)?;
        files.sort();
        let (last, first): (Vec<_>, Vec<_>) = files.into_iter().partition(|name| is_last(&name.to_string_lossy()));
        for name in first.iter().chain(&last) {
            let to = format!("{}/{}", address.trim_end_matches('/'), name.to_string_lossy());
            self.upload(&folder.join(name), &to, watch)?;
        }
        Ok(())
    }

    /// Uploads a file. Readers see the old object or the new one, never a part of it.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or if the store stays unreachable or refuses the file.
    pub fn upload(&self, file: &Path, address: &str, watch: &dyn Watch) -> Result<(), Error> {
        let location = writable(address)?;
        let key = key(&location)?;
        patiently(self.patience, watch, async || {
            let store = open(&location)?;
            send(store.as_ref(), &key, file, address, watch).await
        })
    }

    /// Removes an object. Succeeds if the object no longer exists.
    ///
    /// # Errors
    /// Fails if the store stays unreachable or refuses the request.
    pub fn remove(&self, object: &Object, watch: &dyn Watch) -> Result<(), Error> {
        let location = writable(&object.address)?;
        patiently(self.patience, watch, async || match open(&location)?.delete(&object.key).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(Error::of(&object.address, 0, &error)),
        })
    }

    /// Moves an object to another address of the same store. The store's servers copy it.
    ///
    /// # Errors
    /// Fails if the store stays unreachable or refuses the request. S3 cannot copy objects above 5 GB.
    pub fn rename(&self, object: &Object, address: &str, watch: &dyn Watch) -> Result<(), Error> {
        let location = writable(address)?;
        let to = key(&location)?;
        patiently(self.patience, watch, async || {
            open(&location)?.rename(&object.key, &to).await.map_err(|error| Error::of(&object.address, 0, &error))
        })
    }
}

/// Checks, without sending a request, that objects can be written below an address.
///
/// # Errors
/// Fails if the address is invalid or its store is read-only.
pub fn check_writable(address: &str) -> Result<(), Error> {
    writable(address).map(drop)
}

fn writable(address: &str) -> Result<Location, Error> {
    let location = Location::parse(address)?;
    match location.service {
        Service::Http(_) | Service::Hub { .. } => {
            let problem = "files can be uploaded only to s3://, gs:// and az://".into();
            Err(Error::Address { address: address.into(), problem })
        }
        _ => Ok(location),
    }
}

async fn send(store: &dyn ObjectStore, key: &Key, path: &Path, address: &str, watch: &dyn Watch) -> Result<(), Error> {
    let failed = |byte: u64, error| Error::of(address, byte, &error);
    let mut file = File::open(path).map_err(Error::local(path))?;
    let length = file.metadata().map_err(Error::local(path))?.len();
    let part_length = PART.max(length.div_ceil(PARTS));
    let mut next = || -> Result<Bytes, Error> {
        let mut bytes = Vec::new();
        (&mut file).take(part_length).read_to_end(&mut bytes).map_err(Error::local(path))?;
        Ok(bytes.into())
    };
    if length <= PART {
        store.put(key, PutPayload::from(next()?)).await.map_err(|error| failed(0, error))?;
        watch.progress(length, length);
        return Ok(());
    }
    let upload = store.put_multipart(key).await.map_err(|error| failed(0, error))?;
    let mut parts = WriteMultipart::new_with_chunk_size(upload, part_length as usize);
    let mut sent = 0;
    loop {
        let part = next()?;
        if part.is_empty() {
            break;
        }
        if let Err(error) = parts.wait_for_capacity(AT_ONCE).await {
            let _ = parts.abort().await;
            return Err(failed(sent, error));
        }
        sent += part.len() as u64;
        parts.put(part);
        watch.progress(sent, length);
    }
    parts.finish().await.map(drop).map_err(|error| failed(sent, error))
}
