//! Downloads the files at the store URLs in a configuration. The files that describe a model are downloaded when the
//! configuration is read; the weights are downloaded when a run begins.

use std::path::Path;

use zero_config::Config;
use zero_engine::Error;

use super::checkpoint_store;
use crate::data::remote::{self, Download, describes};
use crate::data::{CacheOptions, DataError, Unwatched, Watch};

const HELP: &str = "use a local path, or a URL such as s3://bucket/key, gs://bucket/key, az://container/key or \
                    hf://datasets/owner/name/file";

/// Allows URLs such as `hf://owner/name` for `model.pretrained` in every configuration that this process reads from now
/// on. [`Trainer::from_args`](crate::Trainer::from_args) calls this function itself.
pub fn read_addresses() {
    zero_config::fetch_pretrained_with(|address| {
        let folder = remote::stores(&CacheOptions::default()).and_then(|stores| {
            stores.fetch_folder(address, describes, &Download::of(&Unwatched)).map_err(remote::failed)
        });
        folder.map_err(|error| {
            let help = match &error {
                DataError::Store { help: Some(help), .. } => (*help).into(),
                _ => "give a folder with config.json and model.safetensors, or hf://owner/name".into(),
            };
            (error.to_string(), help)
        })
    });
}

/// Checks the addresses of a configuration without network requests.
///
/// # Errors
/// Fails at the first invalid address, or if a key that allows only local paths contains an address.
pub(super) fn check(config: &Config) -> Result<(), Error> {
    let check = |key: &str, sources: Option<&[String]>| {
        let mut addresses = sources.unwrap_or_default().iter().filter(|source| zero_config::is_address(source));
        addresses.try_for_each(|source| {
            zero_store::check(source).map_err(|error| Error::setting(key, error.to_string(), HELP))
        })
    };
    if let Some(data) = &config.data {
        check("data.train", data.train.as_deref())?;
        for (index, set) in data.datasets.iter().flatten().enumerate() {
            check(&format!("data.datasets.{index}.path"), Some(&set.path))?;
            check(&format!("data.datasets.{index}.eval"), set.eval.as_deref())?;
        }
        check("data.eval", data.eval.as_deref())?;
        if let zero_config::Tokenizer::File(path) = &data.tokenizer {
            check("data.tokenizer", Some(std::slice::from_ref(path)))?;
        }
    }
    check("training.initial_weights", config.training.initial_weights.as_deref())?;
    let adapter = config.adapter.as_ref().and_then(|adapter| adapter.pretrained.as_ref());
    check("adapter.pretrained", adapter.map(std::slice::from_ref))?;
    let folder = &config.training.output_dir;
    if zero_config::is_address(folder) {
        let message = format!("{folder} is a remote URL, but a run is written to a local folder");
        let help = "set this to a local folder, and `training.checkpoint_store` to the URL";
        return Err(Error::setting("training.output_dir", message, help));
    }
    checkpoint_store::check(config)
}

/// Downloads the weights from which a new run starts. Returns the configuration with their local paths.
///
/// # Errors
/// Fails if a store fails, or if `watch` stops the download.
pub(super) fn fetch_weights(config: &Config, watch: &dyn Watch) -> Result<Config, Error> {
    let (mut config, download) = (config.clone(), Download::of(watch));
    let of = |key: &'static str| move |error: zero_store::Error| Error::from(remote::failed(error)).named(key, HELP);
    if let Some(folder) = config.model.as_ref().and_then(|model| model.pretrained()) {
        zero_store::complete(Path::new(folder), belongs_to_model, &download).map_err(of("model.pretrained"))?;
    }
    let stores = || remote::stores(&CacheOptions::default()).map_err(Error::from);
    if let Some(pretrained) = config.adapter.as_mut().and_then(|adapter| adapter.pretrained.as_mut())
        && zero_config::is_address(pretrained)
    {
        let folder =
            stores()?.fetch_folder(pretrained, belongs_to_model, &download).map_err(of("adapter.pretrained"))?;
        *pretrained = folder.display().to_string();
    }
    if let Some(sources) = &mut config.training.initial_weights {
        let mut files = vec![];
        for source in &*sources {
            if !zero_config::is_address(source) {
                files.push(source.clone());
                continue;
            }
            let (stores, of) = (stores()?, || of("training.initial_weights"));
            for object in stores.list(source, &download).map_err(of())? {
                let local = stores.fetch(&object, &download).map_err(of())?;
                files.push(local.path.display().to_string());
            }
        }
        *sources = files;
    }
    Ok(config)
}

/// Writes a folder to `out`. If `out` is a store URL, writes a temporary folder beside `near` and uploads it.
/// `config.json` and `adapter_config.json` are uploaded last, so that a reader finds either a complete model or none.
///
/// # Errors
/// Fails if `write` fails, if objects already exist at the URL, or if the store fails.
pub fn write_folder<T>(out: &Path, near: &Path, write: impl FnOnce(&Path) -> Result<T, Error>) -> Result<T, Error> {
    let Some(address) = zero_config::address(out) else { return write(out) };
    let (stores, download) = (remote::stores(&CacheOptions::default())?, Download::of(&Unwatched));
    let failed = |error: zero_store::Error| Error::from(remote::failed(error)).named("--out", HELP);
    if let Some(object) = stores.list_folder(address, &download).map_err(failed)?.first() {
        let message = format!("{} already exists", object.address);
        return Err(Error::setting("--out", message, "choose a folder that contains no objects"));
    }
    let folder = near.with_file_name(format!(".export-{}", std::process::id()));
    let is_last = |name: &str| matches!(name, "config.json" | "adapter_config.json");
    let written = write(&folder).and_then(|written| {
        stores.upload_folder(&folder, address, is_last, &download).map_err(failed)?;
        Ok(written)
    });
    let _ = std::fs::remove_dir_all(&folder);
    written
}

/// Returns whether a file of a model's folder describes the model or contains its weights.
fn belongs_to_model(name: &str) -> bool {
    describes(name) || !name.contains('/') && name.ends_with(".safetensors")
}
