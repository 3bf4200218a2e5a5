//! The interface of the Hugging Face Hub: lists the files that a repository has at a revision, with their checksums.
//!
//! The hf-hub crate is not used: its current version brings a hundred further crates for a transfer protocol that the
//! Hub does not require, and its older versions bring another HTTP client.

use std::path::PathBuf;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use object_store::path::Path as Key;
use reqwest::StatusCode;
use serde::Deserialize;

use crate::client::http;
use crate::digest::{Checksum, unhex};
use crate::hub_cache::{home, variable};
use crate::location::{Location, RepoKind};
use crate::{Error, Object};

/// A file or folder of a repository.
#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    size: u64,
    /// Git's identity of the file.
    oid: String,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    /// SHA-256 of the content.
    oid: String,
}

#[derive(Deserialize)]
struct Revision {
    sha: String,
}

fn endpoint() -> String {
    variable("HF_ENDPOINT").unwrap_or("https://huggingface.co".into()).trim_end_matches('/').into()
}

/// Returns the address to which the name of a repository's file is appended.
pub(crate) fn files(kind: RepoKind, repo: &str, revision: &str) -> String {
    let prefix = if kind == RepoKind::Model { String::new() } else { format!("{}/", kind.plural()) };
    format!("{}/{prefix}{repo}/resolve/{}", endpoint(), revision.replace('/', "%2F"))
}

/// Returns the header with the user's token.
pub(crate) fn authorization() -> Option<HeaderMap> {
    let file = || variable("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| Some(home()?.join("token")));
    let token = variable("HF_TOKEN").or_else(|| std::fs::read_to_string(file()?).ok())?;
    let mut value: http::HeaderValue = format!("Bearer {}", token.trim()).parse().ok()?;
    value.set_sensitive(true);
    Some(HeaderMap::from_iter([(AUTHORIZATION, value)]))
}

/// Returns the commit that a revision refers to now, so that all files come from one commit.
pub(crate) async fn commit(
    location: &Location,
    (kind, repo, revision): (RepoKind, &str, &str),
) -> Result<String, Error> {
    let revision = revision.replace('/', "%2F");
    let url = format!("{}/api/{}/{repo}/revision/{revision}", endpoint(), kind.plural());
    let found: Revision = parse(location, &get(location, &url).await?.1)?;
    Ok(found.sha)
}

/// Lists the files in a folder of a repository, including those in its subfolders. Returns no files for a missing
/// folder.
pub(crate) async fn list(
    location: &Location,
    (kind, repo, commit): (RepoKind, &str, &str),
    folder: &str,
) -> Result<Vec<Object>, Error> {
    let folder: String = Key::from(folder).parts().map(|part| format!("/{}", part.as_ref())).collect();
    let mut url = Some(format!("{}/api/{}/{repo}/tree/{commit}{folder}?recursive=true", endpoint(), kind.plural()));
    let mut objects = vec![];
    while let Some(page) = url {
        let (next, text) = match get(location, &page).await {
            Err(Error::Missing { .. }) if !folder.is_empty() => return Ok(vec![]),
            page => page?,
        };
        for entry in parse::<Vec<Entry>>(location, &text)?.into_iter().filter(|entry| entry.kind == "file") {
            let checksum = match &entry.lfs {
                Some(lfs) => unhex(&lfs.oid).map(Checksum::Sha256),
                None => unhex(&entry.oid).map(Checksum::GitBlob),
            };
            let key = Key::parse(&entry.path).map_err(|error| Error::Answer {
                address: location.to_string(),
                problem: format!("it lists `{}`: {error}", entry.path),
            })?;
            let version = entry.lfs.map_or(entry.oid, |lfs| lfs.oid);
            objects.push(Object {
                address: location.address(&entry.path),
                location: location.clone(),
                key,
                size: entry.size,
                version: Some(version),
                checksum,
                local: None,
            });
        }
        url = next;
    }
    Ok(objects)
}

fn parse<T: serde::de::DeserializeOwned>(location: &Location, text: &str) -> Result<T, Error> {
    serde_json::from_str(text).map_err(|error| Error::Answer {
        address: location.to_string(),
        problem: format!("the response is not from the Hub: {error}"),
    })
}

/// Returns the address of the next page, and the content.
async fn get(location: &Location, url: &str) -> Result<(Option<String>, String), Error> {
    let address = || location.to_string();
    let unreachable = |error: reqwest::Error| Error::unreachable(address(), 0, &error);
    let request = http().map_err(unreachable)?.get(url).headers(authorization().unwrap_or_default());
    let response = request.send().await.map_err(unreachable)?;
    match response.status() {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            let message = response.headers().get("x-error-message").and_then(|value| value.to_str().ok());
            let message = message.unwrap_or("the Hub requires a token, or the repository does not exist").into();
            return Err(Error::Denied { address: address(), byte: 0, message });
        }
        StatusCode::NOT_FOUND => return Err(Error::Missing { address: address() }),
        _ => {}
    }
    let response = response.error_for_status().map_err(unreachable)?;
    let next = response.headers().get_all("link").iter().filter_map(|value| value.to_str().ok()).find_map(next);
    Ok((next, response.text().await.map_err(unreachable)?))
}

/// Returns the address of the next page in a header `Link`.
fn next(link: &str) -> Option<String> {
    let part = link.split(',').find(|part| part.contains("rel=\"next\""))?;
    Some(part.split_once('<')?.1.split_once('>')?.0.into())
}
