//! Second phase: fills in defaults and `auto`, and checks keys against each other.

use std::path::Path;

use crate::batch;
use crate::config::*;
use crate::errors::{ErrorKind, Errors};
use crate::facts::Facts;
use crate::load::load;
use crate::origin::Origins;
use crate::read::node::At;
use crate::read::reader::{Find as _, Read as _, Resolver};
use crate::read::source::Source;
use crate::report::Report;
use crate::rules;
use crate::typed::Typed;
use crate::world::World;
use crate::write::resolved;

impl Typed {
    /// Resolves the configuration for `world_size` ranks. `None` means `launcher.num_processes` ranks. If that key is
    /// not set, the number is the product of the pipeline stages, the ranks that share a sequence, and the
    /// tensor-parallel ranks.
    ///
    /// # Errors
    /// All errors of the configuration, including errors in single values.
    pub fn resolve(&self, world_size: Option<usize>) -> Result<Config, Errors> {
        let (fields, report) = (&self.fields, self.report.clone());
        let (origins, facts) = (Origins::default(), Facts::default());
        let keys = Config::SECTION.keys;
        let mut resolver = Resolver { typed: self, fields, report, origins, facts, keys };
        let world = World::read(&mut resolver, world_size);
        let mut config = config(&mut resolver, world);
        rules::check(&mut config, world, &mut resolver);
        if resolver.report.has_errors() {
            return Err(resolver.report.into_errors());
        }
        let mut origins = resolver.origins;
        origins.seal(resolved::leaves(&config));
        Ok(Config { origins, warnings: resolver.report.into_warnings(), ..config })
    }
}

impl Config {
    /// Reads and resolves the file at `path` for `launcher.num_processes` ranks.
    ///
    /// # Errors
    /// All errors of the configuration.
    pub fn from_path(path: impl AsRef<Path>) -> Result<Self, Errors> {
        load(Source::from_path(path)?, &[])?.resolve(None)
    }

    /// Parses and resolves `text` for `launcher.num_processes` ranks. Messages call it `name`.
    ///
    /// # Errors
    /// All errors of the configuration.
    pub fn parse(name: impl Into<String>, text: impl Into<String>) -> Result<Self, Errors> {
        load(Source { name: name.into(), text: text.into() }, &[])?.resolve(None)
    }

    /// Parses and resolves `text` for `world_size` ranks. Messages call it `name`.
    ///
    /// # Errors
    /// All errors of the configuration.
    pub fn with_world_size(
        name: impl Into<String>,
        text: impl Into<String>,
        world_size: usize,
    ) -> Result<Self, Errors> {
        load(Source { name: name.into(), text: text.into() }, &[])?.resolve(Some(world_size))
    }
}

impl Config {
    /// Returns the keys written as `auto`, each with its resolved value as YAML, or `auto` if only the engine knows
    /// the value.
    pub fn autos(&self) -> Vec<(String, String)> {
        self.leaves().into_iter().filter(|(path, _)| self.typed.fields.is_auto(path)).collect()
    }

    /// Returns the sections `model` and `data`. Training from the command line requires both.
    ///
    /// # Errors
    /// One or both of the sections are missing.
    pub fn model_and_data(&self) -> Result<(&Model, &Data), Errors> {
        match (&self.model, &self.data) {
            (Some(model), Some(data)) => Ok((model, data)),
            (model, data) => {
                let mut report = Report::new(Source { name: self.name.clone(), text: String::new() }, &[]);
                let sections = [
                    (
                        Config::model,
                        model.is_none(),
                        "set the model to train, for example `model: {type: gpt2}`, here or in a second `--config`",
                    ),
                    (
                        Config::data,
                        data.is_none(),
                        "set the training data, for example `data: {train: \"**/*.txt\"}`, here or in a second `--config`",
                    ),
                ];
                for (path, missing, help) in sections {
                    if missing {
                        let message = format!("the `{path}` section is missing");
                        report.error(ErrorKind::Missing, path, At::Default, message, Some(help.to_string()));
                    }
                }
                Err(report.into_errors())
            }
        }
    }
}

fn config(resolver: &mut Resolver<'_>, world: World) -> Config {
    let batch = batch::resolve(resolver, world);
    let mut keys = resolver.top();
    let model = Model::find(&mut keys, Config::model);
    let training = Training::read(&mut keys, Config::training);
    let facts = Facts {
        ranks: world.ranks,
        replicates: world.replicates,
        shards: world.shards,
        batch,
        lr: Optimizer::read(&mut keys, Config::optimizer).lr(),
        max_steps: training.max_steps,
        is_measured: training.cost_table.is_some(),
        width: model.as_ref().and_then(Model::width),
        longest: model.as_ref().and_then(Model::max_sequence_length),
    };
    resolver.facts = facts;
    Config::of(&mut resolver.top())
}
