//! Addresses of objects: the store, the object's key in the store, and the local folder that caches the object's
//! content.

use std::fmt;
use std::path::PathBuf;

use object_store::path::Path as Key;

use crate::Error;

/// The store or server of an address.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Service {
    /// Amazon S3 or a compatible store; the bucket.
    S3(String),
    /// Google Cloud Storage; the bucket.
    Gcs(String),
    /// Azure Blob Storage; the container, and the account if the address contains it.
    Azure { container: String, account: Option<String> },
    /// A web server; its scheme, host and port.
    Http(String),
    /// The Hugging Face Hub.
    Hub { kind: RepoKind, repo: String, revision: String },
}

/// The kind of a repository of the Hub.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RepoKind {
    Model,
    Dataset,
    Space,
}

impl RepoKind {
    /// Returns the name of the kind in paths of the Hub's interface.
    pub(crate) fn plural(self) -> &'static str {
        match self {
            Self::Model => "models",
            Self::Dataset => "datasets",
            Self::Space => "spaces",
        }
    }
}

/// An address of an object, a folder or a pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Location {
    /// The part of the address before the key.
    root: String,
    pub(crate) service: Service,
    /// The rest of the address, without a slash at the start.
    pub(crate) key: String,
}

/// Checks an address without sending a request.
///
/// # Errors
/// Fails if its scheme is unknown, or if it has no bucket, container, host or repository.
pub fn check(address: &str) -> Result<(), Error> {
    Location::parse(address).map(drop)
}

impl Location {
    /// Parses an address.
    ///
    /// # Errors
    /// Fails if its scheme is unknown, or if it has no bucket, container, host or repository.
    pub(crate) fn parse(address: &str) -> Result<Self, Error> {
        let invalid = |problem: String| Error::Address { address: address.into(), problem };
        let (scheme, rest) = address.split_once("://").ok_or_else(|| invalid("it has no scheme".into()))?;
        let (first, key) = rest.split_once('/').unwrap_or((rest, ""));
        if first.is_empty() {
            return Err(invalid("there is nothing between `://` and the next `/`".into()));
        }
        let root = |name: &str| format!("{scheme}://{name}");
        let (root, service, key) = match scheme {
            "s3" | "s3a" => (root(first), Service::S3(first.into()), key),
            "gs" => (root(first), Service::Gcs(first.into()), key),
            "az" | "azure" | "abfs" | "abfss" => {
                let (container, account) = match first.split_once('@') {
                    Some((container, host)) => (container, host.split('.').next().map(String::from)),
                    None => (first, None),
                };
                (root(first), Service::Azure { container: container.into(), account }, key)
            }
            "http" | "https" if key.contains(['?', '#']) => {
                return Err(invalid("URLs with `?` or `#` are unsupported".into()));
            }
            "http" | "https" => (root(first), Service::Http(root(first)), key),
            "hf" => {
                let (service, key) = hub(rest).map_err(invalid)?;
                (address[..address.len() - key.len()].trim_end_matches('/').into(), service, key)
            }
            _ => {
                let known = "use s3, gs, az, abfs, abfss, hf, https or http";
                return Err(invalid(format!("`{scheme}` is not a supported scheme; {known}")));
            }
        };
        Ok(Self { root, service, key: key.trim_start_matches('/').into() })
    }

    /// Returns the address of a key in the same bucket, container, host or repository.
    pub(crate) fn address(&self, key: &str) -> String {
        format!("{}/{key}", self.root)
    }

    /// Returns whether the address is a pattern.
    pub(crate) fn is_pattern(&self) -> bool {
        self.key.contains(['*', '?', '['])
    }

    /// Returns the key without slashes at its end.
    pub(crate) fn folder(&self) -> &str {
        self.key.trim_end_matches('/')
    }

    /// Returns the innermost folder that contains all objects that match the pattern.
    pub(crate) fn literal_folder(&self) -> &str {
        let end = self.key.find(['*', '?', '[']).unwrap_or(self.key.len());
        self.key[..end].rsplit_once('/').map_or("", |(folder, _)| folder)
    }

    /// Returns the relative path of the local folder for objects in the same folder as `key`.
    pub(crate) fn local(&self, key: &Key) -> PathBuf {
        let mut path: PathBuf = match &self.service {
            Service::S3(bucket) => ["s3", bucket].iter().collect(),
            Service::Gcs(bucket) => ["gs", bucket].iter().collect(),
            Service::Azure { container, account } => {
                ["az", account.as_deref().unwrap_or(""), container].iter().collect()
            }
            Service::Http(host) => ["http", host.rsplit('/').next().unwrap_or(host)].iter().collect(),
            Service::Hub { kind, repo, .. } => ["hf", kind.plural(), repo].iter().collect(),
        };
        let parts: Vec<_> = key.parts().collect();
        path.extend(parts.iter().rev().skip(1).rev().map(|part| part.as_ref().to_string()));
        path
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.address(&self.key))
    }
}

