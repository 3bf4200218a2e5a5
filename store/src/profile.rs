//! Reads credentials from `~/.aws`, which object_store does not do: the static keys of a profile, as the AWS command
//! line writes them. The file is read again for each request, so another program may renew the keys at any time.

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use object_store::CredentialProvider;
use object_store::aws::AwsCredential;

/// A profile in the files `credentials` and `config`.
pub(crate) struct Profile {
    name: String,
    pub(crate) region: Option<String>,
    pub(crate) endpoint: Option<String>,
    /// Whether the profile has static keys and the environment has none.
    pub(crate) has_keys: bool,
}

impl fmt::Debug for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "profile {}", self.name)
    }
}

impl Profile {
    /// Returns the profile that `AWS_PROFILE` names, or the profile `default` if it is not set. Returns `None` if
    /// neither file has that profile.
    pub(crate) fn of_environment() -> Option<Self> {
        let name = std::env::var("AWS_PROFILE").ok().filter(|name| !name.is_empty()).unwrap_or("default".into());
        let (credentials, config) = (read(File::Credentials)?, read(File::Config)?);
        let sections = [section(&credentials, &name), section(&config, &config_name(&name))];
        let value = |key: &str| sections.iter().flatten().find_map(|section| value(section, key));
        let has_keys = value("aws_access_key_id").is_some() && value("aws_secret_access_key").is_some();
        let has_none = ["AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"].map(std::env::var_os) == [None, None];
        sections.iter().any(Option::is_some).then(|| Self {
            region: value("region"),
            endpoint: value("endpoint_url"),
            has_keys: has_keys && has_none,
            name,
        })
    }
}

#[async_trait::async_trait]
impl CredentialProvider for Profile {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let missing = |what: &str| object_store::Error::Generic {
            store: "S3",
            source: format!("the profile `{}` in ~/.aws has no {what}", self.name).into(),
        };
        let texts = [
            (read(File::Credentials).unwrap_or_default(), self.name.clone()),
            (read(File::Config).unwrap_or_default(), config_name(&self.name)),
        ];
        let value = |key: &str| texts.iter().find_map(|(text, name)| value(section(text, name)?, key));
        Ok(Arc::new(AwsCredential {
            key_id: value("aws_access_key_id").ok_or_else(|| missing("aws_access_key_id"))?,
            secret_key: value("aws_secret_access_key").ok_or_else(|| missing("aws_secret_access_key"))?,
            token: value("aws_session_token"),
        }))
    }
}

#[derive(Clone, Copy)]
enum File {
    Credentials,
    Config,
}

/// Reads a file of `~/.aws`. A missing file counts as empty. Returns `None` if the file's path depends on `HOME` and
/// `HOME` is not set.
fn read(file: File) -> Option<String> {
    let (variable, name) = match file {
        File::Credentials => ("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
        File::Config => ("AWS_CONFIG_FILE", "config"),
    };
    let path = match std::env::var_os(variable).filter(|path| !path.is_empty()) {
        Some(path) => PathBuf::from(path),
        None => PathBuf::from(std::env::var_os("HOME")?).join(".aws").join(name),
    };
    Some(fs::read_to_string(path).unwrap_or_default())
}

/// Returns the name of a profile's section in `config`. Except for `default`, it begins with the word `profile`.
fn config_name(name: &str) -> String {
    if name == "default" { name.into() } else { format!("profile {name}") }
}

/// Returns the lines of a section.
fn section<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let mut from = None;
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let written = line.trim();
        if written.starts_with('[') && written.ends_with(']') {
            if let Some(from) = from {
                return Some(&text[from..at]);
            }
            if written[1..written.len() - 1].trim() == name {
                from = Some(at + line.len());
            }
        }
        at += line.len();
    }
    from.map(|from| &text[from..])
}

/// Returns the value of a key in a section. Indented lines belong to the key above them.
fn value(section: &str, key: &str) -> Option<String> {
    let lines = section.lines().filter(|line| !line.starts_with([' ', '\t', '#', ';']));
    let mut pairs = lines.filter_map(|line| line.split_once('='));
    let found = pairs.find(|(name, _)| name.trim() == key).map(|(_, value)| value.trim().to_string());
    found.filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_aws_profile_is_read_as_the_aws_cli_writes_it() {
        let text = "# note\n[default]\naws_access_key_id = A\naws_secret_access_key=s=\n\n[other]\nregion = x\ns3 =\n  endpoint_url = no\n";
        assert_eq!(value(section(text, "default").unwrap(), "aws_access_key_id").unwrap(), "A");
        assert_eq!(value(section(text, "default").unwrap(), "aws_secret_access_key").unwrap(), "s=");
        assert_eq!(value(section(text, "default").unwrap(), "region"), None);
        assert_eq!(value(section(text, "other").unwrap(), "region").unwrap(), "x");
        assert_eq!(value(section(text, "other").unwrap(), "endpoint_url"), None);
        assert!(section(text, "none").is_none());
        assert_eq!(config_name("other"), "profile other");
    }
}
