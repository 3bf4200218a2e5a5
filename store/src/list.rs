//! Finds the objects that an address names.

use std::sync::Arc;

use futures_util::TryStreamExt;
use glob::{MatchOptions, Pattern};
use object_store::path::Path as Key;
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStore};

use crate::download::patiently;
use crate::location::{Location, Service};
use crate::{Error, Object, Stores, Watch, client, hub, hub_cache};

/// Patterns in addresses follow the same rules as patterns for local files.
const MATCHING: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: true };

/// The result of looking up an address. Objects are sorted by address.
#[derive(Debug)]
pub enum Found {
    /// The object at the address, or all objects that match a pattern: one or more.
    Objects(Vec<Object>),
    /// A folder: the objects in it and in the folders below it.
    Folder(Vec<Object>),
}

impl Stores {
    /// Returns the object that an address names, or those that match a pattern, sorted by address.
    ///
    /// # Errors
    /// Fails if no object matches, if the address is a folder, or if the store cannot be used.
    pub fn list(&self, address: &str, watch: &dyn Watch) -> Result<Vec<Object>, Error> {
        match self.find(address, watch)? {
            Found::Objects(objects) => Ok(objects),
            Found::Folder(objects) => Err(Error::Folder { address: address.into(), objects: objects.len() }),
        }
    }

    /// Returns the objects or the folder that an address names.
    ///
    /// # Errors
    /// Fails if the address names neither, or if the store cannot be used.
    pub fn find(&self, address: &str, watch: &dyn Watch) -> Result<Found, Error> {
        let location = Location::parse(address)?;
        if !location.is_pattern() {
            let is_folder = address.ends_with('/') || location.key.is_empty();
            if !is_folder && let Some(object) = patiently(self.patience, watch, async || head(&location).await)? {
                return Ok(Found::Objects(vec![object]));
            }
            if is_folder && matches!(location.service, Service::Http(_)) {
                return Err(unlisted(&location));
            }
            let objects = self.folder_objects(&location, watch)?;
            return match !is_folder && objects.is_empty() {
                true => Err(Error::Missing { address: address.into() }),
                false => Ok(Found::Folder(objects)),
            };
        }
        let pattern = Pattern::new(&location.key)
            .map_err(|error| Error::Address { address: address.into(), problem: error.msg.into() })?;
        let mut objects = patiently(self.patience, watch, async || all(&location, location.literal_folder()).await)?;
        objects.retain(|object| pattern.matches_with(object.key.as_ref(), MATCHING));
        match objects.is_empty() {
            true => Err(Error::NoMatch { pattern: address.into() }),
            false => Ok(Found::Objects(objects)),
        }
    }

    /// Returns all objects in a folder and in the folders below it, sorted by address. Returns no objects for a missing
    /// folder.
    ///
    /// # Errors
    /// Fails if the store cannot be used.
    pub fn list_folder(&self, address: &str, watch: &dyn Watch) -> Result<Vec<Object>, Error> {
        self.folder_objects(&Location::parse(address)?, watch)
    }

    fn folder_objects(&self, location: &Location, watch: &dyn Watch) -> Result<Vec<Object>, Error> {
        if matches!(location.service, Service::Http(_)) {
            return Ok(vec![]);
        }
        patiently(self.patience, watch, async || all(location, location.folder()).await)
    }
}

fn unlisted(location: &Location) -> Error {
    let problem = "a web server does not list its files; give the URL of each file".into();
    Error::Address { address: location.to_string(), problem }
}

/// Opens the store of an address.
pub(crate) fn open(location: &Location) -> Result<Arc<dyn ObjectStore>, Error> {
    client::store(location).map_err(|error| Error::Setup { address: location.to_string(), message: error.to_string() })
}