/// Parses the part of an address after `hf://` in the same way as huggingface_hub's `HfFileSystem`:
/// `[datasets/|spaces/]repo[@revision][/path]`.
fn hub(rest: &str) -> Result<(Service, &str), String> {
    let (kind, rest) = match rest.split_once('/') {
        Some(("datasets", rest)) => (RepoKind::Dataset, rest),
        Some(("spaces", rest)) => (RepoKind::Space, rest),
        Some(("models", rest)) => (RepoKind::Model, rest),
        _ => (RepoKind::Model, rest),
    };
    // The repository is `owner/name`, or a name alone if nothing follows it.
    let ends = rest.match_indices('/').nth(1).map_or(rest.len(), |(end, _)| end);
    let (mut repo, mut key) = (&rest[..ends], rest[ends..].trim_start_matches('/'));
    if let Some((name, _)) = repo.split_once('/')
        && name.contains('@')
    {
        (repo, key) = (name, &rest[name.len() + 1..]);
    }
    let (repo, mut revision) = repo.split_once('@').map_or((repo, "main".into()), |(repo, at)| (repo, at.to_string()));
    // Revisions such as `refs/pr/1` and `refs/convert/parquet` have slashes.
    if revision == "refs" {
        let mut parts = key.splitn(3, '/');
        let (kind, name) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
        revision = format!("refs/{kind}/{name}");
        key = parts.next().unwrap_or("");
    }
    let revision = revision.replace("%2F", "/").replace("%2f", "/");
    let is_name = |name: &str| !name.is_empty() && name != "." && name != "..";
    if !repo.split('/').all(is_name) || revision.is_empty() {
        return Err("it does not name a repository; use `hf://owner/name` or `hf://datasets/owner/name`".into());
    }
    Ok((Service::Hub { kind, repo: repo.into(), revision }, key))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_hub(address: &str) -> (RepoKind, String, String, String) {
        let location = Location::parse(address).unwrap();
        let Service::Hub { kind, repo, revision } = location.service else { panic!("{address}") };
        (kind, repo, revision, location.key)
    }

    #[test]
    fn addresses_have_a_service_and_a_key() {
        let parse = |address: &str| Location::parse(address).map(|location| (location.service, location.key)).unwrap();
        assert_eq!(parse("s3://b/a/c.txt"), (Service::S3("b".into()), "a/c.txt".into()));
        assert_eq!(parse("gs://b"), (Service::Gcs("b".into()), String::new()));
        let azure = |account: Option<&str>| Service::Azure { container: "c".into(), account: account.map(Into::into) };
        assert_eq!(parse("az://c/x"), (azure(None), "x".into()));
        assert_eq!(parse("abfss://c@who.dfs.core.windows.net/x/"), (azure(Some("who")), "x/".into()));
        assert_eq!(parse("http://h:80/a/b"), (Service::Http("http://h:80".into()), "a/b".into()));
    }

    #[test]
    fn addresses_of_the_hub_are_read_as_huggingface_hub_does() {
        let of = |kind, repo: &str, revision: &str, key: &str| (kind, repo.into(), revision.into(), key.into());
        assert_eq!(of_hub("hf://gpt2"), of(RepoKind::Model, "gpt2", "main", ""));
        assert_eq!(of_hub("hf://a/b"), of(RepoKind::Model, "a/b", "main", ""));
        assert_eq!(of_hub("hf://a/b@v1/c/d.json"), of(RepoKind::Model, "a/b", "v1", "c/d.json"));
        assert_eq!(of_hub("hf://gpt2@v1/c"), of(RepoKind::Model, "gpt2", "v1", "c"));
        assert_eq!(of_hub("hf://datasets/a/b/c/*.parquet"), of(RepoKind::Dataset, "a/b", "main", "c/*.parquet"));
        let converted = of_hub("hf://datasets/a/b@refs/convert/parquet/c/0.parquet");
        assert_eq!(converted, of(RepoKind::Dataset, "a/b", "refs/convert/parquet", "c/0.parquet"));
        assert_eq!(of_hub("hf://a/b@refs%2Fpr%2F3/c"), of(RepoKind::Model, "a/b", "refs/pr/3", "c"));
        assert_eq!(Location::parse("hf://a/b@v1/c/*.txt").unwrap().address("c/x.txt"), "hf://a/b@v1/c/x.txt");
    }

    #[test]
    fn wrong_addresses_say_what_is_wrong() {
        let message = |address: &str| Location::parse(address).unwrap_err().to_string();
        assert!(message("ftp://h/x").contains("`ftp` is not a supported scheme"), "{}", message("ftp://h/x"));
        assert!(message("s3:///x").contains("nothing between"));
        assert!(message("https://h/x?y=1").contains("`?`"));
        assert!(message("hf://datasets/").contains("repository"), "{}", message("hf://datasets/"));
        assert!(message("hf://../x").contains("repository"));
    }

    #[test]
    fn patterns_have_a_literal_folder() {
        let folder = |address: &str| Location::parse(address).unwrap().literal_folder().to_string();
        assert_eq!(folder("s3://b/a/c/*.txt"), "a/c");
        assert_eq!(folder("s3://b/a/c-*/d"), "a");
        assert_eq!(folder("s3://b/*"), "");
    }
}