/// Returns the object at an address, or `None` if there is none.
async fn head(location: &Location) -> Result<Option<Object>, Error> {
    if let Service::Hub { .. } = location.service {
        let folder = location.key.rsplit_once('/').map_or("", |(folder, _)| folder);
        let objects = all(location, folder).await?;
        return Ok(objects.into_iter().find(|object| object.key.as_ref() == location.key));
    }
    let key = key(location)?;
    let options = GetOptions { head: true, ..GetOptions::default() };
    match open(location)?.get_opts(&key, options).await {
        Ok(found) => match object(location, found.meta) {
            Object { version: None, address, .. } => {
                let problem =
                    "the server sends neither `ETag` nor `Last-Modified`, so a changed file could not be detected";
                Err(Error::Answer { address, problem: problem.into() })
            }
            found => Ok(Some(found)),
        },
        Err(object_store::Error::NotFound { .. }) => Ok(None),
        Err(error) => Err(Error::of(&location.to_string(), 0, &error)),
    }
}

/// Returns the objects in a folder and in the folders below it.
async fn all(location: &Location, folder: &str) -> Result<Vec<Object>, Error> {
    let mut objects = match &location.service {
        Service::Http(_) => return Err(unlisted(location)),
        Service::Hub { kind, repo, revision } if hub_cache::is_offline() => {
            hub_cache::list(location, (*kind, repo, revision), folder)?
        }
        Service::Hub { kind, repo, revision } => {
            let commit = hub::commit(location, (*kind, repo, revision)).await?;
            let mut pinned = location.clone();
            pinned.service = Service::Hub { kind: *kind, repo: repo.clone(), revision: commit.clone() };
            hub::list(&pinned, (*kind, repo, &commit), folder).await?
        }
        _ => {
            let store = open(location)?;
            let prefix = Key::parse(folder).map_err(|error| Error::of(&location.to_string(), 0, &error.into()))?;
            let listed: Result<Vec<ObjectMeta>, _> = store.list(Some(&prefix)).try_collect().await;
            let listed = listed.map_err(|error| Error::of(&location.to_string(), 0, &error))?;
            // Some stores have an empty object for each folder.
            let is_file = |meta: &ObjectMeta| meta.size > 0 || !meta.location.as_ref().is_empty();
            listed.into_iter().filter(is_file).map(|meta| object(location, meta)).collect()
        }
    };
    objects.sort_by(|a, b| a.key.cmp(&b.key));
    Ok(objects)
}

pub(crate) fn key(location: &Location) -> Result<Key, Error> {
    // The path of a web address may be percent-encoded. Keys of other stores are written as they are.
    let key = match location.service {
        Service::Http(_) => Key::from_url_path(&location.key),
        _ => Key::parse(&location.key),
    };
    key.map_err(|error| Error::Address { address: location.to_string(), problem: error.to_string() })
}

fn object(location: &Location, meta: ObjectMeta) -> Object {
    let modified = (meta.last_modified.timestamp() > 0).then(|| meta.last_modified.to_rfc3339());
    Object {
        address: location.address(meta.location.as_ref()),
        location: location.clone(),
        size: meta.size,
        version: meta.e_tag.clone().or(modified),
        key: meta.location,
        checksum: None,
        local: None,
    }
}

/// Returns the options of a request for a range of an object. The store then checks, if possible, that the object still
/// has the content that was listed.
pub(crate) fn range(object: &Object, range: std::ops::Range<u64>) -> GetOptions {
    // Requests to the Hub need no condition, because a file's address contains its commit. Requests to web servers have
    // none, because these may ignore such conditions.
    let is_checked = !matches!(object.location.service, Service::Hub { .. } | Service::Http(_));
    let tag = object.version.clone().filter(|version| is_checked && version.contains('"'));
    GetOptions { range: Some(GetRange::Bounded(range)), if_match: tag, ..GetOptions::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_web_addresses_are_percent_encoded() {
        let key = |address: &str| key(&Location::parse(address).unwrap()).unwrap().to_string();
        assert_eq!(key("https://host/a%20b.txt"), "a b.txt");
        assert_eq!(key("https://host/a b.txt"), "a b.txt");
        assert_eq!(key("s3://bucket/a%20b.txt"), "a%20b.txt");
    }
}
